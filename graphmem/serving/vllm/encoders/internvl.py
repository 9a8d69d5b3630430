"""InternVL's encoder (``InternVLForConditionalGeneration`` of transformers: InternVL 3 and 3.5): tiles of images, and
frames, of one size.

Followed from vllm 0.32.0, ``model_executor/models/{interns1,interns1_vit}.py``. Attention and the projector are whole
on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted, number
from graphmem.serving.vllm.encoders import parts
from graphmem.serving.vllm.encoders.budget import Items, Pictured
from graphmem.serving.vllm.layers import LayerNorm
from graphmem.serving.vllm.models.base import Encoder, Tower
from graphmem.serving.vllm.run import Batch, Run, Tensor

_CHANNELS = 3


@dataclass(frozen=True)
class InternVL(Encoder):
    """``tiles``: of all items; ``side``: patches of a tile's side; ``merge``: patches of a side that become one."""

    widths: parts.Widths
    layers: int
    patch: int
    side: int
    merge: int
    tiles: int
    items: Items
    text_hidden: int
    biased: bool
    head_norms: bool
    normed: bool

    def tower(self, run: Run, batch: Batch) -> Tower:
        return _Tower(run, self)


def tokens_of(asked: Pictured, limits: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the largest image and of the longest video beside it."""
    tile = _tile_tokens(asked.model)
    image = _tiles(asked) * tile
    frames = max(1, (asked.length - (image if limits["image"] else 0)) // tile)
    return {"image": image, "video": frames * tile}


def encoder(asked: Pictured, items: Items, itemsize: int) -> InternVL:
    """The configuration's encoder. A video is profiled without the image beside which its tokens were counted."""
    model, vision = asked.model, asked.vision
    tiles = _tiles(asked) if items.modality == "image" else max(1, asked.length // _tile_tokens(model))
    patch = _first(vision, "patch_size")
    config = vision.config
    return InternVL(
        parts.Widths(
            count(vision, "hidden_size"), count(vision, "intermediate_size"), count(vision, "num_attention_heads"),
            itemsize,
        ),
        count(vision, "num_hidden_layers"),
        patch,
        _first(vision, "image_size") // patch,
        round(1 / number(model, "downsample_ratio", model.config.get("downsample_ratio"), 0.5)),
        tiles * items.count,
        items,
        count(model, "hidden_size"),
        biased=bool(config.get("attention_bias")),
        head_norms=bool(config.get("use_qk_norm")),
        normed=not config.get("use_mean_pooling", True),
    )  # fmt: skip


def _tile_tokens(model: ServedModel) -> int:
    return count(model, "image_seq_length", 256)


def _tiles(asked: Pictured) -> int:
    """Tiles of an image, and the whole beside them (``GotOcr2ImageProcessor``)."""
    usual, own = asked.scopes("images_kwargs")
    values = {**usual, **own}
    cut = values.get("crop_to_patches")
    if cut is None:
        raise UsageError(
            f"{asked.model.name}: whether images are cut into tiles is said by crop_to_patches in "
            "preprocessor_config.json; put that beside the configuration, or give "
            "--mm-processor-kwargs '{\"crop_to_patches\": true}'"
        )
    most = counted(asked.model, "max_patches", values.get("max_patches"), 12)
    return most + 1 if cut and most > 1 else 1


def _first(vision: ServedModel, name: str) -> int:
    value = vision.config.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    elif isinstance(value, list):
        raise UsageError(f"{vision.name}: {name} is {shown(value)}; accepted: one size, or the same twice")
    return counted(vision, name, value)


class _Attention:
    """Queries, keys and values one by one."""

    def __init__(self, run: Run, name: str, shape: InternVL) -> None:
        self.run, self.name, self.widths = run, name, shape.widths
        hidden, size = shape.widths.hidden, shape.widths.itemsize
        self.parts = [
            parts.linear(run, f"{name}.{one}_proj", hidden, [hidden], size, bias=shape.biased) for one in "qkv"
        ]
        self.norms = [parts.RMSNorm(run, f"{name}.{one}_norm", hidden, size) for one in "qk" if shape.head_norms]
        self.proj = parts.linear(run, f"{name}.projection_layer", hidden, [hidden], size)

    def __call__(self, sequences: parts.Sequences) -> Tensor:
        """The projected output; the input is the caller's."""
        made = [part(sequences.rows) for part in self.parts]
        for index, norm in enumerate(self.norms):
            made[index] = self.run.replacing(made[index], norm(sequences.rows))
        self.run.enter(self.name)
        output = parts.attended(self.run, sequences, self.widths.heads, self.widths)
        return self.run.replacing(output, *made, self.proj(sequences.rows))


class _Block(parts.SummedBlock):
    """``InternS1VisionLayer``: the outputs of attention and the feed-forward layer are scaled."""

    def __init__(self, run: Run, name: str, shape: InternVL) -> None:
        self.run = run
        hidden, size = shape.widths.hidden, shape.widths.itemsize
        self.attention = _Attention(run, f"{name}.attention", shape)
        self.mlp = parts.feed_forward(run, f"{name}.mlp", shape.widths)
        self.norms = [LayerNorm(run, f"{name}.layernorm_{one}", hidden, size) for one in ("before", "after")]
        for number_ in (1, 2):
            ones = run.new(hidden * size)
            run.new(hidden * size, f"{name}.lambda_{number_}")
            run.free(ones)

    def added(self, output: Tensor) -> Tensor:
        return super().added(self.run.replacing(output, self.run.new(output.bytes, "scaled")))


class _Tower(Tower):
    """``InternS1VisionModel`` and the projector."""

    def __init__(self, run: Run, shape: InternVL) -> None:
        self.run, self.shape = run, shape
        size, hidden, tokens = shape.widths.itemsize, shape.widths.hidden, shape.side**2 + 1
        self.rows = shape.tiles * tokens
        name = "vision_tower.embeddings"
        run.new(hidden * size, f"{name}.cls_token")
        run.new(hidden * _CHANNELS * shape.patch**2 * size, f"{name}.patch_embeddings.projection.weight")
        run.new(hidden * size, f"{name}.patch_embeddings.projection.bias")
        run.new(tokens * hidden * size, f"{name}.position_embeddings")
        self.blocks = [_Block(run, f"vision_tower.encoder.layer.{index}", shape) for index in range(shape.layers)]
        self.norm = LayerNorm(run, "vision_tower.layernorm", hidden, size) if shape.normed else None
        name, wide = "multi_modal_projector", hidden * shape.merge**2
        self.projected = LayerNorm(run, f"{name}.layer_norm", wide, size)
        self.first = parts.linear(run, f"{name}.linear_1", wide, [shape.text_hidden], size)
        self.second = parts.linear(run, f"{name}.linear_2", shape.text_hidden, [shape.text_hidden], size)

    def inputs(self) -> Tensor:
        shape = self.shape
        self.run.enter("vision_tower")
        values = shape.tiles * shape.side**2 * _CHANNELS * shape.patch**2
        return self.run.new(values * shape.widths.itemsize, "pixels")

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        width = shape.widths.hidden * shape.widths.itemsize
        patches = shape.tiles * shape.side**2
        states = self._states(patches * width, self.rows * width)
        once = run.new(patches * width, "patches side by side")
        merged = run.replacing(once, states, run.new(patches * width, "merged"))
        return [run.replacing(merged, self._project(patches // shape.merge**2))]

    def _states(self, patch_bytes: int, size: int) -> Tensor:
        """The last hidden states."""
        run, shape = self.run, self.shape
        joined = run.replacing(run.new(patch_bytes, "patches"), run.new(size, "with class tokens"))
        first = run.replacing(joined, run.new(size, "with positions"))
        sequences = parts.Sequences(self.rows, shape.tiles, shape.side**2 + 1, known=False)
        hidden = parts.through(run, self.blocks, first, sequences, keeps_first=True)
        if hidden is not first:
            run.free(first)
        return hidden if self.norm is None else run.replacing(hidden, self.norm(self.rows))

    def _project(self, rows: int) -> Tensor:
        """Embeddings; the input is the caller's."""
        run, first = self.run, self.run.replacing(self.projected(rows), self.first(rows))
        acted = run.replacing(first, run.new(first.bytes, "activated"))
        return run.replacing(acted, self.second(rows))
