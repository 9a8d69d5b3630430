"""Which buffers to move to the host for a while, to stay within a budget.

A buffer that nobody uses between two of its uses may lie on the host meanwhile. Which of these gaps are taken is an
integer program: enough bytes away at every moment, the least time waited for copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.recompute.answer import checked_budget, checked_seconds
from graphmem.plan_memory.recompute.steps import Problem, Profile
from graphmem.units import format_bytes

#: A waited-for copy is dearer than one that is hidden, which still is not free: its share of the time in the objective.
_HIDDEN = 1e-6


@public_value(frozen=True, slots=True)
class Move:
    """A buffer that is on the host from after node ``after`` has run until before node ``before`` runs: indices."""

    buffer: int
    after: int
    before: int
    bytes: int
    waits: float


@public_value(frozen=True)
class Offload:
    """The buffers to move. ``moved_bytes`` go out and come back; ``seconds`` are those of copies that computing does
    not hide; no choice of gaps waits less than ``lower_bound`` seconds."""

    source: Graph = field(repr=False)
    moves: tuple[Move, ...] = field(repr=False)
    budget: int
    peak_before: int
    peak: int
    seconds: float
    lower_bound: float

    @property
    def is_proven(self) -> bool:
        return self.seconds <= self.lower_bound * (1 + 1e-6) + 1e-12

    @property
    def moved_bytes(self) -> int:
        return sum(move.bytes for move in self.moves)

    @cached_property
    def graph(self) -> Graph:
        """The graph with copies as nodes: ``x to host`` reads a buffer, ``x to device`` makes it anew."""
        return _with_copies(self.source, self.moves)

    def __str__(self) -> str:
        proof = "proven least" if self.is_proven else f"at least {self.lower_bound:.3g} s"
        return (
            f"peak {format_bytes(self.peak_before)} -> {format_bytes(self.peak)} (budget {format_bytes(self.budget)}): "
            f"{len(self.moves)} buffers of {format_bytes(self.moved_bytes)} lie on the host for a while, "
            f"{self.seconds:.3g} s waited ({proof})"
        )


def offload(
    graph: Graph, budget: int, *, bandwidth: float, rate: float | None = None, seconds: float = 20.0
) -> Offload:
    """The buffers of ``graph`` to move to the host and back so that no more than ``budget`` bytes are on the device.

    ``bandwidth``: bytes a second in one direction; ``rate``: units of ``Node.cost`` a second (FLOP/s), by which a copy
    is hidden behind what runs meanwhile; without it every copy is waited for. Copies of several buffers that compete
    for the link are not modelled. Held buffers stay. Needs SciPy (the extra ``pack``); ``seconds`` are the solver's.

    Raises :class:`graphmem.errors.GraphError` for a budget that no choice can meet.
    """
    budget, seconds = checked_budget(budget), checked_seconds(seconds)
    for name, value in (("bandwidth", bandwidth), ("rate", rate)):
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
            raise GraphError(f"{name} is {shown(value)}; accepted: finite numbers above 0, a second")
    problem = Problem(graph)
    plain = Profile(problem, problem.order)
    if plain.peak <= budget:
        return Offload(graph, (), budget, plain.peak, plain.peak, 0.0, 0.0)
    moves = _gaps(problem, bandwidth, rate)
    _refuse_impossible(problem, plain, moves, budget)
    chosen, bound = _chosen(problem, plain, moves, budget, seconds)
    live = plain.live.copy()
    for move in chosen:
        live[_inside(problem, move)] -= move.bytes
    waits = sum(move.waits for move in chosen)
    return Offload(graph, tuple(chosen), budget, plain.peak, int(live.max()), waits, min(bound, waits))


def _gaps(problem: Problem, bandwidth: float, rate: float | None) -> list[Move]:
    """Every time between two uses of a buffer in which it could be away."""
    clock = np.cumsum([0.0, *(problem.cost[number] / rate if rate else 0.0 for number in problem.order)])
    found = []
    for buffer, users in enumerate(problem.users):
        maker, size = problem.maker[buffer], problem.size[buffer]
        if maker < 0 or not size or problem.graph.buffers[buffer].held:
            continue
        for first, last in pairwise((problem.place[maker], *users)):
            if last - first > 1 and last < len(problem.order):
                copies = 2 * size / bandwidth
                waits = max(copies - float(clock[last] - clock[first + 1]), copies * _HIDDEN)
                found.append(Move(buffer, problem.order[first], problem.order[last], size, waits))
    return found


def _inside(problem: Problem, move: Move) -> slice:
    return slice(problem.place[move.after] + 1, problem.place[move.before])


def _refuse_impossible(problem: Problem, plain: Profile, moves: list[Move], budget: int) -> None:
    least = plain.live.copy()
    for move in moves:
        least[_inside(problem, move)] -= move.bytes
    if least.max() > budget:
        place = int(least.argmax())
        where = shown(problem.graph.nodes[problem.order[place]].name) if place < len(problem.order) else "the end"
        raise GraphError(f"no offloading has a peak of {budget} bytes: {int(least.max())} bytes are needed at {where}")


def _chosen(
    problem: Problem, plain: Profile, moves: list[Move], budget: int, seconds: float
) -> tuple[list[Move], float]:
    """The moves that wait least, and a lower bound on what any choice waits."""
    try:
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise GraphError("offloading needs SciPy; install it with: pip install 'graphmem[pack]'") from None
    over = np.flatnonzero(plain.live > budget)
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    unit = float(max(move.bytes for move in moves))
    for column, move in enumerate(moves):
        inside = _inside(problem, move)
        first, last = np.searchsorted(over, [inside.start, inside.stop])
        rows += range(int(first), int(last))
        columns += [column] * int(last - first)
        values += [move.bytes / unit] * int(last - first)
    matrix = csr_array((values, (rows, columns)), shape=(len(over), len(moves)))
    waits = np.array([move.waits for move in moves])
    scale = float(waits.max())
    needed = (plain.live[over] - budget) / unit
    found = milp(
        waits / scale,
        integrality=np.ones(len(moves)),
        bounds=(0, 1),
        constraints=LinearConstraint(matrix, needed, np.inf),
        options={"time_limit": max(seconds, 1.0)},
    )
    if found.x is None:  # no time: all of them, which is enough
        return moves, 0.0
    return [move for move, taken in zip(moves, found.x, strict=True) if taken > 0.5], float(
        found.mip_dual_bound
    ) * scale


def _with_copies(graph: Graph, moves: tuple[Move, ...]) -> Graph:
    problem = Problem(graph)
    out: dict[int, list[Move]] = {}
    back: dict[int, list[Move]] = {}
    for move in moves:
        out.setdefault(move.after, []).append(move)
        back.setdefault(move.before, []).append(move)
    buffers, newest = list(graph.buffers), list(range(len(graph.buffers)))
    nodes: list[Node] = []
    place: dict[int, int] = {}
    on_host: dict[int, int] = {}
    for number in _copies_before_views(problem, back):
        if isinstance(number, Move):
            name = graph.buffers[number.buffer].name
            newest[number.buffer] = len(buffers)
            buffers.append(Buffer(name, number.bytes))
            nodes.append(Node(f"{name} to device", makes=(newest[number.buffer],), after=(on_host[number.buffer],)))
            continue
        node = graph.nodes[number]
        place[number] = len(nodes)
        nodes.append(
            replace(
                node,
                reads=tuple(newest[one] for one in node.reads),
                updates=tuple(newest[one] for one in node.updates),
                after=tuple(sorted(place[one] for one in node.after)),
            )
        )
        for move in out.get(number, ()):
            on_host[move.buffer] = len(nodes)
            nodes.append(Node(f"{graph.buffers[move.buffer].name} to host", (newest[move.buffer],)))
    return Graph(tuple(nodes), tuple(buffers), tuple(newest[one] for one in graph.outputs))


def _copies_before_views(problem: Problem, back: dict[int, list[Move]]) -> Iterator[int | Move]:
    """The nodes in order; before each, and before the views that run for it, the copies that it waits for."""
    views: list[int] = []
    for number in problem.with_views(problem.order):
        if number in problem.views:
            views.append(number)
            continue
        yield from back.get(number, ())
        yield from views
        yield number
        views.clear()
