"""Which buffers to move to the host for a while, to stay within a budget.

A buffer that nobody uses between two of its uses may lie on the host meanwhile. Which of these gaps are taken is an
integer program: enough bytes away at every moment, the least time waited for copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.recompute.answer import checked_budget, checked_seconds
from graphmem.plan_memory.recompute.steps import Problem, Profile
from graphmem.units import format_bytes

#: A waited-for copy is dearer than one that is hidden, which still is not free: its share of the time in the objective.
_HIDDEN = 1e-6
#: To this share of itself a bound of the solver is exact: HiGHS ends where 1e-6 of the dearest gap are left.
_EXACT = 1e-5
#: More gaps are not given to the solver: those that free most for what they wait are.
_MOST_GAPS = 20_000


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
        return self.seconds <= self.lower_bound * (1 + _EXACT)

    @property
    def moved_bytes(self) -> int:
        return sum(move.bytes for move in self.moves)

    @cached_property
    def graph(self) -> Graph:
        """The graph with copies as nodes: ``x to host`` reads a buffer, ``x to device`` makes it anew."""
        return _with_copies(self.source, self.steps)

    @cached_property
    def steps(self) -> tuple[tuple[str, int], ...]:
        """What runs, in order: ``("run", node)``, ``("to host", buffer)``, ``("to device", buffer)``."""
        return tuple(_steps(self.source, self.moves))

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
    if len(moves) > _MOST_GAPS:
        moves = sorted(moves, key=lambda move: move.waits / move.bytes)[:_MOST_GAPS]
        if _left(problem, plain, moves).max() > budget:
            raise GraphError(f"no offloading was found: the graph has more than {_MOST_GAPS} gaps between uses")
    chosen, bound = _chosen(problem, plain, moves, budget, seconds)
    live = _left(problem, plain, chosen)
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


def _left(problem: Problem, plain: Profile, moves: Sequence[Move]) -> npt.NDArray[np.int64]:
    """The bytes that are alive at every place where these gaps are taken."""
    change = np.zeros(len(plain.live) + 1, dtype=np.int64)
    for move in moves:
        inside = _inside(problem, move)
        change[inside.start] -= move.bytes
        change[inside.stop] += move.bytes
    return plain.live + np.cumsum(change)[:-1]


def _refuse_impossible(problem: Problem, plain: Profile, moves: list[Move], budget: int) -> None:
    least = _left(problem, plain, moves)
    if least.max() > budget:
        place = int(least.argmax())
        where = shown(problem.graph.nodes[problem.order[place]].name) if place < len(problem.order) else "the end"
        raise GraphError(f"no offloading has a peak of {budget} bytes: {int(least.max())} bytes are needed at {where}")


def _chosen(
    problem: Problem, plain: Profile, moves: list[Move], budget: int, seconds: float
) -> tuple[list[Move], float]:
    """The moves that wait least, and a lower bound on what any choice waits."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        raise GraphError("offloading needs SciPy; install it with: pip install 'graphmem[pack]'") from None
    inside = [_inside(problem, move) for move in moves]
    starts, stops = (np.array([getattr(one, name) for one in inside]) for name in ("start", "stop"))
    borders = np.unique(np.concatenate([[0], starts, stops]))
    over = np.maximum.reduceat(np.maximum(plain.live - budget, 0), borders)  # the most between two borders
    count, places = len(moves), len(borders)
    unit = float(max(move.bytes for move in moves))
    sizes = np.array([move.bytes for move in moves]) / unit
    # Variables: whether each gap is taken, then the bytes that are away between borders. A row a border: what is away
    # is what was before, with what leaves and without what comes back.
    columns, away = np.arange(count), count + np.arange(places)
    entries = [
        (np.searchsorted(borders, starts), columns, -sizes),
        (np.searchsorted(borders, stops), columns, sizes),
        (np.arange(places), away, np.ones(places)),
        (np.arange(1, places), away[:-1], -np.ones(places - 1)),
    ]
    rows, variables, values = (np.concatenate(part) for part in zip(*entries, strict=True))
    waits = np.array([move.waits for move in moves])
    scale = float(waits.max())
    found = milp(
        np.concatenate([waits / scale, np.zeros(places)]),
        integrality=np.concatenate([np.ones(count), np.zeros(places)]),
        bounds=Bounds(np.concatenate([np.zeros(count), over / unit]), np.repeat([1.0, np.inf], [count, places])),
        constraints=LinearConstraint(csr_array((values, (rows, variables)), shape=(places, count + places)), 0, 0),
        options={"time_limit": max(seconds, 1.0), "mip_rel_gap": 0.0},
    )
    if found.x is None:  # no time: all of them, which is enough
        return moves, 0.0
    taken = [move for move, value in zip(moves, found.x, strict=False) if value > 0.5]
    return _completed(problem, plain, moves, taken, budget), float(found.mip_dual_bound or 0.0) * scale


def _completed(problem: Problem, plain: Profile, moves: Sequence[Move], taken: list[Move], budget: int) -> list[Move]:
    """The solver's choice, with what it lacks by rounding."""
    while (left := _left(problem, plain, taken)).max() > budget:
        place, chosen = int(left.argmax()), set(taken)
        more = (one for one in moves if one not in chosen)
        here = (one for one in more if _inside(problem, one).start <= place < _inside(problem, one).stop)
        taken = [*taken, min(here, key=lambda one: one.waits)]
    return taken


def _steps(graph: Graph, moves: tuple[Move, ...]) -> Iterator[tuple[str, int]]:
    """The nodes in order; before each, and before the views that run for it, the copies that it waits for."""
    problem = Problem(graph)
    out: dict[int, list[Move]] = {}
    back: dict[int, list[Move]] = {}
    for move in moves:
        out.setdefault(move.after, []).append(move)
        back.setdefault(move.before, []).append(move)
    views: list[int] = []
    for number in problem.with_views(problem.order):
        views.append(number)
        if number not in problem.views:
            yield from (("to device", move.buffer) for move in back.get(number, ()))
            yield from (("run", one) for one in views)
            yield from (("to host", move.buffer) for move in out.get(number, ()))
            views.clear()


def _with_copies(graph: Graph, steps: tuple[tuple[str, int], ...]) -> Graph:
    buffers, newest = list(graph.buffers), list(range(len(graph.buffers)))
    nodes: list[Node] = []
    place: dict[int, int] = {}
    on_host: dict[int, int] = {}
    for what, number in steps:
        if what == "run":
            node = graph.nodes[number]
            place[number] = len(nodes)
            reads, updates = (tuple(newest[one] for one in some) for some in (node.reads, node.updates))
            after = tuple(sorted(place[one] for one in node.after))
            nodes.append(replace(node, reads=reads, updates=updates, after=after))
            continue
        one = graph.buffers[number]
        if what == "to host":
            on_host[number] = len(nodes)
            nodes.append(Node(f"{one.name} to host", (newest[number],)))
        else:
            newest[number] = len(buffers)
            buffers.append(Buffer(one.name, one.bytes))
            nodes.append(Node(f"{one.name} to device", makes=(newest[number],), after=(on_host[number],)))
    return Graph(tuple(nodes), tuple(buffers), tuple(newest[one] for one in graph.outputs))
