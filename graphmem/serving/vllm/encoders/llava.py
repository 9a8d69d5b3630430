"""Encoders of images of one size, and Pixtral's of any size: CLIP, SigLIP and Pixtral as LLaVA, Gemma 3 and Mistral 3
have them.

Followed from vllm 0.32.0, ``model_executor/models/{clip,siglip,pixtral,llava,gemma3_mm,mistral3}.py``, and of Pixtral's
rotary tables transformers' ``models/pixtral/modeling_pixtral.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted, mapping
from graphmem.serving.vllm.encoders import parts
from graphmem.serving.vllm.encoders.budget import Items, Pictured
from graphmem.serving.vllm.layers import LayerNorm, turned_by_halves
from graphmem.serving.vllm.models.base import Encoder, Tower
from graphmem.serving.vllm.models.decoder import Norm
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.trace import Category

#: ``model_type`` of encoders that are followed.
CLIP, SIGLIP, PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
#: What transformers' configurations of these have where nothing is said.
DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32,
    },
    SIGLIP: {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 16,
    },
    PIXTRAL: {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 1024, "patch_size": 16,
    },
}  # fmt: skip
_CHANNELS = 3


@dataclass(frozen=True)
class Images(Encoder):
    """An encoder of images and the projector of its states to the language model's width. ``side``: patches of an
    image's side; ``merge``: patches side by side that become one embedding; ``text_hidden``: the language model's
    width; ``biased``: its projector has biases; ``quick``: its activation is QuickGELU; ``grid``: crops (down, across)
    that an image has besides the whole; ``selects``: the class token is left out."""

    model: str
    kind: str
    widths: parts.Widths
    layers: int
    patch: int
    side: int
    items: Items
    text_hidden: int
    merge: int = 1
    biased: bool = True
    quick: bool = False
    grid: tuple[int, int] = (0, 0)
    selects: bool = True

    def tower(self, run: Run, batch: Batch) -> Tower:
        return _MODELS[self.model](run, self)

    @property
    def patches(self) -> int:
        """Of all images."""
        return self.views * self.side**2

    @property
    def views(self) -> int:
        """Images, and the crops of all."""
        return self.items.count * (1 + self.grid[0] * self.grid[1])


def tokens_of(asked: Pictured, limits: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the largest image."""
    model, vision = asked.model, asked.vision
    side, merge = _side(asked)
    tokens = (side // merge) ** 2
    if asked.kind == "gemma3":
        tokens = count(model, "mm_tokens_per_image", 256)
    whole = vision.config.get("model_type") == CLIP and model.config.get("vision_feature_select_strategy") == "full"
    tokens += 1 if whole else 0
    if asked.kind == "llava_next":
        down, across = _largest_grid(model, vision)
        tokens += down * across * side**2 + down * side
    return {"image": tokens}


def _largest_grid(model: ServedModel, vision: ServedModel) -> tuple[int, int]:
    """Crops (down, across) of the image with most embeddings: of a grid's own size, so that nothing is padded. Every
    row of embeddings ends with one more (``get_image_size_with_most_features``, llava_next.py)."""
    size, points = count(vision, "image_size"), model.config.get("image_grid_pinpoints")
    if not isinstance(points, list) or not points or not all(isinstance(one, list) and len(one) == 2 for one in points):
        raise UsageError(
            f"{model.name}: image_grid_pinpoints is {shown(points)}; accepted: a list of heights and widths"
        )
    grids = [
        (counted(model, "height", down, least=size) // size, counted(model, "width", across, least=size) // size)
        for down, across in points
    ]
    side = size // count(vision, "patch_size")
    return max(grids, key=lambda grid: grid[0] * grid[1] * side**2 + grid[0] * side)


def encoder(asked: Pictured, items: Items, itemsize: int) -> Images:
    """The encoder that the configuration describes."""
    model, vision = asked.model, asked.vision
    side, merge = _side(asked)
    layers, kind = count(vision, "num_hidden_layers"), str(vision.config.get("model_type"))
    widths = parts.Widths(
        count(vision, "hidden_size"), count(vision, "intermediate_size"), count(vision, "num_attention_heads"), itemsize
    )
    return Images(
        asked.kind,
        kind,
        widths,
        layers if asked.kind == "gemma3" else _feature_layers(asked, layers),
        count(vision, "patch_size"),
        side,
        items,
        count(model, "hidden_size"),
        merge,
        selects=model.config.get("vision_feature_select_strategy") != "full",
        grid=_largest_grid(model, vision) if asked.kind == "llava_next" else (0, 0),
        quick=vision.config.get("hidden_act", "quick_gelu" if kind == CLIP else "") == "quick_gelu",
        biased=bool(model.config.get("multimodal_projector_bias", asked.kind.startswith("llava"))),
    )


def _side(asked: Pictured) -> tuple[int, int]:
    """(patches of the largest image's side, of those one embedding's)."""
    model, vision = asked.model, asked.vision
    patch, size = count(vision, "patch_size"), count(vision, "image_size")
    if vision.config.get("model_type") != PIXTRAL:
        return size // patch, 1
    merge = count(model, "spatial_merge_size", 2) if asked.kind == "mistral3" else 1
    if merge > 1:
        for values in asked.scopes("images_kwargs"):
            sizes = mapping(ServedModel(model.name, values), "size")
            size = counted(model, "longest_edge of size", sizes.get("longest_edge"), size)
    return ((size - 1) // (patch * merge) + 1) * merge, merge


def _feature_layers(asked: Pictured, layers: int) -> int:
    """Layers up to the deepest whose states are taken (``_get_num_hidden_layers``)."""
    deepest = asked.model.config.get("vision_feature_layer", -2 if asked.kind.startswith("llava") else -1)
    if type(deepest) is not int or not -layers <= deepest <= layers:
        name = asked.model.name
        raise UsageError(f"{name}: vision_feature_layer is {shown(deepest)}; accepted: one of {layers} layers")
    return deepest if deepest >= 0 else layers + deepest + 1


class _Vision(ABC):
    """The transformer of an encoder."""

    @abstractmethod
    def states(self) -> Tensor:
        """The hidden states of all patches that are taken."""


class _Images(Tower):
    """An encoder of images and its projector."""

    #: Bytes of a value of a pixel where pixels come as bytes, None where they come in the model's type.
    value_bytes: int | None = None

    def __init__(self, run: Run, shape: Images) -> None:
        self.run, self.shape = run, shape

    def inputs(self) -> Tensor:
        self.run.enter("vision_tower")
        size = self.value_bytes or self.shape.widths.itemsize
        return self.run.new(self.shape.patches * self.shape.patch**2 * _CHANNELS * size, "pixels")


class _Clip(_Vision):
    """``CLIPVisionModel``: a sum is a new tensor; a class token goes first."""

    def __init__(self, run: Run, shape: Images) -> None:
        self.run, self.shape = run, shape
        size, hidden, tokens = shape.widths.itemsize, shape.widths.hidden, shape.side**2 + 1
        self.rows = shape.views * tokens
        self.positions = tokens * hidden * size
        run.new(hidden * size, "vision_tower.class_embedding")
        run.new(hidden * _CHANNELS * shape.patch**2 * size, "vision_tower.patch_embedding.weight")
        run.new(self.positions, "vision_tower.position_embedding.weight")
        run.new(tokens * 8, "vision_tower.position_ids", Category.BUFFER)
        self.norm = LayerNorm(run, "vision_tower.pre_layrnorm", hidden, size)
        self.blocks = [
            _ClipBlock(run, f"vision_tower.layers.{index}", shape.widths, quick=shape.quick)
            for index in range(shape.layers)
        ]

    def states(self) -> Tensor:
        run, shape = self.run, self.shape
        size = self.rows * shape.widths.hidden * shape.widths.itemsize
        run.enter("vision_tower.embeddings")
        patches = run.new(shape.patches * shape.widths.hidden * shape.widths.itemsize, "patches")
        joined = run.new(size, "with class tokens")
        positions = run.new(self.positions, "learned positions")
        embedded = run.replacing(positions, joined, patches, run.new(size, "with positions"))
        hidden = run.replacing(embedded, self.norm(self.rows))
        first, sequences = hidden, parts.Sequences(self.rows, shape.views, self.rows // shape.views, known=False)
        hidden = parts.through(run, self.blocks, hidden, sequences, keeps_first=True)
        if hidden is not first:
            run.free(first)
        return hidden


class _ClipBlock(parts.SummedBlock):
    """``CLIPEncoderLayer``."""

    def __init__(self, run: Run, name: str, widths: parts.Widths, *, quick: bool = False) -> None:
        self.run = run
        self.attention = parts.Attention(run, f"{name}.self_attn", widths, named=("qkv_proj", "out_proj"))
        first = LayerNorm(run, f"{name}.layer_norm1", widths.hidden, widths.itemsize)
        self.mlp = parts.feed_forward(run, f"{name}.mlp", widths, quick=quick)
        self.norms = [first, LayerNorm(run, f"{name}.layer_norm2", widths.hidden, widths.itemsize)]


class _Siglip(_Vision):
    """``SiglipVisionModel``: sums are made in place. ``normed``: its last states are normed."""

    def __init__(self, run: Run, shape: Images, *, normed: bool) -> None:
        self.run, self.shape = run, shape
        size, hidden, tokens = shape.widths.itemsize, shape.widths.hidden, shape.side**2
        self.rows = shape.patches
        self.positions = tokens * hidden * size
        run.new(hidden * _CHANNELS * shape.patch**2 * size, "vision_tower.patch_embedding.weight")
        run.new(hidden * size, "vision_tower.patch_embedding.bias")
        run.new(self.positions, "vision_tower.position_embedding.weight")
        run.new(tokens * 8, "vision_tower.position_ids", Category.BUFFER)
        self.blocks = [_SiglipBlock(run, f"vision_tower.layers.{one}", shape.widths) for one in range(shape.layers)]
        self.norm = LayerNorm(run, "vision_tower.post_layernorm", hidden, size) if normed else None

    def states(self) -> Tensor:
        run, shape = self.run, self.shape
        run.enter("vision_tower.embeddings")
        embedded = run.new(self.rows * shape.widths.hidden * shape.widths.itemsize, "patches")
        run.temporary(self.positions)
        sequences = parts.Sequences(self.rows, shape.views, self.rows // shape.views, known=False)
        # The first layer's input lies channel by channel, which its norm puts in order first.
        hidden = run.replacing(run.new(embedded.bytes, "patches in order"), self.blocks[0](sequences))
        hidden = parts.through(run, self.blocks[1:], hidden, sequences, keeps_first=False)
        if self.norm is not None:
            hidden = run.replacing(hidden, self.norm(self.rows))
        return run.replacing(embedded, hidden)


class _SiglipBlock(_ClipBlock):
    """``SiglipEncoderLayer``: adds in place."""

    def added(self, output: Tensor) -> Tensor:
        return output


class _Pixtral(_Vision):
    """``PixtralHFVisionModel``. ``normalises``: pixels come as bytes (Mistral 3), else as numbers."""

    def __init__(self, run: Run, shape: Images, *, normalises: bool) -> None:
        self.run, self.shape, self.normalises = run, shape, normalises
        widths, size, hidden = shape.widths, shape.widths.itemsize, shape.widths.hidden
        self.rows = shape.patches
        for side in ("weight", "bias") if normalises else ():
            run.new(_CHANNELS * 4, f"vision_tower.input_norm.{side}", Category.BUFFER)
        run.new(hidden * _CHANNELS * shape.patch**2 * size, "vision_tower.patch_conv.weight")
        self.norm = parts.RMSNorm(run, "vision_tower.ln_pre", hidden, size)
        self.blocks = [
            _PixtralBlock(run, f"vision_tower.transformer.layers.{index}", widths) for index in range(shape.layers)
        ]
        for _ in range(2):
            run.new(widths.head_dim // 2 * 4, "vision_tower.patch_positional_embedding.inv_freq", Category.BUFFER)

    def states(self) -> Tensor:
        run, shape = self.run, self.shape
        held = self._patches()
        run.enter("vision_tower.patch_positional_embedding")
        positions = run.new(self.rows * 2 * 8, "positions")
        held += [positions, *self._rotary_tables()]
        sequences = parts.Sequences(self.rows, shape.items.count, shape.side**2)
        held.append(run.new((sequences.count + 1) * 4, "ends of sequences"))
        hidden = parts.through(run, self.blocks, held[0], sequences, keeps_first=True)
        run.free(*(one for one in held if one is not hidden))
        return hidden

    def _patches(self) -> list[Tensor]:
        """(normed patches, further tensors held of them)."""
        run, size = self.run, self.rows * self.shape.widths.hidden * self.shape.widths.itemsize
        pixels = self.rows * _CHANNELS * self.shape.patch**2
        run.enter("vision_tower.patch_conv")
        if self.normalises:
            packed = run.new(pixels, "packed patches")
            normalised = run.new(pixels * self.shape.widths.itemsize, "normalised patches")
            projected = [run.replacing(normalised, packed, run.matmul(size, "patches"))]
            return [self.norm(self.rows), *projected]
        count = self.shape.items.count
        projected = [run.new(size // count, "patches of an image") for _ in range(count)]
        joined = run.new(size, "patches")
        return [run.replacing(joined, self.norm(self.rows)), *projected]

    def _rotary_tables(self) -> list[Tensor]:
        """``PixtralRotaryEmbedding``: made anew for every batch, in fp32; rows and columns are put together."""
        run = self.run
        wide = self.rows * self.shape.widths.head_dim * 4
        angles = run.replacing(run.new(self.rows * 8), run.new(wide))
        # Cosines and sines, and each times a factor.
        tables = [run.replacing(run.new(wide), run.new(wide)) for _ in range(2)]
        composed = [run.replacing(run.new(wide // 2), table, run.new(wide)) for table in tables]
        made = [run.new(wide * self.shape.widths.itemsize // 4, "rotary table") for _ in range(2)]
        run.free(*composed, angles)
        return made


class _PixtralAttention(parts.Attention):
    """Turned by torch operators: queries times cosines, and halves that change places times sines."""

    def rotated(self, rows: int) -> list[Tensor]:
        size = rows * self.width * self.widths.itemsize
        return [turned_by_halves(self.run, size, "rotated") for _ in range(2)]


class _PixtralBlock(parts.Block):
    """``PixtralHFTransformerBlock``, which holds attention's output until the feed-forward layer has."""

    def __init__(self, run: Run, name: str, widths: parts.Widths) -> None:
        self.run = run
        first = parts.RMSNorm(run, f"{name}.attention_norm", widths.hidden, widths.itemsize)
        self.attention = _PixtralAttention(
            run, f"{name}.attention", widths, bias=False, named=("qkv_proj", "o_proj")
        )  # fmt: skip
        self.mlp = parts.GatedFeedForward(run, f"{name}.feed_forward", widths, bias=False)
        self.norms = [first, parts.RMSNorm(run, f"{name}.ffn_norm", widths.hidden, widths.itemsize)]

    def __call__(self, sequences: parts.Sequences) -> Tensor:
        run, rows = self.run, sequences.rows
        attended = run.replacing(self.norms[0](rows), self.attention(sequences))
        middle = run.new(attended.bytes, "with attention")
        fed = run.replacing(attended, self.mlp(rows, given=self.norms[1](rows)))
        return run.replacing(fed, middle, run.new(fed.bytes, "with the feed-forward layer"))


class _Llava(_Images):
    """``LlavaForConditionalGeneration``'s encoder and projector."""

    def __init__(self, run: Run, shape: Images) -> None:
        super().__init__(run, shape)
        self.vision: _Vision
        if shape.kind == CLIP:
            self.vision = _Clip(run, shape)
        elif shape.kind == SIGLIP:
            self.vision = _Siglip(run, shape, normed=False)
        else:
            self.vision = _Pixtral(run, shape, normalises=False)
        if shape.model == "llava_next":
            run.new(shape.text_hidden * shape.widths.itemsize, "image_newline")
        self.projector = _projector(run, shape)

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        states = [self.vision.states()]
        if shape.kind == PIXTRAL:
            states.append(run.new(states[0].bytes, "patches of all images"))
        whole = shape.side**2 + (0 if shape.selects or shape.kind != CLIP else 1)
        embedded = run.replacing(*states, self.projector(shape.views * whole))
        if shape.model != "llava_next":
            return [embedded]
        made = [self._put_together() for _ in range(shape.items.count)]
        run.free(embedded)
        return made

    def _put_together(self) -> Tensor:
        """The crops of one image in their places, an embedding more at the end of every row, and the whole before them
        (``_merge_image_patch_embeddings``, llava_next.py)."""
        run, shape, width = self.run, self.shape, self.shape.text_hidden * self.shape.widths.itemsize
        crops = shape.grid[0] * shape.grid[1] * shape.side**2 * width
        placed = run.new(crops, "crops in their places")
        ended = run.replacing(placed, run.new(crops + shape.grid[0] * shape.side * width, "with ends of rows"))
        return run.replacing(ended, run.new(ended.bytes + shape.side**2 * width, "embeddings of an image"))


def _projector(run: Run, shape: Images) -> parts.FeedForward:
    """Two layers into the language model's width."""
    named, width = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"), shape.text_hidden
    return parts.FeedForward(
        run, named, shape.widths.hidden, width, width, shape.widths.itemsize, what="projected channels",
        bias=shape.biased,
    )  # fmt: skip


class _Gemma3(_Images):
    """``Gemma3ForConditionalGeneration``'s: states are pooled to a fixed number of tokens."""

    def __init__(self, run: Run, shape: Images) -> None:
        super().__init__(run, shape)
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        self.vision = _Siglip(run, shape, normed=True)
        run.new(hidden * shape.text_hidden * size, "multi_modal_projector.mm_input_projection_weight")
        self.norm = Norm(run, "multi_modal_projector.mm_soft_emb_norm", hidden, size, "gemma")

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        states = self.vision.states()
        run.enter("multi_modal_projector")
        planes = run.new(states.bytes, "states channel by channel")
        rows = shape.items.count * isqrt(shape.items.tokens) ** 2
        pooled = run.new(rows * hidden * size, "pooled")
        normed = self.norm.plain(rows)
        ordered = run.new(normed.bytes, "normed, in order")
        embedded = run.matmul(rows * shape.text_hidden * size, "embeddings")
        return [run.replacing(ordered, normed, pooled, planes, states, embedded)]


class _Mistral3(_Images):
    """``Mistral3ForConditionalGeneration``'s: four patches become one."""

    value_bytes = 1

    def __init__(self, run: Run, shape: Images) -> None:
        super().__init__(run, shape)
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        self.vision = _Pixtral(run, shape, normalises=True)
        self.norm = parts.RMSNorm(run, "multi_modal_projector.norm", hidden, size)
        run.new(shape.merge**2 * hidden * hidden * size, "multi_modal_projector.patch_merger.merging_layer.weight")
        self.projector = _projector(run, shape)

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        states = self.vision.states()
        joined = run.new(states.bytes, "patches of all images")
        normed = self.norm(shape.patches)
        run.enter("multi_modal_projector.patch_merger")
        unfolded = []
        for _ in range(shape.items.count):
            unfolded.append(run.new(states.bytes // shape.items.count, "patches side by side"))
            run.temporary(unfolded[-1].bytes)
        together = run.new(states.bytes, "patches side by side")
        merged = run.replacing(together, *unfolded, normed, run.matmul(states.bytes // shape.merge**2, "merged"))
        return [run.replacing(merged, joined, states, self.projector(shape.patches // shape.merge**2))]


_MODELS: dict[str, Callable[[Run, Images], Tower]] = {
    "llava": _Llava,
    "llava_next": _Llava,
    "gemma3": _Gemma3,
    "mistral3": _Mistral3,
}
