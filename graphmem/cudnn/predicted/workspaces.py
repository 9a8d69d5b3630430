"""Bytes of a cuDNN plan's workspace, by the *form* of the plan: its copies, padding and partial sums.

A form is written as a few words, parts joined by ``+``:

- ``none``: no workspace.
- ``needed``: copies of the tensors that are not in the kernel's order. Tensor cores read channels innermost, in rows of
  16 bytes, so NCHW tensors are copied, and so are channels_last ones whose channels are no multiple of that.
- ``copy IOF``: copies of input, output and filter (or of those named), unpadded; ``pad IOF``: channels padded to 16
  bytes (``all`` is ``pad IOF``); ``pad2 IOF``, ``pad4 IOF``: only the input's channels padded, to 2 or 4 (first
  layers).
- ``group8 IO``: the channels of every group padded to 8 (or 2, 4, 16, 32); ``groupv IO``: to 16 bytes; ``group2n IO``:
  to the next power of two; ``packed``: to the next power of two up to 32, above to 16 bytes, and only the tensors
  that need it, or are NCHW. ``packed all``: all tensors if one does. ``some IO``: copies for the eight groups that run
  at once.
- ``stream 128x64 1x4``: the needed copies, and partial tiles of 128 by 64 fp32 values, with clusters of 1 by 4 blocks.
- ``needed+split 13``: the needed copies, and 13 fp32 partial results; ``all+split 13`` copies every tensor.
- ``needed+tiles 32x128 13``: the same in whole tiles of 32 by 128, each with its flags; ``vtiles``: of
  channels that are padded to 16 bytes.
- ``tight`` beside others: 16 bytes of slack.
- ``some IO+somesplit 3``: the same for filter gradients, with 3 fp32 partial filters of eight groups.
- ``copy F+parts 64x16 142``: depthwise filter gradients; 142 partial filters, channels in blocks of 64, of 16 bytes a
  channel. ``images``: eight fp32 partial filters of every image, channels in blocks of 32.
- ``winograd``: filters of 3x3 become 5x5. ``offsets``: a table of the image's pixels. ``bytes 640``: other
  tables, of about that size.

The forms and their sizes were read from the engine numbers and knobs of plans of cuDNN 9.20: kernels of Hopper
(engines 62, 65, 67, 68, 71, 73, 76) work with stream-K where their workspace knob allows it, those of Ampere with a
fixed number of splits. Given tile and cluster, the partial tiles of 97 % of 8,000 random products follow to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from graphmem.base.numbers import round_up
from graphmem.base.records import dataclass
from graphmem.cudnn.predicted.problem import Direction, Problem, Product

#: Alignment slack and flags that a plan with a workspace adds, by far the most frequent of the values seen (16 to 147).
SLACK = 147
#: The slack of engines without flags.
TIGHT_SLACK = 16
#: That of engines with partial tiles, without copies; with them it is 16 more.
TILED_SLACK = 159
#: Thread blocks that share the tiles of the last wave (18 in every plan seen, on cards of 114 and of 132 SMs).
_STREAM_K_SLOTS = 18
#: A split of a product takes at least this many steps of k, and more where tiles are small. Read from plans: 256 with
#: tiles of 128 x 128 and larger, 512 with 128 x 64, 1,024 with 64 x 64.
_MIN_STEPS = 256
_MIN_WORK = _MIN_STEPS * 128 * 128
#: Groups for which a grouped convolution is run at once, where they do not run as one product.
_GROUPS_AT_ONCE = 8
#: Bytes of padded copies beyond which the batch is run in parts: 35 of 35 such plans of engine 23, to the byte.
_COPIES_LIMIT = 16 << 30
#: Channels of a group up to which several groups are packed into one product.
_PACKED_GROUP = 32
#: Kernels that unfold as they go keep a table of 6 bytes a pixel in lines of 128 bytes; backward more (engines 26, 34).
_OFFSET_BYTES = 6
_OFFSET_LINE = 128
_OFFSET_BACKWARD = 2176
#: Engine 16 sums a depthwise filter's gradient in fp32 by eighths of every image, 32 channels at once.
_IMAGE_CHANNELS = 32
_IMAGE_PARTS = 8
#: Winograd's transform of a filter of 3x3.
_WINOGRAD_TAPS = 25


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of a plan's workspace; ``certain``: the choice of kernel is known for shapes of this kind. ``later``: bytes
    of the plans that are tried where there is too little memory, in this order."""

    size: int
    certain: bool = True
    later: tuple[int, ...] = ()


