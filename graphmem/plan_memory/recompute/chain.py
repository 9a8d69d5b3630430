"""Rematerialisation of what goes forward and back again: blocks of the forward part are saved whole, or from a
checkpoint before them, by dynamic programming over blocks and memory.

That is the persistent optimum for a heterogeneous chain (Beaumont et al., 2019; rotor): a checkpoint stays until the
backward part of its block has run. A graph that is no chain is cut where few bytes cross; its schedules are measured
as they are, so that a cut across other paths costs quality, never truth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from graphmem.base.records import dataclass
from graphmem.plan_memory.recompute.steps import Problem, Profile

#: Blocks at most, and units that memory is counted in.
_BLOCKS, _UNITS = 48, 256


class Chain:
    """The blocks of a graph, and the cheapest way through them for every amount of memory."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        live = Profile(problem, problem.order).live[:-1]
        self._turn = int(np.argmax(live)) if len(live) else 0
        self._blocks = _cut(problem, self._turn)
        costs = _measured(problem, self._turn, self._blocks)
        self._backward = costs.backward
        unit = max(1, -(-int(sum(costs.whole)) // _UNITS))
        self._table = _Table(
            costs.run, [-(-size // unit) for size in costs.whole], [-(-size // unit) for size in costs.entry]
        )

    def within(self, units: int) -> list[int] | None:
        """The steps of the cheapest way in so many units of memory."""
        return self._steps(units) if self._blocks and self._table.is_possible(units) else None

    def _steps(self, units: int) -> list[int]:
        steps: list[int] = []
        done: set[int] = set()
        now = 0
        for forward, block in self._table.way(units):
            places = self._blocks[block] if forward else self._backward[block]
            for place in places:
                number = self._problem.order[place]
                if place not in done:
                    done.add(place)
                    now = max(now, place)
                elif self._problem.until[number] < now:
                    continue
                steps.append(number)
        return steps


def cheapest_within(problem: Problem, budget: int, deadline: float) -> list[int] | None:
    """The cheapest schedule of the table whose own peak is within ``budget``; None if there is none, or not in time."""
    chain = Chain(problem)
    low, high, best = 0, _UNITS, None
    while low <= high and time.monotonic() < deadline:
        units = (low + high) // 2
        steps = chain.within(units)
        if steps is not None and Profile(problem, steps).peak <= budget:
            best, low = steps, units + 1
        elif steps is None:
            low = units + 1
        else:
            high = units - 1
    return best


def _cut(problem: Problem, turn: int) -> list[range]:
    """Blocks of the forward part with about as many bytes to keep in each, cut where the fewest bytes cross."""
    crossing = np.zeros(turn + 2, dtype=np.int64)
    kept = np.zeros(turn + 1, dtype=np.int64)
    for buffer, maker in enumerate(problem.maker):
        if maker < 0 or problem.place[maker] >= turn:
            continue
        made, users = problem.place[maker], problem.users[buffer]
        forward = [place for place in users if place < turn]
        if forward:
            crossing[made + 1] += problem.size[buffer]
            crossing[forward[-1] + 1] -= problem.size[buffer]
        if users and users[-1] >= turn:
            kept[made] += problem.size[buffer]
    crossing = np.cumsum(crossing)
    filled = np.cumsum(kept + 1)  # nodes that keep nothing count a little, so that no window is empty
    count = min(_BLOCKS, turn)
    cuts = [0]
    for part in range(1, count):
        first, last = np.searchsorted(filled, [filled[-1] * (part - 0.5) / count, filled[-1] * (part + 0.5) / count])
        window = range(max(int(first), cuts[-1] + 1), min(int(last), turn - 1) + 1)
        if window:
            cuts.append(min(window, key=lambda place: int(crossing[place])))
    return [range(first, last) for first, last in zip(cuts, (*cuts[1:], turn), strict=True) if first < last]


@dataclass(frozen=True)
class _Costs:
    """Of every block: what running it costs, the bytes that stay of it until its backward part and that of the next
    have run, those that it begins with, and the places of its backward part."""

    run: list[float]
    whole: list[int]
    entry: list[int]
    backward: list[range]


def _measured(problem: Problem, turn: int, blocks: list[range]) -> _Costs:
    block_of = {place: block for block, places in enumerate(blocks) for place in places}
    count = len(blocks)
    run = [sum(problem.cost[problem.order[place]] for place in places) for places in blocks]
    whole, entry = [0] * count, [0] * count
    home: dict[int, int] = {}  # the block of the last forward use of a buffer
    for buffer, maker in enumerate(problem.maker):
        if maker < 0 or problem.place[maker] >= turn:
            continue
        made = block_of[problem.place[maker]]
        forward = [block_of[place] for place in problem.users[buffer] if place < turn]
        last = max(forward, default=made)
        if last - made > 1:
            continue  # common to many blocks: it stays
        home[buffer] = last
        if last > made:
            entry[last] += problem.size[buffer]
            whole[made] += problem.size[buffer]
        elif problem.users[buffer] and problem.users[buffer][-1] >= turn:
            whole[made] += problem.size[buffer]
    ends = [0] * count  # the first place that is no more of the backward part of each block
    current = count - 1
    for place in range(turn, len(problem.order)):
        wanted = min((home[one] for one in problem.uses[problem.order[place]] if one in home), default=current)
        while current > wanted:
            ends[current] = place
            current -= 1
    ends[: current + 1] = [len(problem.order)] * (current + 1)
    backward = [range(ends[block + 1] if block + 1 < count else turn, ends[block]) for block in range(count)]
    return _Costs(run, whole, entry, backward)


class _Table:
    """``cost[first][last][units]``: of running the blocks forward and back, from the input of the first on."""

    def __init__(self, run: list[float], whole: list[int], entry: list[int]) -> None:
        self._run, self._whole, self._entry = run, whole, entry
        self._count = count = len(run)
        self._cost: list[list[npt.NDArray[np.float64]]] = [
            [np.full(_UNITS + 1, np.inf) for _ in range(count)] for _ in range(count)
        ]
        for length in range(count):
            for first in range(count - length):
                last = first + length
                ways = [cost for _, cost in self._ways(first, last)]
                self._cost[first][last] = np.min(ways, axis=0)

    def is_possible(self, units: int) -> bool:
        return bool(np.isfinite(self._cost[0][-1][units]))

    def _ways(self, first: int, last: int) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
        """Every way to begin, with its cost for all amounts of memory: ``first`` saved whole, or a checkpoint later."""
        rest = self._cost[first + 1][last] if first < last else np.zeros(_UNITS + 1)
        yield first, self._run[first] + _with_less(rest, self._whole[first])
        run = 0.0
        for checkpoint in range(first + 1, last + 1):
            run += self._run[checkpoint - 1]
            later = _with_less(self._cost[checkpoint][last], self._entry[checkpoint])
            yield checkpoint, run + later + self._cost[first][checkpoint - 1]

    def way(self, units: int) -> Iterator[tuple[bool, int]]:
        """(forward or not, block) in order."""
        stack: list[tuple[int, int, int]] = [(0, self._count - 1, units)]  # or (-1, block, 0): its backward part
        while stack:
            first, last, units = stack.pop()
            if first < 0:
                yield False, last
                continue
            if first > last:
                continue
            begin, _ = min(self._ways(first, last), key=lambda way: float(way[1][units]))
            if begin == first:
                yield True, first
                stack += [(-1, first, 0), (first + 1, last, units - self._whole[first])]
            else:
                yield from ((True, block) for block in range(first, begin))
                stack += [(first, begin - 1, units), (begin, last, units - self._entry[begin])]


def _with_less(cost: npt.NDArray[np.float64], units: int) -> npt.NDArray[np.float64]:
    """The cost of what has so many units less."""
    if units > _UNITS:
        return np.full_like(cost, np.inf)
    return np.concatenate((np.full(units, np.inf), cost[: _UNITS + 1 - units]))
