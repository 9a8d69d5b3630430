"""Which nodes of a graph are ready, by the rules of TensorFlow's executor (``PropagatorState``, propagator_state.cc).

A node is ready in one iteration of a frame. The graph itself is a frame of one iteration; every loop is a frame, which
``Enter`` begins and ``Exit`` leaves, and of which up to ``parallel_iterations`` run at a time. Values go along edges
and are held by them until the reader has run. What a branch gives that is not taken is dead: its readers pass that on
and compute nothing. ``Merge`` takes the first value that is alive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

from graphmem.runtimes.tensorflow.edges import Addresses
from graphmem.runtimes.tensorflow.partition import ARGUMENT
from graphmem.runtimes.tensorflow.step import Node

V = TypeVar("V")
#: TensorFlow's default of ``parallel_iterations``.
_PARALLEL = 10


@dataclass
class _Arrived(Generic[V]):
    """The inputs that a node has so far: ``missing`` counts those, or for ``Merge`` what it waits for besides."""

    missing: int
    inputs: dict[int, V] = field(default_factory=dict)
    alive: int = 0
    dead: int = 0
    begun: bool = False


@dataclass(eq=False)
class Iteration(Generic[V]):
    """One turn of a frame. ``unfinished`` counts its nodes that are ready or run, and ``inner`` holds the loops that
    began in it."""

    frame: Frame[V]
    number: int
    arrived: dict[str, _Arrived[V]] = field(default_factory=dict)
    unfinished: int = 0
    inner: dict[str, Frame[V]] = field(default_factory=dict)


@dataclass(eq=False)
class Frame(Generic[V]):
    """A loop that runs. ``entering`` counts the values that have not come in; ``finished`` its first iterations that
    are over; ``deferred`` are values for an iteration that may not begin yet."""

    parent: Iteration[V] | None
    name: str
    entering: int
    parallel: int
    iterations: list[Iteration[V]] = field(default_factory=list)
    finished: int = 0
    invariants: list[tuple[str, V | None, bool]] = field(default_factory=list)
    deferred: list[tuple[str, V]] = field(default_factory=list)
    dead_exits: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ready(Generic[V]):
    """A node that can run, or passes on that it is dead, with its inputs by position."""

    node: Node
    iteration: Iteration[V]
    inputs: Mapping[int, V]
    dead: bool


class Propagator(Generic[V]):
    """The state of one run of a graph. ``hold`` is called for each edge, and each loop, that a value is kept by;
    ``drop`` when a loop lets one go. Edges are let go by whoever runs the node. ``order`` draws the addresses of edges,
    and with them the order of those that leave one node; without it they follow each other as in the graph."""

    def __init__(
        self, nodes: Sequence[Node], hold: Callable[[V], object], drop: Callable[[V], object],
        order: Random | None = None,
    ) -> None:  # fmt: skip
        self._nodes = {node.name: node for node in nodes}
        self._hold, self._drop = hold, drop
        self._edges: dict[str, list[tuple[Node, int, int]]] = defaultdict(list)
        self._after: dict[str, list[Node]] = defaultdict(list)
        self._enters = {node.name for node in nodes if node.op == "Enter"}
        self._entries = Counter(_frame_of(node) for node in nodes if node.op == "Enter")
        self._roots = sorted((node for node in nodes if not node.inputs and not node.after), key=_is_on_host)
        self._connect(nodes, order)
        self._root = self._begin(Frame[V](None, "", 0, 1))

    def _connect(self, nodes: Sequence[Node], order: Random | None) -> None:
        """Edges are made node by node, those to its inputs first, and those from the source of the graph at last."""
        leaving: dict[str, list[tuple[int, tuple[Node, int, int] | Node]]] = defaultdict(list)
        number = 0
        for node in nodes:
            for position, (name, output) in enumerate(node.inputs):
                leaving[name].append((number + position, (node, position, output)))
            for position, name in enumerate(node.after, len(node.inputs)):
                leaving[name].append((number + position, node))
            number += len(node.inputs) + len(node.after)
        addresses = Addresses(order) if order is not None else None
        for name, found in leaving.items():
            for edge in addresses.ordered(found) if addresses else (edge for _, edge in found):
                if isinstance(edge, Node):
                    self._after[name].append(edge)
                else:
                    self._edges[name].append(edge)
        if addresses is not None:
            self._roots = addresses.ordered([*enumerate(self._roots, number)], reserved=False)

    def begin(self) -> list[Ready[V]]:
        """A new run of the graph: the nodes that wait for nothing, in the order in which they run."""
        self._root = self._begin(Frame[V](None, "", 0, 1))
        self._root.unfinished += len(self._roots)
        return [Ready(node, self._root, {}, dead=False) for node in self._roots]

    def now(self, name: str) -> Ready[V]:
        """A node with the inputs that it has, whether it is ready or not."""
        node = self._nodes[name]
        return Ready(node, self._root, self._at(self._root, node).inputs, dead=False)

    def finish(self, done: Ready[V], outputs: Sequence[V | None], dead: Iterable[int] = ()) -> list[Ready[V]]:
        """The nodes that are ready once ``done`` has run. ``dead``: outputs of a branch that is not taken."""
        ready: list[Ready[V]] = []
        node, iteration, frame = done.node, done.iteration, done.iteration.frame
        match node.op:
            case "Enter":
                self._enter(done, outputs, ready)
            case "Exit" if done.dead:
                if iteration is frame.iterations[-1]:
                    frame.dead_exits.append(node.name)
            case "Exit":
                assert frame.parent is not None
                self._deliver(frame.parent, node.name, outputs, False, ready)
            case "NextIteration":
                if not done.dead:
                    self._turn(done, outputs, ready)
            case _:
                self._deliver(iteration, node.name, outputs, done.dead, ready, frozenset(dead))
        iteration.unfinished -= 1
        self._settle(frame, ready)
        return ready

    # --- edges --------------------------------------------------------------------------------------------------------

    def _deliver(
        self, iteration: Iteration[V], name: str, outputs: Sequence[V | None], dead: bool, ready: list[Ready[V]],
        gone: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Hand the outputs of a node to those that read them, dead ones as such; nodes that lack nothing more are added
        to ``ready``."""
        for node, position, output in self._edges[name]:
            is_dead = dead or output in gone
            value = outputs[output] if not is_dead and output < len(outputs) else None
            state = self._at(iteration, node)
            state.dead += is_dead
            state.alive += not is_dead
            if value is not None:
                self._hold(value)
                state.inputs[position] = value
            state.missing -= node.op != "Merge"
            self._check(iteration, node, state, ready, entered_dead=is_dead and name in self._enters)
        for node in self._after[name]:
            state = self._at(iteration, node)
            state.missing -= 1
            state.dead += dead and node.op != "Merge"
            self._check(iteration, node, state, ready)

    def _at(self, iteration: Iteration[V], node: Node) -> _Arrived[V]:
        if node.name not in iteration.arrived:
            inputs = 0 if node.op == "Merge" else len(node.inputs)
            iteration.arrived[node.name] = _Arrived(inputs + len(node.after))
        return iteration.arrived[node.name]

    def _check(
        self, iteration: Iteration[V], node: Node, state: _Arrived[V], ready: list[Ready[V]],
        *, entered_dead: bool = False,
    ) -> None:  # fmt: skip
        """Whether the node is ready: of ``Merge`` one input is alive or all are dead, or the loop itself is."""
        is_merge = node.op == "Merge"
        unsettled = is_merge and not state.alive and not entered_dead and state.dead < len(node.inputs)
        if state.begun or state.missing or unsettled:
            return
        state.begun = True
        iteration.unfinished += 1
        ready.append(Ready(node, iteration, state.inputs, not state.alive if is_merge else state.dead > 0))

    # --- loops --------------------------------------------------------------------------------------------------------

    def _begin(self, frame: Frame[V]) -> Iteration[V]:
        frame.iterations.append(Iteration(frame, len(frame.iterations)))
        return frame.iterations[-1]

    def _enter(self, done: Ready[V], outputs: Sequence[V | None], ready: list[Ready[V]]) -> None:
        name, inner = _frame_of(done.node), done.iteration.inner
        if name not in inner:
            parallel = done.node.attributes.get("parallel_iterations", _PARALLEL)
            inner[name] = Frame(done.iteration, name, self._entries[name], parallel)
            self._begin(inner[name])
        frame = inner[name]
        into = frame.iterations[:1]
        if done.node.attributes.get("is_constant"):
            value = outputs[0] if outputs else None
            if value is not None:
                self._hold(value)
            frame.invariants.append((done.node.name, value, done.dead))
            into = frame.iterations[frame.finished :]
        for iteration in into:
            self._deliver(iteration, done.node.name, outputs, done.dead, ready)
        frame.entering -= 1

    def _turn(self, done: Ready[V], outputs: Sequence[V | None], ready: list[Ready[V]]) -> None:
        frame, number = done.iteration.frame, done.iteration.number + 1
        if number == len(frame.iterations):
            if number - frame.finished == frame.parallel:
                for value in outputs:
                    if value is not None:
                        self._hold(value)
                        frame.deferred.append((done.node.name, value))
                return
            self._next(frame, ready)
        self._deliver(frame.iterations[number], done.node.name, outputs, False, ready)

    def _next(self, frame: Frame[V], ready: list[Ready[V]]) -> None:
        iteration = self._begin(frame)
        frame.dead_exits.clear()
        deferred, frame.deferred = frame.deferred, []
        for name, value in deferred:
            self._deliver(iteration, name, [value], False, ready)
            self._drop(value)
        for name, invariant, dead in frame.invariants:
            self._deliver(iteration, name, [invariant], dead, ready)

    def _settle(self, frame: Frame[V], ready: list[Ready[V]]) -> None:
        """Forget iterations that are over, begin those that waited for it, and end the loop after the last."""
        if frame.parent is None:
            return
        while frame.finished < len(frame.iterations) and not frame.entering:
            first = frame.iterations[frame.finished]
            if first.unfinished or first.inner:
                return
            first.arrived.clear()
            frame.finished += 1
            if frame.deferred:
                self._next(frame, ready)
        if frame.finished < len(frame.iterations):
            return
        for _, invariant, _ in frame.invariants:
            if invariant is not None:
                self._drop(invariant)
        del frame.parent.inner[frame.name]
        for name in frame.dead_exits:
            self._deliver(frame.parent, name, (), True, ready)
        self._settle(frame.parent.frame, ready)


def _is_on_host(node: Node) -> bool:
    """Tensors of the host are received, which is numbered after arguments and constants."""
    return node.op == ARGUMENT and not node.on_card


def _frame_of(node: Node) -> str:
    name: str = node.attributes.get("frame_name", "")
    return name
