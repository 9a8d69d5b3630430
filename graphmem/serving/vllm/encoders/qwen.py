"""The encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of images and videos of any size.

Followed from vllm 0.32.0, ``model_executor/models/{qwen2_vl,qwen2_5_vl,qwen3_vl}.py``, and of sizes transformers'
``Qwen2VLImageProcessor`` (``smart_resize``). Pixels come as bytes and are normalised on the card
(``mm_device_do_normalize``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, isqrt, sqrt

from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted, mapping
from graphmem.serving.vllm.encoders import parts
from graphmem.serving.vllm.encoders.budget import Items, Pictured
from graphmem.serving.vllm.layers import LayerNorm, cdiv, rotary
from graphmem.serving.vllm.models.base import Encoder, Tower
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.trace import Category

#: ``model_type`` with Qwen3-VL's encoder; that of Qwen 3.5 gives nothing to the language model's first layers.
NEW = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
#: Rows of the encoder's rotary table (``max_position`` of each of the three).
_ROTARY_ROWS = 8192
#: ``_MAX_FRAMES_PER_VIDEO`` (qwen2_vl.py; qwen3_vl.py up to 0.12).
_FRAMES, _MOST_FRAMES = 14, 24_576
#: Tokens of a text beside a video's (qwen3_vl.py up to 0.12, ``get_max_video_tokens``).
_STAMPED = 12.5
#: The widest image that the processor takes, as wide as so many times its height.
_RATIO = 200
#: Pixels of an image at most by the preprocessor_config.json of the published checkpoints (of a video in Qwen3-VL, all
#: frames together), for configurations without that file beside them.
PIXELS = {"qwen2_vl": 12_845_056, "qwen2_5_vl": 12_845_056} | dict.fromkeys(NEW, 16_777_216)
VIDEO_PIXELS = 25_165_824


@dataclass(frozen=True)
class Grid:
    """Patches of one item: in time, down and across."""

    time: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """All of them."""
        return self.time * self.frame

    @property
    def frame(self) -> int:
        """Of one moment."""
        return self.height * self.width


@dataclass(frozen=True)
class Qwen(Encoder):
    """The encoder of one of the three. ``patch_values``: numbers of a patch; ``full``: layers that attend to all of an
    item (none: all); ``window``: merged patches of a window's side; ``deep``: layers whose states are added to the
    language model's first layers; ``grid``: of one item; ``positions``: learned ones;
    ``by_items``: every rank has all weights, and encodes its share of the items; ``normalises``: the card does."""

    kind: str
    widths: parts.Widths
    depth: int
    patch_values: int
    merge: int
    out: int
    items: Items
    grid: Grid
    text_hidden: int
    window: int = 0
    full: tuple[int, ...] = ()
    deep: tuple[int, ...] = ()
    positions: int = 0
    by_items: bool = False
    normalises: bool = True

    @property
    def pixels_bytes(self) -> int:
        """Of one item, as it comes."""
        return self.grid.patches * self.patch_values * (1 if self.normalises else self.widths.itemsize)

    def tower(self, run: Run, batch: Batch) -> Tower:
        return _ByItems(run, self, batch) if self.by_items else self.whole(run, batch)

    def whole(self, run: Run, batch: Batch) -> Tower:
        """All of it on this rank, or a share of every layer."""
        return _TOWERS[self.kind](run, self, batch)


def tokens_of(asked: Pictured, limits: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the largest image and of the largest video (``get_mm_max_tokens_per_item``)."""
    images, videos = _grids(asked)
    merged = count(asked.vision, "spatial_merge_size", 2) ** 2
    return {"image": images.patches // merged, "video": videos.patches // merged}


def encoder(asked: Pictured, items: Items, itemsize: int) -> Qwen:
    """The encoder that the configuration describes."""
    model, vision, kind = asked.model, asked.vision, asked.kind
    images, videos = _grids(asked)
    old = kind == "qwen2_vl"
    hidden = count(vision, "embed_dim", 1280) if old else count(vision, "hidden_size")
    inner = int(hidden * count(vision, "mlp_ratio", 4)) if old else count(vision, "intermediate_size")
    patch, merge = count(vision, "patch_size", 14), count(vision, "spatial_merge_size", 2)
    channels = count(vision, "in_channels", count(vision, "in_chans", 3))
    text_hidden = count(model, "hidden_size")
    return Qwen(
        kind,
        parts.Widths(hidden, inner, count(vision, "num_heads", 16), itemsize),
        count(vision, "depth", 32),
        channels * count(vision, "temporal_patch_size", 2) * patch**2,
        merge,
        count(vision, "hidden_size", text_hidden) if old else count(vision, "out_hidden_size", text_hidden),
        items,
        images if items.modality == "image" else videos,
        text_hidden,
        window=_window(vision, merge * patch) if kind == "qwen2_5_vl" else 0,
        full=_layers(vision, "fullatt_block_indexes"),
        deep=_layers(vision, "deepstack_visual_indexes") if kind in NEW else (),
        positions=count(vision, "num_position_embeddings") if kind in NEW else 0,
    )


def _window(vision: ServedModel, unit: int) -> int:
    return counted(vision, "window_size in merged patches", count(vision, "window_size", 112) // unit)


def _layers(vision: ServedModel, name: str) -> tuple[int, ...]:
    value = vision.config.get(name) or []
    if not isinstance(value, list):
        raise UsageError(f"{vision.name}: {name} is not a list of layers")
    return tuple(counted(vision, name, one, least=0) for one in value)


def _grids(asked: Pictured) -> tuple[Grid, Grid]:
    """Grids in patches: (of the largest image, of the largest video)."""
    vision, length = asked.vision, asked.length
    merge = count(vision, "spatial_merge_size", 2)
    unit = count(vision, "patch_size", 14) * merge
    down, across = _largest(pixels_of(asked, "images_kwargs", PIXELS[asked.kind]) // unit**2)
    image = Grid(1, down * merge, across * merge)
    if asked.kind in NEW:  # two frames, which are one patch deep, share the pixels of a video
        pixels = pixels_of(asked, "videos_kwargs", VIDEO_PIXELS) // count(vision, "temporal_patch_size", 2)
        down, across = _largest(pixels // unit**2)
        return image, Grid(1, down * merge, across * merge)
    pairs = max(1, length // (down * across))  # of frames
    frames = min(2 * pairs if length >= down * across else 1, _FRAMES)
    return image, Grid(cdiv(frames, 2), image.height, image.width)


def stamped(asked: Pictured) -> tuple[Grid, int, int]:
    """Of Qwen3-VL's largest video up to 0.12: (its grid, its embeddings, its tokens). It has as many frames as a text
    has room for (``get_num_frames_with_most_features``), which share its pixels; text beside every embedding says its
    time."""
    vision = asked.vision
    merge, deep = count(vision, "spatial_merge_size", 2), count(vision, "temporal_patch_size", 2)
    unit = count(vision, "patch_size", 14) * merge
    image, _ = _grids(asked)
    pixels = pixels_of(asked, "videos_kwargs", VIDEO_PIXELS)
    sides = [side // merge * unit for side in (image.height, image.width)]

    def grid(frames: int) -> Grid:
        shrunk = max(1.0, sqrt(frames * sides[0] * sides[1] / pixels))
        down, across = (max(1, floor(side / shrunk / unit)) for side in sides)
        return Grid(cdiv(frames, deep), down * merge, across * merge)

    frames = 2
    while frames < _MOST_FRAMES and grid(frames + 1).patches <= asked.length * merge**2:
        frames += 1
    found = grid(frames)
    embedded = found.patches // merge**2
    return found, embedded, int(embedded * _STAMPED)


def _largest(patches: int) -> tuple[int, int]:
    """Merged patches (down, across) of the image with most of them: the factors nearest to each other
    (``get_image_size_with_most_features``)."""
    for number in range(patches, 0, -1):
        down = next(one for one in range(isqrt(number), 0, -1) if number % one == 0)
        if number // down <= _RATIO * down:
            return down, number // down
    raise UsageError("the largest image has less than one patch; give a larger max_pixels")


def pixels_of(asked: Pictured, scope: str, otherwise: int) -> int:
    """The most of an item: ``max_pixels``, or the longest "edge" of ``size``, of the call before the processor's own
    (``_get_vision_size``)."""
    found = otherwise
    for values in asked.scopes(scope):
        given = ServedModel(asked.model.name, values)
        size = mapping(given, "size")
        found = counted(given, "longest_edge of size", size.get("longest_edge"), found)
        found = count(given, "max_pixels", found)
    return found


class _Merger:
    """Norm, and two layers over four patches side by side."""

    def __init__(
        self, run: Run, name: str, shape: Qwen, *, norm: type[LayerNorm] | type[parts.RMSNorm], after: bool
    ) -> None:
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        self.run, self.merged = run, shape.merge**2
        wide = hidden * self.merged
        self.after = after
        self.norm = norm(run, f"{name}.norm", wide if after else hidden, size)
        named = f"{name}.linear_fc1", f"{name}.linear_fc2"
        self.layers = parts.FeedForward(run, named, wide, wide, shape.out, size, what="merged channels")

    def __call__(self, patches: int) -> Tensor:
        """Embeddings; the input is the caller's."""
        rows = patches // self.merged
        normed = self.norm(rows if self.after else patches)
        return self.run.replacing(normed, self.layers(rows))


class _Gathered(parts.HalvesTogether):
    """Qwen2-VL's with several ranks: their queries, keys and values are gathered first (``split_qkv``)."""

    def rotated(self, rows: int) -> list[Tensor]:
        run = self.run
        if run.tp == 1:
            return super().rotated(rows)
        size = 3 * rows * self.width * self.widths.itemsize * run.tp
        gathered = run.new(size, "gathered")
        return [run.replacing(gathered, run.new(size, "gathered, side by side")), *super().rotated(rows)]


class _Block(parts.SummedBlock):
    """Qwen2-VL's, and Qwen3-VL's (``new``)."""

    def __init__(self, run: Run, name: str, widths: parts.Widths, *, new: bool) -> None:
        self.run = run
        self.norms = [LayerNorm(run, f"{name}.norm{one}", widths.hidden, widths.itemsize) for one in (1, 2)]
        attention, layers = (parts.HalvesTogether, "linear_fc") if new else (_Gathered, "fc")
        self.attention = attention(run, f"{name}.attn", widths, named=("qkv", "proj"))
        self.mlp = parts.feed_forward(run, f"{name}.mlp", widths, layers, quick=not new)


class GatedBlock(parts.Block):
    """Qwen2.5-VL's: the second norm adds, in place where it can."""

    def __init__(self, run: Run, name: str, widths: parts.Widths) -> None:
        self.run = run
        self.norms = [parts.RMSNorm(run, f"{name}.norm{one}", widths.hidden, widths.itemsize) for one in (1, 2)]
        self.attention = parts.HalvesTogether(run, f"{name}.attn", widths, named=("qkv", "proj"))
        self.mlp = parts.GatedFeedForward(run, f"{name}.mlp", widths, bias=True)

    def __call__(self, sequences: parts.Sequences) -> Tensor:
        run, rows = self.run, sequences.rows
        attended = run.replacing(self.norms[0](rows), self.attention(sequences))
        added = self.norms[1].added(rows)
        fed = self.mlp(rows)
        return run.replacing(fed, *added, attended, run.new(fed.bytes, "added"))


class PatchTower(Tower):
    """The common part of encoders of patches."""

    blocks: Sequence[parts.Block]

    def __init__(self, run: Run, shape: Qwen) -> None:
        self.run, self.shape = run, shape
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        self.rows = shape.items.count * shape.grid.patches
        for side in ("weight", "bias") if shape.normalises else ():
            run.new(3 * 4, f"visual.input_norm.{side}", Category.BUFFER)
        run.new(hidden * shape.patch_values * size, "visual.patch_embed.proj.weight")

    def rotary_table(self) -> None:
        """Half of every head is turned."""
        widths = self.shape.widths
        rotary(self.run, "visual.rotary_pos_emb", _ROTARY_ROWS, widths.head_dim // 2, widths.itemsize)

    def _merger(self, name: str = "merger", norm: type[LayerNorm] | type[parts.RMSNorm] = LayerNorm) -> _Merger:
        """What puts patches together; the norm of others than the last is over those side by side."""
        return _Merger(self.run, f"visual.{name}", self.shape, norm=norm, after=name != "merger")

    def _whole(self) -> parts.Sequences:
        """Every moment of every item attends to itself."""
        return parts.Sequences(self.rows, self.shape.items.count * self.shape.grid.time, self.shape.grid.frame)

    def _rotations(self, positions: Tensor) -> list[Tensor]:
        """Cosines and sines of all patches, of their positions, which are let go."""
        run = self.run
        turned = [run.new(self._turned_bytes(self.rows)) for _ in range(2)]
        run.free(positions)
        return turned

    def inputs(self) -> Tensor:
        """All patches."""
        self.run.enter("visual.input_norm")
        return self.run.new(self.shape.items.count * self.shape.pixels_bytes, "pixels")

    def _embedded(self) -> Tensor:
        """Patches as hidden states: normalised, and one product."""
        run, shape = self.run, self.shape
        size = self.rows * shape.patch_values * shape.widths.itemsize if shape.normalises else 0
        normalised = [run.new(size, "normalised pixels")] if size else []
        run.enter("visual.patch_embed")
        return run.replacing(*normalised, run.matmul(self._hidden_bytes, "patches"))

    @property
    def _hidden_bytes(self) -> int:
        return self.rows * self.shape.widths.hidden * self.shape.widths.itemsize

    def _positions(self) -> Tensor:
        """Row and column of every patch of an item, as made on the card (``rot_pos_emb``)."""
        run, grid = self.run, self.shape.grid
        plane = grid.height * grid.width * 8
        rows, columns = run.new(grid.height * 8), run.new(grid.width * 8)
        down = run.replacing(rows, run.new(plane))
        across = run.replacing(columns, run.new(plane))
        pairs = run.new(2 * plane)
        return run.replacing(pairs, down, across, run.new(2 * plane * grid.time))

    def _turned_bytes(self, patches: int) -> int:
        """Of the cosines of so many patches: a quarter of a head for the row and for the column."""
        return patches * 2 * (self.shape.widths.head_dim // 4) * self.shape.widths.itemsize


class _Qwen2(PatchTower):
    """``Qwen2VisionTransformer``."""

    def __init__(self, run: Run, shape: Qwen, batch: Batch) -> None:
        super().__init__(run, shape)
        self.rotary_table()
        self.blocks = [_Block(run, f"visual.blocks.{index}", shape.widths, new=False) for index in range(shape.depth)]
        self.merger = self._merger()

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        hidden = self._embedded()
        each = [self._positions() for _ in range(shape.items.count)]
        positions = run.replacing(*each, run.new(sum(one.bytes for one in each), "positions"))
        turned, sequences = self._rotations(positions), self._whole()
        ends = run.new((sequences.count + 1) * 4, "ends of sequences")
        hidden = parts.through(run, self.blocks, hidden, sequences, keeps_first=False)
        return [run.replacing(hidden, ends, *turned, self.merger(self.rows))]


class _Qwen25(PatchTower):
    """``Qwen2_5_VisionTransformer``: layers attend within windows but for some."""

    def __init__(self, run: Run, shape: Qwen, batch: Batch) -> None:
        super().__init__(run, shape)
        self.rotary_table()
        self.blocks = [GatedBlock(run, f"visual.blocks.{index}", shape.widths) for index in range(shape.depth)]
        self.merger = self._merger(norm=parts.RMSNorm)

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        hidden = self._embedded()
        held = self._metadata()
        hidden = run.replacing(hidden, run.new(self._hidden_bytes, "patches by windows"))
        whole = self._whole()
        windows = parts.Sequences(self.rows, whole.count * self._windows(), self._window_patches())
        for index, block in enumerate(self.blocks):
            hidden = run.replacing(hidden, block(whole if index in shape.full else windows))
        merged = run.replacing(hidden, self.merger(self.rows))
        return [run.replacing(merged, *held, run.new(merged.bytes, "embeddings in order"))]

    def _windows(self) -> int:
        """Windows of one frame."""
        grid, side = self.shape.grid, self.shape.merge * self.shape.window
        return cdiv(grid.height, side) * cdiv(grid.width, side)

    def _window_patches(self) -> int:
        """Patches of the largest window."""
        grid, side = self.shape.grid, self.shape.merge * self.shape.window
        return min(grid.height, side) * min(grid.width, side)

    def _metadata(self) -> list[Tensor]:
        """``prepare_encoder_metadata``. Cosines and sines of a size are kept for ever (``get_rope_by_thw``)."""
        run, patches = self.run, self.shape.grid.patches
        items, grid = self.shape.items.count, self.shape.grid
        positions = self._positions()
        size = self._turned_bytes(patches)
        cosines, sines = run.new(size), run.new(size)
        run.free(positions)
        order = run.new(patches // self.shape.merge**2 * 8, "order of windows")
        run.new(size, "cosines by windows", Category.WORKSPACE)
        run.free(cosines)
        run.new(size, "sines by windows", Category.WORKSPACE)
        run.free(sines, order)
        frames, merged = items * grid.time, items * patches // self.shape.merge**2
        ends = ((frames + 1) * 4, (frames * self._windows() + 1) * 4)
        return [run.new(one) for one in (size * items, size * items, *ends, merged * 8, merged * 8)]


class _Qwen3(PatchTower):
    """``Qwen3_VisionTransformer``: learned positions, and states of some layers beside the last ones."""

    def __init__(self, run: Run, shape: Qwen, batch: Batch) -> None:
        super().__init__(run, shape)
        size, hidden = shape.widths.itemsize, shape.widths.hidden
        run.new(hidden * size, "visual.patch_embed.proj.bias")
        run.new(shape.positions * hidden * size, "visual.pos_embed.weight")
        self.rotary_table()
        self.merger = self._merger()
        self.deep = [self._merger(f"deepstack_merger_list.{index}") for index in range(len(shape.deep))]
        self.blocks = [_Block(run, f"visual.blocks.{index}", shape.widths, new=True) for index in range(shape.depth)]
        for index in range(len(shape.deep)):
            run.new(batch.tokens * shape.text_hidden * size, f"deepstack_input_embeds.{index}", Category.BUFFER)

    def encode(self) -> list[Tensor]:
        run, shape = self.run, self.shape
        hidden = self._embedded()
        items = shape.items.count
        each = [run.new(self._hidden_bytes // items, "learned positions") for _ in range(items)]
        learned = run.replacing(*each, run.new(self._hidden_bytes, "learned positions"))
        turned, sequences = self._rotations(run.new(self.rows * 2 * 8, "positions")), self._whole()
        ends = run.new((sequences.count + 1) * 4, "ends of sequences")
        hidden = run.replacing(hidden, run.new(self._hidden_bytes, "patches with positions"))
        features = []
        for index, block in enumerate(self.blocks):
            hidden = run.replacing(hidden, block(sequences))
            if index in shape.deep:
                features.append(self.deep[shape.deep.index(index)](self.rows))
        features.insert(0, run.replacing(hidden, self.merger(self.rows)))
        result = run.new(sum(one.bytes for one in features), "embeddings side by side")
        return [run.replacing(*features, ends, *turned, learned, result)]


class _ByItems(Tower):
    """``--mm-encoder-tp-mode data``: items are shared out, and their embeddings gathered
    (``run_dp_sharded_mrope_vision_model``, model_executor/models/vision.py). The first rank has the most of them."""

    def __init__(self, run: Run, shape: Qwen, batch: Batch) -> None:
        self.run, self.items = run, shape.items.count
        self.share = cdiv(self.items, run.tp)
        own = replace(shape, items=replace(shape.items, count=self.share))
        with run.alone():
            self.tower = own.whole(run, batch)
        self.patch_bytes = shape.pixels_bytes

    def inputs(self) -> Tensor:
        self.run.enter("visual")
        return self.run.new(self.items * self.patch_bytes, "pixels")

    def encode(self) -> list[Tensor]:
        run = self.run
        own = run.new(self.share * self.patch_bytes, "pixels of this rank")
        with run.alone():
            (embedded,) = self.tower.encode()
        return [run.replacing(embedded, own, run.new(embedded.bytes * run.tp, "embeddings of all ranks"))]


_TOWERS: dict[str, Callable[[Run, Qwen, Batch], Tower]] = {
    "qwen2_vl": _Qwen2,
    "qwen2_5_vl": _Qwen25,
    **dict.fromkeys(NEW, _Qwen3),
}
