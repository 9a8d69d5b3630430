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

The forms and their sizes were read from the engine numbers and knobs that plans of cuDNN 9.20 tell: kernels of Hopper
(engines 62, 65, 67, 68, 71, 73, 76) work with stream-K where their workspace knob allows it, those of Ampere with a
fixed number of splits. Given tile and cluster, the partial tiles of 97 % of 8,000 random products follow to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from graphmem.base.numbers import round_up
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
#: How forms with these parts are known.
TIGHT, TILES = "+tight", "tiles "


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of a plan's workspace; ``certain``: the choice of kernel is known for shapes of this kind. ``later``: bytes
    of the plans that are tried where there is too little memory, in this order."""

    size: int
    certain: bool = True
    later: tuple[int, ...] = ()


def workspace_bytes(form: str, problem: Problem, direction: Direction) -> int:
    """Bytes of the workspace of a plan of this form. Raises ``ValueError`` for a form that is none of those above."""
    sizes = [_part_bytes(words, problem, direction) for words in _parts(form)]
    size = sum(sizes)
    if not size:
        return 0
    return size + slack(form) + (TIGHT_SLACK if TILES in form and size > sizes[-1] else 0)


def slack(form: str) -> int:
    """Bytes that a plan of this form adds where it takes any."""
    return TIGHT_SLACK if form.endswith(TIGHT) else TILED_SLACK if TILES in form else SLACK


@cache
def _parts(form: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(part.split()) for part in form.split("+"))


def _part_bytes(words: tuple[str, ...], problem: Problem, direction: Direction) -> int:
    vector = 16 // problem.itemsize
    match words:
        case ["none" | "tight"]:
            return 0
        case ["needed"]:
            return needed_copies(problem)
        case ["all"]:
            return _copies(problem, "IOF", vector, vector)
        case ["copy", names]:
            return _copies(problem, names, 1, 1)
        case ["pad", names]:
            return _copies(problem, names, vector, vector)
        case ["pad2" | "pad4" as pad, names]:
            return _copies(problem, names, int(pad[3:]), 1)
        case ["groupv" | "group2n" | "group2" | "group4" | "group8" | "group16" | "group32" as pad, names]:
            return _group_copies(problem, names, pad[5:])
        case ["packed", *every]:
            return _packed_copies(problem, bool(every))
        case ["some", names]:
            return _copies(problem, names, 1, 1) * min(_GROUPS_AT_ONCE, problem.groups) // problem.groups
        case ["somesplit", splits]:
            some = min(_GROUPS_AT_ONCE, problem.groups)
            return int(splits) * _fp32_result(problem, direction) * some // problem.groups
        case ["offsets"]:
            return _offsets(problem, direction) - SLACK
        case ["bytes", size]:
            return int(size) - SLACK
        case ["stream", tile, cluster]:
            return needed_copies(problem) + _stream_k(_pair(tile), _pair(cluster), Product.of(problem, direction))
        case ["split", splits]:
            return int(splits) * _fp32_result(problem, direction)
        case ["tiles", tile, splits]:
            return _tiled(_pair(tile), int(splits), Product.of(problem, direction))
        case ["vtiles", tile, splits]:
            return _tiled(_pair(tile), int(splits), Product.of(_padded(problem), direction))
        case ["parts", block, count]:
            channels, channel_bytes = _pair(block)
            return int(count) * round_up(problem.filters, channels) * channel_bytes
        case ["images"]:
            channels = round_up(problem.filters, _IMAGE_CHANNELS)
            return problem.batch * channels * problem.taps * _IMAGE_PARTS * 4
        case ["winograd"]:
            return problem.channels * problem.filters // problem.groups * _WINOGRAD_TAPS * problem.itemsize
    raise ValueError(f"no form of a workspace: {' '.join(words)!r}")


def _pair(text: str) -> tuple[int, int]:
    first, second = text.split("x")
    return int(first), int(second)


def _copies(problem: Problem, names: str, pad_channels: int, pad_filters: int) -> int:
    channels, filters = round_up(problem.channels, pad_channels), round_up(problem.filters, pad_filters)
    sizes = {
        "I": problem.batch * problem.input_pixels * channels,
        "O": problem.batch * problem.output_pixels * filters,
        "F": channels * filters * problem.taps // problem.groups,
    }
    return sum(sizes[name] for name in names) * problem.itemsize


def needed_copies(problem: Problem) -> int:
    """Copies of the tensors that are not channels innermost in rows of 16 bytes; one pixel or tap has no order."""
    vector = 16 // problem.itemsize
    odd_channels, odd_filters = problem.channels % vector != 0, problem.filters % vector != 0
    nchw = not problem.channels_last
    names = ""
    if odd_channels or (nchw and problem.input_pixels > 1):
        names += "I"
    if odd_filters or (nchw and problem.output_pixels > 1):
        names += "O"
    if odd_channels or odd_filters or (nchw and problem.taps > 1):
        names += "F"
    return _copies(problem, names, vector, vector)


def _group_copies(problem: Problem, names: str, width: str) -> int:
    """Copies whose channels are padded within every group."""
    inner, outer = problem.channels // problem.groups, problem.filters // problem.groups
    if width == "2n":
        multiple = 1 << (max(inner, outer) - 1).bit_length()
    else:
        multiple = 16 // problem.itemsize if width == "v" else int(width)
    inner, outer = round_up(inner, multiple), round_up(outer, multiple)
    sizes = {"I": problem.input_pixels * inner, "O": problem.output_pixels * outer}
    value_bytes = problem.groups * problem.itemsize
    image = sum(sizes[name] for name in names if name != "F") * value_bytes
    images = min(problem.batch, max(1, _COPIES_LIMIT // image)) if image else 0
    return images * image + ("F" in names) * inner * outer * problem.taps * value_bytes


def _packed_copies(problem: Problem, every: bool) -> int:
    """Groups that are packed into products: their channels in a power of two, wide ones in rows of 16 bytes."""
    inner, outer = problem.channels // problem.groups, problem.filters // problem.groups
    width = 1 << (max(inner, outer) - 1).bit_length()
    wide = width > _PACKED_GROUP
    vector = 16 // problem.itemsize
    inner_width, outer_width = (round_up(n, vector) if wide else width for n in (inner, outer))
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
    vector = 16 // problem.itemsize
    channels, filters = round_up(problem.channels, vector), round_up(problem.filters, vector)
    if direction is Direction.FORWARD:
        return problem.batch * problem.output_pixels * filters * 4
    if direction is Direction.BACKWARD_DATA:
        return problem.batch * problem.input_pixels * channels * 4
    return channels * filters * problem.taps // problem.groups * 4


def _padded(problem: Problem) -> Problem:
    """The problem with channels in rows of 16 bytes."""
    vector = 16 // problem.itemsize
    return replace(problem, channels=round_up(problem.channels, vector), filters=round_up(problem.filters, vector))


def _tiled(tile: tuple[int, int], splits: int, product: Product) -> int:
    """Partial results in whole tiles of fp32, and for every tile a flag a part and one more (15 of 15 plans of engines
    10, 30 and 40 that were looked at, to the byte)."""
    along_m, along_n = -(-product.m // tile[0]), -(-product.n * product.count // tile[1])
    return along_m * along_n * 4 * (splits * tile[0] * tile[1] + splits + 1)


def _stream_k(tile: tuple[int, int], cluster: tuple[int, int], product: Product) -> int:
    """The tiles of the last, incomplete wave are cut along k among the blocks that would idle; each leaves a part."""
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
