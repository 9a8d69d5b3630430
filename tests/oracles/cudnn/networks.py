"""How far peaks are off where the trees predict workspaces: of random networks as people write them by hand, which
nothing is grown from.

A network (:mod:`tests.oracles.cudnn.written`) is trained, or run under ``no_grad``, three times in PyTorch's allocator:
its tensors' sizes follow from its layers, its workspaces once from cuDNN's answers and once from the trees. The changes
of the peaks from the trees' to cuDNN's, as parts of the trees', are what reports make the interval of (``networks`` in
``graphmem/answering/causes/measured.json``), by family.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.cudnn.predicted.choice import reached
from graphmem.cudnn.predicted.packed import Trees
from graphmem.cudnn.predicted.workspaces import workspace_bytes
from graphmem.devices import device_named
from tests.oracles.cudnn.ask import NO_PLAN, Ask, convolution_of
from tests.oracles.cudnn.forms import DIRECTIONS, ITEMSIZE, problem_of
from tests.oracles.cudnn.manifest import Family
from tests.oracles.cudnn.shapes import Shape
from tests.oracles.cudnn.written import BATCHES, NETWORKS, VOLUME_BATCHES

#: Networks are drawn in sets of as many. The first set was looked at to choose how trees are grown, the second was not.
SETS, SET_SIZE = ("dev", "test"), 300
#: Quantiles that are kept: of so many runs 95 % are expected between the first and the last.
QUANTILES = 39
_KINDS = ["written"] * 6 + ["written plain"] * 3 + ["written row"] + ["written sound"] * 3 + ["written volume"]
_DTYPES = ["fp32"] * 7 + ["fp16"] * 2 + ["bf16"] * 2
#: Bytes of all outputs of a network: smaller ones fit into one segment, larger ones on few cards.
_LEAST_BYTES, _MOST_BYTES, _MOST_LAYERS = 4 << 20, 12 << 30, 60
_STEPS = 3
_LAYER = [field.name for field in fields(Shape) if field.name not in ("dtype", "batch", "last", "tf32")]
_NO_SPACE = 0

#: Bytes of the workspace of a layer, by its place, in a direction.
Spaces = Callable[[int, str], int]


@dataclass(frozen=True)
class Network:
    """Its convolutions in order; ``copies``: outputs of each that are kept beside its own, as of a normalization."""

    shapes: tuple[Shape, ...]
    trains: bool
    copies: int

    @property
    def directions(self) -> tuple[str, ...]:
        return tuple(DIRECTIONS) if self.trains else ("fwd",)


@dataclass(frozen=True)
class Peaks:
    """Bytes of a run's peaks."""

    allocated: int
    reserved: int


def draw_networks(name: str, count: int = SET_SIZE) -> Iterator[Network]:
    """The networks of a set."""
    pick = random.Random(f"network {name}")
    for _ in range(count):
        yield _draw(pick)


def _draw(pick: random.Random) -> Network:
    kind = pick.choice(_KINDS)
    while True:
        layers = pick.choice(NETWORKS[kind])(pick).layers
        if not layers:
            continue
        batches = VOLUME_BATCHES if kind == "written volume" else BATCHES
        batch = pick.choice(batches) if pick.random() < 0.9 else pick.randint(1, 2 * batches[-1])
        dtype, last = pick.choice(_DTYPES), int(pick.random() < 0.12)
        common = {"dtype": dtype, "batch": batch, "last": last}
        shapes = tuple(_shape(layer, common, int(dtype != "fp32" or pick.random() < 0.96)) for layer in layers)
        if not all(shape.is_possible for shape in shapes):
            continue
        trains, copies = pick.choice([True] * 4 + [False]), pick.choice([0, 1, 1])
        if len(shapes) <= _MOST_LAYERS and _LEAST_BYTES <= sum(map(_output, shapes)) <= _MOST_BYTES:
            return Network(shapes, trains, copies)


def _shape(layer: Iterable[Any], common: dict[str, Any], tf32: int) -> Shape:
    named: dict[str, Any] = dict(zip(_LAYER, layer, strict=True))
    return Shape(tf32=tf32, **common, **named)


def told(network: Network, ask: Ask) -> Spaces:
    """cuDNN's answers."""
    known: dict[tuple[Shape, str], int] = {}

    def space(place: int, direction: str) -> int:
        shape = network.shapes[place]
        if (shape, direction) not in known:
            words = NO_PLAN if _is_native(shape) else ask(convolution_of(shape, direction), False)[0]
            known[shape, direction] = _NO_SPACE if words == NO_PLAN else int(words.split()[0])
        return known[shape, direction]

    return space


