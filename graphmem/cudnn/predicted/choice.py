"""Which plan cuDNN's heuristics put first, as the form of its workspace.

cuDNN chooses among its kernels by a trained model of their run time (``libcudnn_heuristic``), which publishes neither
rules nor times. What it chooses can be asked for without a card (``tests/oracles/cudnn``). The files of ``plans``
hold decision trees over shapes, which choose a form as it does. They were grown from its answers for random
convolutions, none of which is among the shapes that the tests compare. A branch asks for one feature of the
convolution. A leaf holds the form that fits most of the answers there, and the share of them in percent whose workspace
it hits within 10 %.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from functools import cache, lru_cache
from importlib import resources

from graphmem.cudnn.predicted.packed import Branch, Leaf, PackedError, Trees, unpack
from graphmem.cudnn.predicted.problem import Direction, Problem, Product
from graphmem.cudnn.predicted.workspaces import parts_of
from graphmem.devices.capabilities import Capability

#: Tiles of the kernels, values of m and n.
TILES = ((128, 128), (128, 64), (64, 64), (64, 128), (256, 128), (128, 256), (256, 64), (64, 256))
#: Tiles of a wave. cuDNN's answers are the same whatever number of multiprocessors the device has (600 questions each
#: for two or three cards of capability 8.0, 8.6, 8.9, 9.0 and 12.0), so one number serves all; the H200's is 132.
_WAVE = 132
#: Layers that libraries have and those that only hand-written networks have are drawn and grown apart: first layers by
#: their images, the others by channels that 8 does not divide and by filters other than 1x1 and 3x3.
_SMALL_PIXELS = 64 * 64
_USUAL_TAPS = (1, 9)
_WIDER = (5, 7)
_WIDE = 64
_FIRST_LAYER = 8
_COLOURS = (3, 4)
_FP32_BYTES = 4
FOLDER = "plans"


class Plan(Enum):
    """Of which plan a tree speaks; the words are those of its section."""

    #: The one that cuDNN puts first.
    FIRST = ""
    #: The first that adds in a fixed order, where the first of all does not.
    DETERMINISTIC = "deterministic, "
    #: The one of the largest workspace.
    LARGEST = "largest, "


def choose_on(limits: Capability, problem: Problem, direction: Direction, which: Plan = Plan.FIRST) -> Leaf | None:
    """The leaf for a card of a compute capability. TF32 came with Ampere, as bfloat16 did."""
    if not limits.bfloat16:
        problem = replace(problem, tf32=False)
    return choose(limits.cudnn_trees, problem, direction, which)


@lru_cache(maxsize=4096)  # every iteration asks the same
def choose(family: str, problem: Problem, direction: Direction, which: Plan = Plan.FIRST) -> Leaf | None:
    """The leaf of a family's tree that a convolution reaches. None if the family has no tree for it."""
    return reached(load(family), problem, direction, which)


def reached(trees: Trees, problem: Problem, direction: Direction, which: Plan = Plan.FIRST) -> Leaf | None:
    """:func:`choose` from trees that are at hand."""
    own = section(problem, direction, which)
    node = None if which is not Plan.DETERMINISTIC and is_of_libraries(problem) else trees.get(own)
    if node is None:
        node = trees.get(section(problem, direction, which, general=True))
    values = features(problem, direction) if isinstance(node, Branch) else {}
    while isinstance(node, Branch):
        node = node.low if values[node.feature] <= node.threshold else node.high
    return node


def is_unordered(problem: Problem, direction: Direction, size: int, form: str) -> bool:
    """Whether a plan of this workspace may add in any order, which deterministic mode passes over.

    In 36,000 answers for each of three cards two engines did, both of them for fp32 in nearly all cases: number 20 for
    filter gradients, which takes no workspace, and number 25 for input gradients, which takes none or, for
    channels_last tensors, a copy of all three. Three of four plans with such a workspace are theirs.
    """
    if problem.itemsize != _FP32_BYTES or direction is Direction.FORWARD:
        return False
    return not size or (direction is Direction.BACKWARD_DATA and parts_of(form)[0] == ("copy", "IOF"))


def section(problem: Problem, direction: Direction, which: Plan = Plan.FIRST, general: bool = False) -> str:
    """Name of the tree of a plan, a direction, a width of values and a kind of layer; ``general``: of the wider kind
    that stands in for one without a tree."""
    width = {2: "half", 4: "fp32" if problem.tf32 else "fp32 without TF32"}.get(problem.itemsize, "fp64")
    return f"{which.value}{direction.value}, {width}, {_general_kind(problem) if general else _kind(problem)}"


