"""Workspaces of cuDNN's convolutions by rules: cards other than Hopper, and groups on every card.

*Transforms.* Tensor-core kernels read channels innermost, in rows of 16 bytes. A tensor in another order is copied into
the workspace first, with its channels padded to 16 bytes; a filter of one tap needs no reordering. TF32 kernels of
Ampere and of consumer Blackwell write NCHW outputs themselves, and copy channels_last fp32 tensors instead.

*Partial sums.* Gradients of filters are sums over batch and pixels. Several thread blocks share one tile of the filter
and leave fp32 partial tiles in the workspace.

The rules were read off plans of cuDNN 9.20 for 204 convolutions on devices of capability 7.5, 8.0, 8.6, 8.9, 10.0 and
12.0, and for groups on an H200. Where kernels of near-equal time compete, the choice cannot be told from the shape
alone: such sizes say ``certain=False`` and are labelled as estimates in the trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from graphmem.capture.kernels.cudnn_problem import Direction, Problem, round_up
from graphmem.capture.kernels.script import Card


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of a plan's workspace; ``certain``: the choice of kernel is known for shapes of this kind."""

    size: int
    certain: bool = True


class _Kernels(Enum):
    """Families of kernels by how they read tensors."""

    #: Half types on tensor cores, and TF32 on the data-center cards from Hopper on: channels innermost.
    CHANNELS_INNERMOST = 1
    #: TF32 of Ampere, Ada and consumer Blackwell: outputs in NCHW, inputs with channels innermost.
    TF32_NCHW = 2
    #: No tensor cores: NCHW, nothing copied.
    PLAIN = 3


#: Alignment slack and flags of a plan with transforms or partial sums.
_SLACK = 147