def workspace_bytes(form: str, problem: Problem, direction: Direction) -> int:
    """Bytes of the workspace of a plan of this form. Raises ``ValueError`` for a form that is none of those above."""
    try:
        sizes = [_PARTS[kind](problem, direction, *words) for kind, *words in parts_of(form)]
    except (KeyError, TypeError):  # another word, or other words behind it
        raise ValueError(f"no form of a workspace: {form!r}") from None
    size = sum(sizes)
    if not size:
        return 0
    return size + slack(form) + (TIGHT_SLACK if has_tiles(form) and size > sizes[-1] else 0)


def slack(form: str) -> int:
    """Bytes that a plan of this form adds where it takes any."""
    return TIGHT_SLACK if parts_of(form)[-1] == ("tight",) else TILED_SLACK if has_tiles(form) else SLACK


def has_tiles(form: str) -> bool:
    """Whether partial results are whole tiles."""
    return any(kind in ("tiles", "vtiles") for kind, *_ in parts_of(form))


@cache
def parts_of(form: str) -> tuple[tuple[str, ...], ...]:
    """The parts of a form, each in words."""
    return tuple(tuple(part.split()) for part in form.split("+"))


def _vector(problem: Problem) -> int:
    """Values of 16 bytes."""
    return 16 // problem.itemsize


def _at_once(problem: Problem, size: int) -> int:
    """The part of all groups' bytes that the groups take which run at once."""
    return size * min(_GROUPS_AT_ONCE, problem.groups) // problem.groups


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split("x")
    return int(first), int(second)


def _copies(problem: Problem, names: str, pad_channels: int = 1, pad_filters: int = 1) -> int:
    channels, filters = round_up(problem.channels, pad_channels), round_up(problem.filters, pad_filters)
    sizes = {
        "I": problem.batch * problem.input_pixels * channels,
        "O": problem.batch * problem.output_pixels * filters,
        "F": channels * filters * problem.taps // problem.groups,
    }
    return sum(sizes[name] for name in names) * problem.itemsize


def _padded_copies(problem: Problem, names: str) -> int:
    """Copies with channels in rows of 16 bytes."""
    return _copies(problem, names, _vector(problem), _vector(problem))


def needed_copies(problem: Problem) -> int:
    """Copies of the tensors that are not channels innermost in rows of 16 bytes; one pixel or tap has no order."""
    vector = _vector(problem)
    odd_channels, odd_filters = problem.channels % vector != 0, problem.filters % vector != 0
    nchw = not problem.channels_last
    names = ""
    if odd_channels or (nchw and problem.input_pixels > 1):
        names += "I"
    if odd_filters or (nchw and problem.output_pixels > 1):
        names += "O"
    if odd_channels or odd_filters or (nchw and problem.taps > 1):
        names += "F"
    return _padded_copies(problem, names)