def _kind(problem: Problem) -> str:
    if problem.groups > 1:
        return _general_kind(problem)
    if len(problem.kernel) > 2:
        return "volume"
    if problem.kernel[0] == 1 < problem.kernel[-1] or _is_one_row(problem):
        return "row"
    if problem.channels < _FIRST_LAYER:
        small = problem.input_pixels <= _SMALL_PIXELS or problem.filters % 8
        if small:
            return "small first layer"
        return "first layer" if is_of_libraries(problem) else "other first layer"
    if problem.channels % 8 or problem.filters % 8:
        return "odd layer"
    return "layer" if problem.taps in _USUAL_TAPS else "layer of unusual filters"


def _is_one_row(problem: Problem) -> bool:
    """Whether the images are rows: sounds, series, points. A single pixel is none, which libraries' layers have."""
    return len(problem.input_sides) == 2 and problem.input_sides[0] == 1 < problem.input_sides[1]


def is_of_libraries(problem: Problem) -> bool:
    """Whether libraries have such layers too, though they are of a kind that has trees for hand-written networks: trees
    for libraries were grown from more of them, and hit more of those kept back."""
    taps, padding = problem.kernel[-1], problem.padding
    if len(problem.kernel) > 2 or problem.kernel[0] != taps or problem.groups > 1 or _is_one_row(problem):
        return False
    if problem.channels < _FIRST_LAYER:
        is_patch = taps % 2 == 0 and problem.input_pixels > _SMALL_PIXELS
        return problem.channels in _COLOURS and problem.filters % 8 == 0 and (taps % 2 == 1 or is_patch)
    if problem.channels % 8 or problem.filters % 8:
        narrower = problem.filters if problem.channels % 8 else _WIDE
        return problem.taps in _USUAL_TAPS and min(problem.channels, narrower) >= _WIDE
    return taps in _WIDER and padding == taps // 2 * problem.dilation


def _general_kind(problem: Problem) -> str:
    """Kinds for which libraries have layers; a volume is taken for an image of as many pixels."""
    if problem.groups > 1:
        return "depthwise" if problem.groups == problem.channels else "groups"
    return "first layer" if problem.channels < _FIRST_LAYER else "layer"


def features(problem: Problem, direction: Direction) -> dict[str, float]:
    """The features that the trees ask for. ``cost AxB``: time of the waves of tiles of A by B, as a multiple of the
    least."""
    p, product, vector = problem, Product.of(problem, direction), 16 // problem.itemsize
    width = p.input_sides[-1] if p.input_sides else math.isqrt(p.input_pixels)
    values: dict[str, float] = {
        "channels_last": p.channels_last,
        "bf16": p.bf16,
        "dilated": p.dilated,
        "batch": p.batch,
        "channels": p.channels,
        "filters": p.filters,
        "groups": p.groups,
        "group channels": p.channels // p.groups,
        "group filters": p.filters // p.groups,
        "narrower": min(p.channels, p.filters),
        "wider": max(p.channels, p.filters),
        "channels % vector": p.channels % vector,
        "filters % vector": p.filters % vector,
        "channels % 64": p.channels % 64,
        "filters % 64": p.filters % 64,
        "channels % 128": p.channels % 128,
        "filters % 128": p.filters % 128,
        "taps": p.taps,
        "strided": p.strided,
        "input pixels": p.input_pixels,
        "input rows": p.batch * p.input_pixels,
        "output rows": p.rows,
        "weights": p.channels * p.filters * p.taps,
        "input width": width,
        "input height": p.input_pixels // width,
        "output width": p.output_sides[-1] if p.output_sides else math.isqrt(p.output_pixels),
        "filter width": p.kernel[-1],
        "filter height": p.kernel[-2],
        "stride": p.stride,
        "padding": p.padding,
        "dilation": p.dilation,
        "channels' power of two": p.channels & -p.channels,
        "filters' power of two": p.filters & -p.filters,
        "m": product.m,
        "n": product.n * product.count,
        "k": product.k,
    }
    waves = {tile: -(-product.tiles(*tile) // _WAVE) * tile[0] * tile[1] for tile in TILES}
    least = min(waves.values())
    for (m, n), cost in waves.items():
        values[f"tiles {m}x{n}"] = product.tiles(m, n)
        values[f"cost {m}x{n}"] = cost / least
    return values


# --- the files --------------------------------------------------------------------------------------------------------


@cache
def load(family: str) -> Trees:
    """The trees of a family of cards. Raises :class:`~graphmem.errors.GraphmemError` if its file is damaged or gone."""
    file = resources.files(__package__).joinpath(FOLDER, f"{family}.trees")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PackedError(f"cannot read {file}: {error.strerror}; install graphmem again") from None
    return unpack(data, str(file))