def workspace_by_rule(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """Workspace of the plan that cuDNN's heuristics put first, by rules read from plans."""
    if problem.itemsize == 8:
        return Workspace(0)  # of 300 plans in fp64 on an H200 none took more than a table of 170 KiB
    kernels = _kernels(problem, direction, card)
    if problem.groups > 1 and problem.groups == problem.channels:
        return _depthwise(problem, direction, card)
    if problem.groups > 1:
        return Workspace(_grouped(problem, direction, kernels), certain=False)
    if kernels is _Kernels.PLAIN:
        return Workspace(_plain(problem, direction, card), certain=False)
    if _small_products_are_plain(problem, direction, card):
        return Workspace(0, certain=False)
    if problem.channels < 8:
        return Workspace(_few_channels(problem, direction, kernels), certain=False)
    size = _transforms(problem, direction, kernels)
    certain = kernels is _Kernels.CHANNELS_INNERMOST
    if direction is Direction.BACKWARD_WEIGHT:
        size += _partial_sums(problem, card)
        certain = certain and card.compute_capability[0] == 9
    return Workspace(size + _SLACK if size else 0, certain)


def _kernels(problem: Problem, direction: Direction, card: Card) -> _Kernels:
    major = card.compute_capability[0]
    if problem.itemsize == 2 and major >= (8 if problem.bf16 else 7):
        return _Kernels.CHANNELS_INNERMOST
    if problem.itemsize != 4 or not problem.tf32 or major < 8:
        return _Kernels.PLAIN
    if not problem.channels_last and not (major == 9 and problem.groups > 1) and _too_narrow(problem, direction):
        return _Kernels.PLAIN
    if major not in (9, 10, 11) or (problem.channels_last and _suits_ampere(problem, direction)):
        return _Kernels.TF32_NCHW
    return _Kernels.CHANNELS_INNERMOST


def _too_narrow(problem: Problem, direction: Direction) -> bool:
    """NCHW TF32 products so narrow that cuDNN leaves them to kernels without tensor cores."""
    if not 8 <= min(problem.channels, problem.filters) <= _NARROW or problem.rows >= 8 * _MANY_ROWS:
        return False
    return direction is Direction.FORWARD or (direction is Direction.BACKWARD_DATA and problem.taps == 1)


_NARROW = 32


def _suits_ampere(problem: Problem, direction: Direction) -> bool:
    """Channels_last TF32 problems that Hopper runs on kernels of Ampere."""
    if problem.channels < 8:
        return False
    if direction is Direction.BACKWARD_DATA and problem.filters < 64:
        return True
    return problem.taps >= 49


def _small_products_are_plain(problem: Problem, direction: Direction, card: Card) -> bool:
    """Small 1x1 products that skip pixels, and on consumer cards of capability 8.6 and 8.9 others too, run on kernels
    that read any order of channels."""
    values = problem.channels * problem.filters
    if problem.taps == 1 and problem.strided and values <= 1 << 13 and direction is Direction.FORWARD:
        return not problem.channels_last
    if card.compute_capability not in ((8, 6), (8, 9)) or problem.taps > 1 or values > 1 << 16:
        return False
    if problem.itemsize == 4:
        if direction is Direction.BACKWARD_DATA:
            return not problem.channels_last
        return direction is Direction.BACKWARD_WEIGHT or values <= 1 << 15
    return direction is Direction.FORWARD and values <= 1 << 15 and card.compute_capability == (8, 9)


def _plain(problem: Problem, direction: Direction, card: Card) -> int:
    """fp32 without tensor cores: NCHW as it is; channels_last is copied to NCHW and back, but for filter gradients."""
    bare, last = _copies(problem, 1), problem.channels_last
    copied = bare.input + bare.output + (bare.filter if problem.taps > 1 else 0)
    if direction is Direction.BACKWARD_WEIGHT:
        large = card.compute_capability[0] >= 9 and bare.filter >= _LARGE_PLAIN_FILTER and not last
        return copied if large else 0
    if card.compute_capability[0] < 8 and problem.taps == 9 and not problem.strided:
        # Winograd: filters of 3x3 become 5x5.
        return bare.filter * 25 // 9 + (bare.input + bare.output if last and problem.channels >= 8 else 0)
    if not last or (direction is Direction.FORWARD and problem.channels < 8):
        return 0
    if card.compute_capability[0] < 8 and (direction is Direction.FORWARD or not problem.strided):
        return 0 if problem.taps == 1 else copied
    return copied


#: Bytes of a filter from which Hopper sums its gradient with channels innermost (1 MiB: 256 x 1024 values).
_LARGE_PLAIN_FILTER = 1 << 20


# --- copies in the kernel's order -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Copies:
    """Bytes of the copy of each tensor, and whether its channels had to be padded."""

    input: int
    output: int
    filter: int
    input_padded: bool
    output_padded: bool


def _copies(problem: Problem, align: int | None = None) -> _Copies:
    vector = align or 16 // problem.itemsize
    channels, filters = round_up(problem.channels, vector), round_up(problem.filters, vector)
    e = problem.itemsize
    return _Copies(
        problem.batch * problem.input_pixels * channels * e,
        problem.batch * problem.output_pixels * filters * e,
        filters * channels * problem.taps * e,
        channels != problem.channels,
        filters != problem.filters,
    )


def _transforms(problem: Problem, direction: Direction, kernels: _Kernels) -> int:
    copies = _copies(problem)
    padded = copies.input_padded or copies.output_padded
    nchw = not problem.channels_last
    filter_ = copies.filter if padded or problem.taps > 1 else 0
    if kernels is _Kernels.CHANNELS_INNERMOST:
        size = copies.input if (nchw and problem.input_pixels > 1) or copies.input_padded else 0
        if direction is Direction.FORWARD and nchw and problem.itemsize == 4 and _writes_nchw(problem):
            return size + copies.filter
        if (nchw and problem.output_pixels > 1) or copies.output_padded:
            size += copies.output
        return size + (filter_ if nchw or padded else 0)
    if direction is Direction.FORWARD:
        return copies.input + copies.filter
    if direction is Direction.BACKWARD_DATA and problem.channels_last:
        return copies.output + filter_
    return copies.input + copies.output + (filter_ if nchw else 0)


def _writes_nchw(problem: Problem) -> bool:
    """Hopper runs some TF32 products of NCHW tensors on Ampere's kernels, which need no copy of the output.

    They lose on deep products: the deeper, the more rows it takes to make up for the copy.
    """
    channels, filters = problem.channels, problem.filters
    if problem.taps > 1:
        return channels * problem.taps < _DEEP_PRODUCT and (filters > channels or problem.rows < _MANY_ROWS * 8)
    if (channels % 64 or filters % 64) and problem.rows >= _MANY_ROWS * 8:
        return False
    if channels >= _DEEP_PRODUCT // 4 and filters > _FEW_FILTERS:
        return problem.rows >= _MANY_ROWS * 4
    return problem.rows >= min(channels * channels // 8, _MANY_ROWS // 2)


#: Filters that make a narrow output, whose copy costs little either way.
_FEW_FILTERS = 128
#: Depth (channels times taps) from which Hopper's own TF32 kernels always win on filters of several taps.
_DEEP_PRODUCT = 1152


def _few_channels(problem: Problem, direction: Direction, kernels: _Kernels) -> int:
    """First layers. Plain kernels read a few channels as well as any; large filters go to tensor cores."""
    if direction is Direction.FORWARD:
        return _first_forward(problem)
    if direction is Direction.BACKWARD_DATA:
        return _first_input_gradient(problem)
    return _first_filter_gradient(problem)


def _first_forward(problem: Problem) -> int:
    copies, bare, nchw = _copies(problem), _copies(problem, 1), not problem.channels_last
    large = problem.taps >= _LARGE_FILTER
    if problem.itemsize == 4:
        if nchw:
            return bare.input + bare.output + bare.filter if large and problem.taps < _PATCH_TAPS else 0
        return copies.input + copies.filter if problem.taps >= _PATCH_TAPS else bare.input + bare.filter
    if large:
        pair = _copies(problem, 2) if problem.taps < _PATCH_TAPS and not problem.bf16 else copies
        return pair.input + pair.filter + (copies.output if nchw else 0)
    if nchw:
        return bare.input + bare.output + bare.filter if problem.channels % 4 == 0 else 0
    return copies.input + copies.filter if problem.bf16 and problem.input_pixels == problem.output_pixels else 0


def _first_input_gradient(problem: Problem) -> int:
    copies, bare, nchw = _copies(problem), _copies(problem, 1), not problem.channels_last
    patches = problem.input_pixels == problem.output_pixels * problem.taps
    everything = bare.input + bare.output + bare.filter
    if problem.itemsize == 2:
        if not patches:
            return copies.input + copies.filter + (copies.output if nchw else 0)
        return everything if problem.bf16 or not nchw else 0
    if nchw:
        return 0
    if problem.input_pixels == problem.output_pixels:
        return copies.input + copies.filter if copies.input_padded else 0
    return everything


def _first_filter_gradient(problem: Problem) -> int:
    copies, nchw = _copies(problem), not problem.channels_last
    large = problem.taps >= _LARGE_FILTER
    if problem.itemsize == 4:
        everything = copies.input + copies.output + copies.filter
        return everything if large or problem.channels % 4 == 0 else 0
    if large and problem.taps < _PATCH_TAPS and not problem.bf16:
        pair = _copies(problem, 2)
        return pair.input + pair.filter + (copies.output if nchw else 0)
    partial = _split_sums(problem, _HOPPER_SMS, channels=copies.filter // problem.filters // 2)
    if not nchw and not problem.bf16 and problem.filters <= _NARROW:
        return partial
    return copies.input + copies.filter + (copies.output if nchw else 0) + partial


#: Filters of 16x16 are those that cut an image into patches.
_PATCH_TAPS = 256
#: SMs of the H200 that these choices were read from.
_HOPPER_SMS = 132
#: From 7x7 on, filters of first layers run on tensor cores.
_LARGE_FILTER = 49


# --- partial sums of a filter's gradient ------------------------------------------------------------------------------


def _partial_sums(problem: Problem, card: Card) -> int:
    return _split_sums(problem, card.sm_count * (2 if problem.itemsize == 4 else 1))


#: Rows from which a split of the sum pays (between 12,544 and 25,088 in the plans seen).
_MANY_ROWS = 16384
#: Rows of one step of a split sum, and the steps that starting a split costs.
_STEP_ROWS = 64
_STEPS_TO_START = 7


def _split_sums(problem: Problem, sm_count: int, channels: int = 0) -> int:
    """Earlier kernels: each tile is shared by as many blocks as fill the card; each leaves its part of an fp32 filter.

    ``channels``: the width of the product if it is not the channels, as when taps are folded into it.
    """
    width = channels or problem.channels * problem.taps
    tiles = (
        -(-problem.filters // 128) * -(-width // 256)
        if channels
        else (-(-problem.filters // 64) * -(-problem.channels // 64) * problem.taps)
    )
    steps = -(-problem.rows // _STEP_ROWS)
    per_split = -(-steps // -(-sm_count // tiles)) + _STEPS_TO_START
    splits = -(-steps // per_split)
    return splits * problem.filters * width * 4 if splits > 1 else 0


# --- groups -----------------------------------------------------------------------------------------------------------


def _depthwise(problem: Problem, direction: Direction, card: Card) -> Workspace:
    """cuDNN's depthwise kernels copy nothing; a filter's gradient leaves partial sums of every image."""
    if direction is not Direction.BACKWARD_WEIGHT:
        return Workspace(0)
    e, last = problem.itemsize, problem.channels_last
    if last and problem.taps >= _LARGE_FILTER and e == 4:
        # 7x7 filters run as a grouped convolution, its single channels padded to 16 bytes.
        copied = problem.batch * (problem.input_pixels + problem.output_pixels) * problem.channels * 16
        return Workspace(copied, certain=False)
    hopper = card.compute_capability[0] == 9
    if last and e == 2 and (problem.bf16 or problem.taps >= _LARGE_FILTER or not hopper):
        # Eight fp32 partial sums for every image, channels in blocks of 32.
        return Workspace(problem.batch * round_up(problem.filters, 32) * problem.taps * 32, certain=False)
    if last and hopper:
        return Workspace(_depthwise_parts(problem, card), certain=False)
    if last:
        return Workspace(2 * _HOPPER_SMS * problem.filters * problem.taps * 4, certain=False)
    if e == 4:
        return Workspace(0, certain=False)
    copies = _copies(problem, 1)
    return Workspace(copies.input + copies.output if problem.taps == 9 else 0, certain=False)


def _depthwise_parts(problem: Problem, card: Card) -> int:
    """Engine 61: thread blocks take 128 bytes of channels each and split the pixels, as often as it takes to fill whole
    waves; each leaves 1 KiB. Two blocks run on a multiprocessor at once; with half types plans were seen with 8/3, and
    with 4/3 where one block holds all channels."""
    blocks = -(-problem.filters * problem.itemsize // 128)
    wave = card.sm_count * 2 if problem.itemsize == 4 else card.sm_count * (8 if blocks > 1 else 4) // 3
    return math.lcm(wave, blocks) * 1024


#: Channels per group up to which grouped kernels pack several groups into one product.
_PACKED_GROUP = 32


def _grouped(problem: Problem, direction: Direction, kernels: _Kernels) -> int:
    """A group's channels are padded to a power of two, so that groups pack into products; then as without groups."""
    if kernels is _Kernels.PLAIN:
        return 0
    inner, outer = problem.channels // problem.groups, problem.filters // problem.groups
    width = 1 << (max(inner, outer) - 1).bit_length()
    if width > _PACKED_GROUP:
        vector = 16 // problem.itemsize
        inner_padded, outer_padded = round_up(inner, vector), round_up(outer, vector)
    else:
        inner_padded = outer_padded = width
    e, groups, nchw = problem.itemsize, problem.groups, not problem.channels_last
    copy_input = nchw or inner_padded != inner
    copy_output = nchw or outer_padded != outer
    if e == 4 and direction is Direction.BACKWARD_WEIGHT:
        copy_input = copy_output = True
    size = problem.batch * problem.input_pixels * inner_padded * groups * e if copy_input else 0
    if copy_output:
        size += problem.batch * problem.output_pixels * outer_padded * groups * e
    return size + (inner_padded * outer * groups * problem.taps * e if size else 0)
