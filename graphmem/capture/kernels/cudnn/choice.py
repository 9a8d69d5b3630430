"""Which plan cuDNN's heuristics put first, as the form of its workspace.

cuDNN chooses among its kernels by a trained model of their run time (``libcudnn_heuristic``), which publishes neither
rules nor times. What it chooses can be asked for without a card (``tests/oracles/cudnn``). The files of ``plans``
hold decision trees over shapes that say which form it chooses. They were grown from its answers for random
convolutions, none of which is among the shapes that the tests compare. A branch asks for one feature of the
convolution. A leaf holds the form that fits most of the answers there, and the share of them in percent whose workspace
it hits within 10 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources

from graphmem.capture.kernels.cudnn.packed import Branch, Leaf, PackedError, Trees, unpack
from graphmem.capture.kernels.cudnn.problem import Direction, Problem, Product

#: Tiles of the kernels, values of m and n.
TILES = ((128, 128), (128, 64), (64, 64), (64, 128), (256, 128), (128, 256), (256, 64), (64, 256))
#: Tiles of a wave. cuDNN's answers are the same whatever number of multiprocessors the device has (600 questions each
#: for two or three cards of capability 8.0, 8.6, 8.9, 9.0 and 12.0), so one number serves all; the H200's is 132.
_WAVE = 132
FOLDER = "plans"


@lru_cache(maxsize=4096)  # every iteration asks the same
def choose(family: str, problem: Problem, direction: Direction, largest: bool = False) -> Leaf | None:
    """The leaf of a family's tree that a convolution reaches: of the plan that cuDNN puts first, or of the ``largest``
    workspace of all plans. None if the family has no tree for it."""
    return reached(load(family), problem, direction, largest)


def reached(trees: Trees, problem: Problem, direction: Direction, largest: bool = False) -> Leaf | None:
    """:func:`choose` from trees that are at hand."""
    node = trees.get(section(problem, direction, largest))
    if node is None and len(problem.kernel) > 2:
        flat = replace(problem, kernel=(1, problem.taps))  # a volume is taken for an image of as many pixels
        node = trees.get(section(flat, direction, largest))
    values = features(problem, direction) if isinstance(node, Branch) else {}
    while isinstance(node, Branch):
        node = node.low if values[node.feature] <= node.threshold else node.high
    return node


def section(problem: Problem, direction: Direction, largest: bool = False) -> str:
    """Name of the tree of a direction, a width of values and a kind of layer."""
    width = {2: "half", 4: "fp32" if problem.tf32 else "fp32 without TF32"}.get(problem.itemsize, "fp64")
    return f"{'largest, ' if largest else ''}{direction.value}, {width}, {_kind(problem)}"


def _kind(problem: Problem) -> str:
    if problem.groups > 1:
        return "depthwise" if problem.groups == problem.channels else "groups"
    if len(problem.kernel) > 2:
        return "volume"
    return "first layer" if problem.channels < 8 else "layer"


def features(problem: Problem, direction: Direction) -> dict[str, float]:
    """What the trees ask for. ``cost AxB``: time of the waves of tiles of A by B, as a multiple of the least."""
    p, product, vector = problem, Product.of(problem, direction), 16 // problem.itemsize
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