def predicted(network: Network, family: Family, trees: Trees) -> Spaces:
    """What the trees say."""
    capability = device_named(family.card).compute_capability
    assert capability is not None

    def space(place: int, direction: str) -> int:
        shape = network.shapes[place]
        problem = problem_of(shape, tf32=capability >= (8, 0))
        leaf = None if _is_native(shape) else reached(trees, problem, DIRECTIONS[direction])
        return workspace_bytes(leaf.form, problem, DIRECTIONS[direction]) if leaf else _NO_SPACE

    return space


def changes(network: Network, real: Spaces, said: Spaces) -> tuple[float, float]:
    """The changes of the allocated and the reserved peak once cuDNN is asked, as parts of those predicted."""
    before, after = peaks(network, said), peaks(network, real)
    return after.allocated / before.allocated - 1, after.reserved / before.reserved - 1


def measured(family: Family, trees: Trees, ask: Ask) -> list[Any]:
    """The row of a family: its name, how many networks, and quantiles of either change."""
    found = [
        changes(network, told(network, ask), predicted(network, family, trees))
        for name in SETS
        for network in draw_networks(name)
        if network.shapes[0].dtype != "bf16" or has_bf16(family)
    ]
    return [family.name, len(found), *(_quantiles(column) for column in zip(*found, strict=True))]


def has_bf16(family: Family) -> bool:
    return device_named(family.card).limits.bfloat16


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    steps = (share * (len(ordered) + 1) / (QUANTILES + 1) for share in range(1, QUANTILES + 1))
    return [round(ordered[min(max(round(step) - 1, 0), len(ordered) - 1)], 4) for step in steps]


# --- a run ------------------------------------------------------------------------------------------------------------


def peaks(network: Network, spaces: Spaces) -> Peaks:
    """Three steps in PyTorch's allocator, with what autograd keeps."""
    run = _Run(network, spaces)
    for _ in range(_STEPS):
        run.train() if network.trains else run.sample()
    return Peaks(run.allocator.peak_allocated_bytes, run.allocator.peak_reserved_bytes)


class _Run:
    def __init__(self, network: Network, spaces: Spaces) -> None:
        self.allocator = PyTorchCachingAllocator()
        self._network, self._spaces = network, spaces
        self._take, self._give = self.allocator.malloc, self.allocator.free
        self._weights = [self._take(_weights(shape)) for shape in network.shapes]

    def sample(self) -> None:
        """Under ``no_grad``: an input lives until its output is there."""
        held = self._take(_input(self._network.shapes[0]))
        for place, shape in enumerate(self._network.shapes):
            output = self._take(_output(shape))
            self._use(place, "fwd")
            self._give(held)
            held = output
            for _ in range(self._network.copies):
                copy = self._take(_output(shape))
                self._give(held)
                held = copy
        self._give(held)

    def train(self) -> None:
        shapes = self._network.shapes
        batch = self._take(_input(shapes[0]))
        kept = []
        for place, shape in enumerate(shapes):
            outputs = [self._take(_output(shape))]
            self._use(place, "fwd")
            kept.append([*outputs, *(self._take(_output(shape)) for _ in range(self._network.copies))])
        gradient, gradients = self._take(_output(shapes[-1])), []
        for place in range(len(shapes) - 1, -1, -1):
            shape, below = shapes[place], shapes[place - 1] if place else None
            output, *copies = kept[place]
            for copy in copies:
                passed = self._take(_output(shape))
                self._give(gradient)
                self._give(copy)
                gradient = passed
            passed = None
            if below is not None:
                passed = self._take(_input(shape))
                self._use(place, "bwd_data")
            gradients.append(self._take(_weights(shape)))
            self._use(place, "bwd_weight")
            self._give(gradient)
            self._give(output)
            gradient = passed
            if below is not None and _input(shape) != _output(below):  # pooled, joined or grown between the two
                gradient = self._take(_output(below))
                self._give(passed)
        for held in (batch, *gradients):
            self._give(held)

    def _use(self, place: int, direction: str) -> None:
        size = self._spaces(place, direction)
        if size:
            self._give(self._take(size))


def _is_native(shape: Shape) -> bool:
    """Which PyTorch does not give to cuDNN."""
    return shape.groups == shape.channels > 1 and not shape.last and shape.dtype != "fp16"


def _input(shape: Shape) -> int:
    return shape.batch * shape.channels * math.prod(shape.sides) * ITEMSIZE[shape.dtype]


def _output(shape: Shape) -> int:
    return shape.batch * shape.filters * math.prod(shape.output_sides) * ITEMSIZE[shape.dtype]


def _weights(shape: Shape) -> int:
    """Bytes of a filter, which autocast leaves in fp32."""
    return shape.filters * shape.channels // shape.groups * math.prod(shape.kernel) * ITEMSIZE["fp32"]
