"""The encoder of GLM-4.1V, 4.5V and 4.6V: patches of images and videos of any size, merged by a convolution.

Followed from vllm 0.32.0, ``model_executor/models/glm4_1v.py``, and of sizes transformers' ``smart_resize`` of GLM-4V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, sqrt

from graphmem.serving.values import count
from graphmem.serving.vllm.encoders import parts
from graphmem.serving.vllm.encoders.budget import Items, Pictured
from graphmem.serving.vllm.encoders.qwen import GatedBlock, Grid, PatchTower, Qwen, pixels_of
from graphmem.serving.vllm.layers import LayerNorm
from graphmem.serving.vllm.models.base import Tower
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.trace import Category

#: The sides of the image that the engine asks the processor about, and frames of a video that it tries.
_SIDE, _FRAMES = 9_999_999, 600
#: Pixels of an image and of a video by the published processors' files.
_PIXELS, _VIDEO_PIXELS = 9_633_792, 100_352_000
_WIDE = 4


@dataclass(frozen=True)
class Glm(Qwen):
    """``context``: inner channels of what puts patches together."""

    context: int = 0

    def whole(self, run: Run, batch: Batch) -> Tower:
        return _Glm(run, self)


def tokens_of(asked: Pictured, limits: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the largest image and of the largest video."""
    image, video = _grids(asked, limits.get("image", 0))
    merged = count(asked.vision, "spatial_merge_size", 2) ** 2
    return {"image": image.patches // merged, "video": video.patches // merged}


def encoder(asked: Pictured, items: Items, itemsize: int) -> Glm:
    """The encoder that the configuration describes."""
    vision, text_hidden = asked.vision, count(asked.model, "hidden_size")
    image, video = _grids(asked, dict(items.limits).get("image", 0))
    patch, out = count(vision, "patch_size", 14), count(vision, "out_hidden_size", text_hidden)
    return Glm(
        asked.kind, parts.Widths(count(vision, "hidden_size"), out, count(vision, "num_heads", 12), itemsize),
        count(vision, "depth", 24),
        count(vision, "in_channels", 3) * count(vision, "temporal_patch_size", 2) * patch**2,
        count(vision, "spatial_merge_size", 2), out, items, image if items.modality == "image" else video, text_hidden,
        positions=(count(vision, "image_size", 336) // patch) ** 2, context=count(vision, "intermediate_size"),
    )  # fmt: skip


def _grids(asked: Pictured, images: int) -> tuple[Grid, Grid]:
    """Grids in patches: (of the largest image, of the largest video that fits beside so many images)."""
    vision = asked.vision
    patch, merge = count(vision, "patch_size", 14), count(vision, "spatial_merge_size", 2)
    deep, unit = count(vision, "temporal_patch_size", 2), patch * merge

    def resized(frames: int, side: int, pixels: int) -> Grid:
        rounded = max(1, round(side / unit)) * unit
        frames = max(frames, deep)
        if round(frames / deep) * deep * rounded**2 > pixels:
            rounded = max(unit, floor(side / sqrt(frames * side**2 / pixels) / unit) * unit)
        return Grid(-(-frames // deep), rounded // patch, rounded // patch)

    image = resized(1, _SIDE, pixels_of(asked, "images_kwargs", _PIXELS))
    room = (asked.length - images * image.patches // merge**2) * merge**2
    most = pixels_of(asked, "videos_kwargs", _VIDEO_PIXELS)
    videos = [resized(frames, image.height * patch, most) for frames in range(1, _FRAMES + 1)]
    return image, max((one for one in videos if one.patches <= room), key=lambda one: one.patches, default=videos[0])


class _Attention(parts.HalvesTogether):
    """Queries, keys and values are copied out of their product before they are rotated."""

    def rotated(self, rows: int) -> list[Tensor]:
        copies = [self.run.new(rows * self.width * self.widths.itemsize) for _ in range(3)]
        both = super().rotated(rows)
        self.run.free(*copies[:2])
        return [copies[2], *both]


class _Block(GatedBlock):
    """Without biases, whose product of the gate is let go early."""

    def __init__(self, run: Run, name: str, widths: parts.Widths) -> None:
        self.run = run
        self.norms = [parts.RMSNorm(run, f"{name}.norm{one}", widths.hidden, widths.itemsize) for one in (1, 2)]
        self.attention = _Attention(run, f"{name}.attn", widths, bias=False, named=("qkv", "proj"))
        self.mlp = parts.GatedFeedForward(run, f"{name}.mlp", widths, bias=False, holds=False)


class _Glm(PatchTower):
    """``Glm4vVisionTransformer``."""

    def __init__(self, run: Run, shape: Glm) -> None:
        super().__init__(run, shape)
        size, hidden, out = shape.widths.itemsize, shape.widths.hidden, shape.out
        run.new(hidden * size, "visual.patch_embed.proj.bias")
        self.rotary_table()
        self.blocks = [_Block(run, f"visual.blocks.{index}", shape.widths) for index in range(shape.depth)]
        self.proj = parts.linear(run, "visual.merger.proj", out, [parts.shared(run, "channels", out)], size, bias=False)
        self.merged_norm = LayerNorm(run, "visual.merger.post_projection_norm", out, size)
        wide = parts.Widths(out, shape.context, 1, size, whole=True)
        self.merger = parts.GatedFeedForward(run, "visual.merger", wide, bias=False, holds=True)
        run.new(shape.positions * hidden * size, "visual.embeddings.position_embedding.weight")
        run.new(shape.positions * 8, "visual.embeddings.position_ids", Category.BUFFER)
        self.first_norm = parts.RMSNorm(run, "visual.post_conv_layernorm", hidden, size)
        run.new(out * hidden * shape.merge**2 * size, "visual.downsample.weight")
        run.new(out * size, "visual.downsample.bias")
        self.last_norm = parts.RMSNorm(run, "visual.post_layernorm", hidden, size)

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        learned = [self._learned() for _ in range(shape.items.count)]
        learned = [run.replacing(*learned, run.new(self._hidden_bytes, "learned positions"))]
        each = [self._positions() for _ in range(shape.items.count)]
        positions = run.replacing(*each, run.new(sum(one.bytes for one in each), "positions"))
        turned, sequences = self._rotations(positions), self._whole()
        ends = run.new((sequences.count + 1) * 4, "ends of sequences")
        hidden = run.replacing(self._embedded(), self.first_norm(self.rows))
        hidden = run.replacing(hidden, run.new(hidden.bytes, "patches with positions"))
        hidden = parts.through(run, self.blocks, hidden, sequences, keeps_first=False)
        hidden = run.replacing(hidden, self.last_norm(self.rows))
        rows = self.rows // shape.merge**2
        size = rows * shape.out * shape.widths.itemsize
        hidden = run.replacing(hidden, run.new(size, "downsampled"))
        hidden = run.replacing(hidden, run.all_gather(self.proj(rows), "merged channels"))
        hidden = run.replacing(hidden, self.merged_norm(rows))
        hidden = run.replacing(hidden, run.new(size, "activated"))
        return [run.replacing(hidden, ends, *turned, *learned, self.merger(rows))]

    def _learned(self) -> Tensor:
        """Learned positions of an item, sampled between those that there are (``Glm4vVisionEmbeddings``): tables,
        sides, coordinates and what is sampled in fp32, beside patches of zeros."""
        run, patches = self.run, self.shape.grid.patches
        width = self.shape.widths.hidden * self.shape.widths.itemsize
        given = [run.new(patches * 8), run.new(patches * 8), run.new(patches * width)]
        held = [run.new(self.shape.positions * self.shape.widths.hidden * _WIDE)]
        held += [run.new(patches * _WIDE) for _ in range(4)]  # heights and widths, rows and columns
        for _ in range(2):
            held.append(self._normed(patches * _WIDE))
        held.append(run.new(2 * patches * _WIDE, "grid"))
        held.append(run.new(patches * self.shape.widths.hidden * _WIDE, "sampled"))
        held.append(run.new(patches * width))
        return run.replacing(*given, *held, run.new(patches * width, "learned positions"))

    def _normed(self, size: int) -> Tensor:
        """Coordinates from -1 to 1: a half more, divided, doubled, and one less, each a new tensor."""
        made = self.run.new(size)
        for _ in range(3):
            made = self.run.replacing(made, self.run.new(size))
        return made