def _group_copies(problem: Problem, names: str, width: str) -> int:
    """Copies whose channels are padded within every group."""
    inner, outer = problem.channels // problem.groups, problem.filters // problem.groups
    if width == "2n":
        multiple = 1 << (max(inner, outer) - 1).bit_length()
    else:
        multiple = _vector(problem) if width == "v" else int(width)
    inner, outer = round_up(inner, multiple), round_up(outer, multiple)
    sizes = {"I": problem.input_pixels * inner, "O": problem.output_pixels * outer}
    value_bytes = problem.groups * problem.itemsize
    image = sum(sizes[name] for name in names if name != "F") * value_bytes
    images = min(problem.batch, max(1, _COPIES_LIMIT // image)) if image else 0
    return images * image + ("F" in names) * inner * outer * problem.taps * value_bytes


def _packed_copies(problem: Problem, every: bool) -> int:
    """Bytes of copies whose groups are packed: their channels in a power of two, wide ones in rows of 16 bytes."""
    inner, outer = problem.channels // problem.groups, problem.filters // problem.groups
    width = 1 << (max(inner, outer) - 1).bit_length()
    wide = width > _PACKED_GROUP
    inner_width, outer_width = (round_up(n, _vector(problem)) if wide else width for n in (inner, outer))
    nchw = not problem.channels_last
    padded = {"I": inner != inner_width, "O": outer != outer_width}
    names = "".join(name for name, needs in padded.items() if nchw or every or needs)
    return _group_copies(problem, names + "F", "v" if wide else "2n") if names else 0


def _offsets(problem: Problem, direction: Direction) -> int:
    forward = direction is Direction.FORWARD
    pixels = problem.output_pixels if forward else problem.input_pixels
    table = round_up(pixels * _OFFSET_BYTES + 1, _OFFSET_LINE) + (0 if forward else _OFFSET_BACKWARD)
    return table * min(_GROUPS_AT_ONCE, problem.groups)


def _fp32_result(problem: Problem, direction: Direction) -> int:
    """Bytes of what the product makes, in fp32 and with padded channels."""
    padded = _padded(problem)
    if direction is Direction.FORWARD:
        return padded.batch * padded.output_pixels * padded.filters * 4
    if direction is Direction.BACKWARD_DATA:
        return padded.batch * padded.input_pixels * padded.channels * 4
    return padded.channels * padded.filters * padded.taps // padded.groups * 4


def _padded(problem: Problem) -> Problem:
    """The problem with channels in rows of 16 bytes."""
    channels, filters = (round_up(count, _vector(problem)) for count in (problem.channels, problem.filters))
    return replace(problem, channels=channels, filters=filters)


def _depthwise_parts(problem: Problem, direction: Direction, block: str, count: str) -> int:
    channels, channel_bytes = _pair(block)
    return int(count) * round_up(problem.filters, channels) * channel_bytes


def _tiled(product: Product, tile_text: str, splits_text: str) -> int:
    """Partial results in whole tiles of fp32, and for every tile a flag a part and one more (15 of 15 plans of engines
    10, 30 and 40 that were looked at, to the byte)."""
    tile, splits = _pair(tile_text), int(splits_text)
    along_m, along_n = -(-product.m // tile[0]), -(-product.n * product.count // tile[1])
    return along_m * along_n * 4 * (splits * tile[0] * tile[1] + splits + 1)


def _stream_k(tile: tuple[int, int], cluster: tuple[int, int], product: Product) -> int:
    """Bytes of partial results in fp32, where tiles of the last, incomplete wave are cut along k among idle blocks."""
    blocks = cluster[0] * cluster[1]
    slots = _STREAM_K_SLOTS // blocks * blocks
    along_m = round_up(-(-product.m // tile[0]), cluster[0])
    along_n = round_up(-(-product.n // tile[1]) * product.count, cluster[1])
    shared = along_m * along_n % slots
    if not shared:
        return 0
    values = tile[0] * tile[1]
    splits = min(slots // shared, product.k // max(_MIN_STEPS, _MIN_WORK // values))
    return shared * splits * values * 4 if splits > 1 else 0


#: By the first word of a part: its bytes, of the convolution, the direction and the words that follow.
_PARTS: dict[str, Callable[..., int]] = {
    "none": lambda problem, direction: 0,
    "tight": lambda problem, direction: 0,
    "needed": lambda problem, direction: needed_copies(problem),
    "all": lambda problem, direction: _padded_copies(problem, "IOF"),
    "copy": lambda problem, direction, names: _copies(problem, names),
    "pad": lambda problem, direction, names: _padded_copies(problem, names),
    "pad2": lambda problem, direction, names: _copies(problem, names, 2),
    "pad4": lambda problem, direction, names: _copies(problem, names, 4),
    "packed": lambda problem, direction, *every: _packed_copies(problem, bool(every)),
    "some": lambda problem, direction, names: _at_once(problem, _copies(problem, names)),
    "somesplit": lambda problem, direction, splits: _at_once(problem, int(splits) * _fp32_result(problem, direction)),
    "offsets": lambda problem, direction: _offsets(problem, direction) - SLACK,
    "bytes": lambda problem, direction, size: int(size) - SLACK,
    "stream": lambda problem, direction, tile, cluster: (
        needed_copies(problem) + _stream_k(_pair(tile), _pair(cluster), Product.of(problem, direction))
    ),
    "split": lambda problem, direction, splits: int(splits) * _fp32_result(problem, direction),
    "tiles": lambda problem, direction, *words: _tiled(Product.of(problem, direction), *words),
    "vtiles": lambda problem, direction, *words: _tiled(Product.of(_padded(problem), direction), *words),
    "parts": _depthwise_parts,
    "images": lambda problem, direction: (
        problem.batch * round_up(problem.filters, _IMAGE_CHANNELS) * problem.taps * _IMAGE_PARTS * 4
    ),
    "winograd": lambda problem, direction: (
        problem.channels * problem.filters // problem.groups * _WINOGRAD_TAPS * problem.itemsize
    ),
    **{
        f"group{width}": lambda problem, direction, names, width=width: _group_copies(problem, names, width)
        for width in ("v", "2n", "2", "4", "8", "16", "32")
    },
}
