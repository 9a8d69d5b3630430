"""The order of a graph's nodes that needs least memory, with a bound that no order can be below.

What is alive after some nodes have run depends on which they are, not on their order. So the search goes through sets
of nodes that have run, those first whose highest step so far is lowest. That height is a lower bound of every order,
and the first set of all nodes has the best one. A node that can run within the height and leaves no more alive than
before runs at once: in any other order it could be moved to this place, and nothing would be higher.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import Allocator
from graphmem.base.records import public_value
from graphmem.errors import GraphError, UsageError
from graphmem.plan_memory.changes import Peak
from graphmem.plan_memory.graphs import Graph
from graphmem.plan_memory.peaks import peak
from graphmem.plan_memory.tables import Numbers, Tables, deadline, live_bytes, places_of
from graphmem.trace import Trace

#: Nodes between two through which every path goes: of more, only some are ordered anew at a time.
_MOST_SEARCHED = 2_000
#: Nodes of a graph of which it is known, for each pair, whether one must come before the other: a byte a pair.
_MOST_PAIRED = 4_000
#: How many sets of one size are followed at a time, before all of them are.
_WIDTHS = (1, 16, 128)
#: Nodes before and after the highest step of a large graph that are ordered anew first.
_LEAST_AROUND = 32
#: Sets that are remembered at most, some 300 bytes each.
_MOST_SETS = 2_000_000


@public_value(frozen=True)
class Schedule:
    """An order of a graph's nodes (indices). ``peak``: its bytes by the ``objective``, as :func:`graphmem.peak` has
    them; ``lower_bound``: no order needs less."""

    order: tuple[int, ...]
    peak: int
    lower_bound: int
    objective: str

    @property
    def is_optimal(self) -> bool:
        """Whether no order needs less."""
        return self.peak == self.lower_bound


def reorder(
    graph: Graph,
    objective: str | Callable[[], Allocator] = "live",
    *,
    time_limit: float = 10.0,
    alloc_conf: str = "",
) -> Schedule:
    """The order with the lowest peak that is found within ``time_limit`` seconds, never one that is worse than the
    graph's own.

    ``objective``: ``live``, or an allocator, as :func:`graphmem.peak` takes it; of an allocator the orders that need
    least live memory are compared and changed node by node, and the bound is that of live memory. Raises
    :class:`graphmem.errors.GraphmemError` for a trace, whose events do not say what depends on what.
    """
    if isinstance(graph, Trace):
        raise UsageError(
            "a trace does not say which nodes depend on which; give a graphmem.plan_memory.Graph to reorder"
        )
    if not isinstance(graph, Graph):
        raise UsageError(f"reorder takes a Graph, not {type(graph).__name__}")
    until = deadline(time_limit)
    peak(graph, objective, alloc_conf=alloc_conf)  # says what is wrong before time is spent
    is_live = objective == "live"
    lowest, bound = _lowest_live(graph, until if is_live else time.monotonic() + time_limit / 2)
    orders = [graph.order, lowest]
    figures = [peak(graph, objective, np.array(order, dtype=np.int64), alloc_conf=alloc_conf) for order in orders]
    best = min(range(len(orders)), key=figures.__getitem__)
    order, figure = orders[best], figures[best]
    if not is_live and figure > bound:
        order, figure = _changed(graph, order, objective, alloc_conf, bound, until)
    return Schedule(tuple(order), figure, bound, objective if isinstance(objective, str) else "allocator")


def _changed(
    graph: Graph,
    order: Sequence[int],
    objective: str | Callable[[], Allocator],
    alloc_conf: str,
    bound: int,
    until: float,
) -> tuple[tuple[int, ...], int]:
    """Move nodes one by one, and keep what does not reserve more: the order, and its bytes."""
    now, draw, count = Peak(graph, order), np.random.default_rng(0), len(graph.nodes)
    best = now.reserved(objective, alloc_conf=alloc_conf)
    while best > bound and count > 1 and time.monotonic() < until:
        place, far = int(draw.integers(count)), int(draw.geometric(min(1.0, 8 / count)))
        to = min(count - 1, max(0, place + far * int(draw.choice((-1, 1)))))
        if to == place:
            continue
        try:
            now.move(place, to)
        except GraphError:
            continue
        figure = now.reserved(objective, alloc_conf=alloc_conf)
        if figure <= best:
            best = figure
        else:
            now.undo()
    return now.order, best


# --- live memory ------------------------------------------------------------------------------------------------------


def _lowest_live(graph: Graph, until: float) -> tuple[tuple[int, ...], int]:
    """An order that needs little live memory, and a lower bound of all."""
    tables, bound = Tables.of(graph), _needed(graph)
    order = np.array(graph.order, dtype=np.int64)
    live = live_bytes(tables, order)
    starts = np.concatenate([[0], np.cumsum([len(block) for block in _blocks(graph)], dtype=np.int64)]).tolist()
    bounds = [bound]
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        if end - start <= 1 or live[start:end].max() <= bound:
            continue  # it need not be lower
        now = time.monotonic()
        share = now + (until - now) / (len(starts) - 1 - number)
        if end - start > _MOST_SEARCHED:
            _lower_highest(graph, order, start, end, bound, share)
        else:
            order[start:end], least = _Block(graph, order, start, end, live, bound).lowest(share)
            bounds.append(least)
    return tuple(order.tolist()), max(bounds)


def _lower_highest(graph: Graph, order: Numbers, start: int, end: int, bound: int, until: float) -> None:
    """Change an order from place ``start`` to ``end``: the nodes around the highest step are ordered anew, again and
    again, more of them where that does not lower it."""
    tables, around = Tables.of(graph), _LEAST_AROUND
    while around < end - start and time.monotonic() < until:
        live = live_bytes(tables, order)
        highest = start + int(live[start:end].argmax())
        low, high = max(start, highest - around), min(end, highest + around)
        if live[highest] <= bound:
            return
        share = min(until, time.monotonic() + 1)
        order[low:high], _ = _Block(graph, order, low, high, live, bound).lowest(share)
        after = live_bytes(tables, order)
        around = _LEAST_AROUND if after[low:high].max() < live[highest] else 2 * around
        if around > _MOST_SEARCHED:
            return


def _blocks(graph: Graph) -> Iterator[list[int]]:
    """The nodes, as they stand, between those that are before or after every other one."""
    order = graph.order
    places = [0] * len(order)
    for place, number in enumerate(order):
        places[number] = place
    never = len(order)
    next_user = [min((places[n] for n in graph.successors[number]), default=never) for number in order]
    last_need = [max((places[n] for n in graph.predecessors[number]), default=-1) for number in order]
    least_after = [never] * (len(order) + 1)
    for place in range(len(order) - 1, -1, -1):
        least_after[place] = min(least_after[place + 1], last_need[place])
    most_before, block = -1, []
    for place, number in enumerate(order):
        block.append(number)
        if most_before <= place <= least_after[place + 1]:
            yield block
            block = []
        most_before = max(most_before, next_user[place])
    if block:
        yield block


def _needed(graph: Graph) -> int:
    """Bytes that are alive together in every order: while a node runs, what it uses and makes, what stays, and what
    was made before it for nodes after it."""
    tables, count = Tables.of(graph), len(graph.nodes)
    live = live_bytes(tables, np.array(graph.order, dtype=np.int64))
    at_end = int(live[-1])
    inputs = sum(one.bytes for one, maker in zip(graph.buffers, graph.maker_of, strict=True) if maker < 0)
    if not count:
        return at_end
    if count > _MOST_PAIRED:
        stays = [one.bytes if graph.stays[b] and graph.maker_of[b] < 0 else 0 for b, one in enumerate(graph.buffers)]
        total = sum(stays)
        needs = (
            int(tables.taken[n]) + total + sum(graph.buffers[b].bytes - stays[b] for b in node.uses)
            for n, node in enumerate(graph.nodes)
        )
        return max(at_end, inputs, *needs)
    before: npt.NDArray[np.bool_] = np.zeros((count, count), dtype=bool)  # row: the nodes that must run before this one
    for number in graph.order:
        others = graph.predecessors[number]
        before[number, others] = True
        before[number] = before[number] | before[others].any(axis=0)
    after = before.T
    alive = tables.taken.copy()
    for buffer, one in enumerate(graph.buffers):
        maker, users = graph.maker_of[buffer], graph.users_of[buffer]
        during: npt.NDArray[np.bool_] = np.ones(count, dtype=bool)
        if not graph.stays[buffer]:
            during = np.logical_or.reduce(before[users], axis=0)
        during[users] = True
        if maker >= 0:
            during &= after[maker]
        alive[during] += one.bytes
    return max(at_end, inputs, int(alive.max()))


class _State(NamedTuple):
    """Nodes of a block that have ``run``, one bit each, those that are ``ready``, the bytes ``alive`` after them, the
    ``height`` of the highest step, and how they came: the ``last`` ones, after the state ``before``."""

    run: int
    ready: int
    alive: int
    height: int
    last: tuple[int, ...]
    before: _State | None


class _Block:
    """The nodes from place ``start`` to ``end`` of an order, between those that have run and those that have not.

    ``live``: bytes alive while each node of the order runs; below the ``floor`` none of these needs to be.
    """

    def __init__(self, graph: Graph, order: Numbers, start: int, end: int, live: Numbers, floor: int) -> None:
        tables, places = Tables.of(graph), places_of(order)
        self._nodes: list[int] = order[start:end].tolist()
        self._taken: list[int] = tables.taken[self._nodes].tolist()
        self._before, self._height, self._floor = int(live[start]) - self._taken[0], int(live[start:end].max()), floor

        def bits(numbers: Sequence[int]) -> int:
            """Of the nodes of this block among some."""
            found = 0
            for place in places[list(numbers)].tolist():
                if start <= place < end:
                    found |= 1 << (place - start)
            return found

        self._keeps, self._needs, self._frees, self._next = [], [], [], []
        for number in self._nodes:
            node = graph.nodes[number]
            self._keeps.append(sum(graph.buffers[b].bytes for b in node.makes if graph.users_of[b] or graph.stays[b]))
            self._needs.append(bits(graph.predecessors[number]))
            users = ((graph.users_of[b], graph.buffers[b].bytes) for b in node.uses if not graph.stays[b])
            self._frees.append([(bits(found), size) for found, size in users if places[found].max() < end])
            after = places[graph.successors[number]].tolist()
            self._next.append([place - start for place in after if place < end])

    def lowest(self, until: float) -> tuple[list[int], int]:
        """The lowest order that is found by some time, and a lower bound of all orders of these nodes."""
        best, height = list(self._nodes), self._height
        for width in _WIDTHS:
            found = self._beam(width, height, until)
            if found is not None and found.height < height:
                best, height = self._path(found), found.height
        found, bound = self._best_first(height, until)
        if found is not None:
            best = self._path(found)
        return best, bound

    # ---

    def _first(self) -> _State:
        ready = sum(1 << place for place, needs in enumerate(self._needs) if not needs)
        return self._settled(_State(0, ready, self._before, self._floor, (), None))

    def _after(self, run: int, alive: int, place: int) -> tuple[int, int]:
        """The nodes that have run, and bytes alive, after one more."""
        run |= 1 << place
        alive += self._keeps[place]
        for users, size in self._frees[place]:
            if users & run == users:
                alive -= size
        return run, alive

    def _ready(self, ready: int, run: int, place: int) -> int:
        ready &= ~(1 << place)
        for other in self._next[place]:
            if self._needs[other] & run == self._needs[other]:
                ready |= 1 << other
        return ready

    def _settled(self, state: _State) -> _State:
        """The state after all nodes that can run without a higher step and leave no more alive."""
        run, ready, alive, height, last, before = state
        left = ready
        while left:
            place = (left & -left).bit_length() - 1
            left &= left - 1
            if alive + self._taken[place] > height:
                continue
            then, fewer = self._after(run, alive, place)
            if fewer > alive:
                continue
            run, alive, last = then, fewer, (*last, place)
            ready = left = self._ready(ready, run, place)
        return _State(run, ready, alive, height, last, before)

    def _steps(self, state: _State, below: int) -> Iterator[_State]:
        """The states after one more node, with no step as high as ``below``."""
        left = state.ready
        while left:
            place = (left & -left).bit_length() - 1
            left &= left - 1
            height = max(state.height, state.alive + self._taken[place])
            if height < below:
                run, alive = self._after(state.run, state.alive, place)
                ready = self._ready(state.ready, run, place)
                yield self._settled(_State(run, ready, alive, height, (place,), state))

    def _beam(self, width: int, below: int, until: float) -> _State | None:
        """The best that is found from the ``width`` best sets of each size; None by that time, or if none is below."""
        levels: list[dict[int, _State]] = [{} for _ in range(len(self._nodes) + 1)]
        first = self._first()
        levels[first.run.bit_count()][first.run] = first
        for level in levels[:-1]:
            if time.monotonic() > until:
                return None
            for state in heapq.nsmallest(width, level.values(), key=lambda state: (state.height, state.alive)):
                for after in self._steps(state, below):
                    there = levels[after.run.bit_count()]
                    if after.run not in there or after.height < there[after.run].height:
                        there[after.run] = after
            level.clear()
        return min(levels[-1].values(), key=lambda state: state.height, default=None)

    def _best_first(self, below: int, until: float) -> tuple[_State | None, int]:
        """The lowest order of all, if it is below and found by that time, and a lower bound of all."""
        whole = (1 << len(self._nodes)) - 1
        first = self._first()
        waiting, seen, number = [(first.height, 0, first.alive, 0, first)], {first.run: first.height}, 0
        while waiting:
            height, _, _, _, state = heapq.heappop(waiting)
            if state.run == whole:
                return state, height
            if len(seen) > _MOST_SETS or time.monotonic() > until:
                return None, height
            if seen[state.run] < height:
                continue
            for after in self._steps(state, below):
                if seen.get(after.run, below) > after.height:
                    seen[after.run] = after.height
                    number += 1
                    heapq.heappush(waiting, (after.height, -after.run.bit_count(), after.alive, number, after))
        return None, below

    def _path(self, state: _State) -> list[int]:
        """The nodes that led to a state, by their numbers."""
        parts = []
        at: _State | None = state
        while at is not None:
            parts.append(at.last)
            at = at.before
        return [self._nodes[place] for part in reversed(parts) for place in part]
