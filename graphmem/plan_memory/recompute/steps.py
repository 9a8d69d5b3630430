"""A graph whose nodes may run more than once: steps, and the bytes that are alive at each.

A step is the index of a node. Every run of a node makes its buffers anew; who reads them is given the newest, and each
lives from the step that makes it to its last reader before the next. First runs keep the order of the graph.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphmem.plan_memory.graphs import Buffer, Graph, Node


class Problem:
    """A graph as rematerialisation sees it; ``cost[i]`` is that of running node ``i`` once more. Nodes that cost more
    than ``dearest`` for a byte that they make are not run again.

    Nodes that make and write nothing, and on which only nodes wait that use all that they use, are views: they are
    free, and run when they are first needed.
    """

    def __init__(self, graph: Graph, dearest: float = math.inf) -> None:
        self.graph, self.dearest = graph, dearest
        self.size = [one.bytes for one in graph.buffers]
        self.uses = [node.uses for node in graph.nodes]
        self.makes = [node.makes for node in graph.nodes]
        self.scratch = [node.scratch for node in graph.nodes]
        self.maker = graph.maker_of
        self.views = _views(graph)
        self.order = [number for number in graph.order if number not in self.views]
        self.place = {number: place for place, number in enumerate(self.order)}
        self.stays = graph.stays
        costs = [node.cost for node in graph.nodes]
        made = [float(sum(self.size[buffer] for buffer in node.makes)) for node in graph.nodes]
        self.cost = costs if any(costs) else made

    @cached_property
    def users(self) -> list[list[int]]:
        """Places in the order at which each buffer is used, ascending; past the last one if it lives to the end."""
        found: list[list[int]] = [[] for _ in self.size]
        for place, number in enumerate(self.order):
            for buffer in self.uses[number]:
                found[buffer].append(place)
        for buffer, stays in enumerate(self.stays):
            if stays:
                found[buffer].append(len(self.order))
        return found

    @cached_property
    def until(self) -> list[int]:
        """The place up to which each node may run again; before its own where it may not."""
        written: dict[int, list[int]] = {}
        for place, number in enumerate(self.order):
            for buffer in self.graph.nodes[number].updates:
                written.setdefault(buffer, []).append(place)
        found = []
        for number, node in enumerate(self.graph.nodes):
            stays = node.updates or any(self.graph.buffers[one].held or one in written for one in node.makes)
            if not node.repeatable or stays or number in self.views or self.price(number) > self.dearest:
                found.append(-1)
                continue
            here = self.place[number]
            later = [place for buffer in node.reads for place in written.get(buffer, ()) if place > here]
            found.append(min(later, default=len(self.order)))
        return found

    def price(self, number: int) -> float:
        """What running a node again costs for a byte that it makes."""
        return self.cost[number] / max(sum(self.size[buffer] for buffer in self.makes[number]), 1)

    def can_go(self, buffer: int) -> bool:
        """Whether a buffer can be dropped at all and made again."""
        return self.maker[buffer] >= 0 and self.until[self.maker[buffer]] >= 0

    def with_views(self, steps: Iterable[int]) -> tuple[int, ...]:
        """``steps`` with every view before the first step that needs it."""
        found: list[int] = []
        waiting = set(self.views)
        for step in steps:
            if waiting:
                found += self._views_before(step, waiting)
            found.append(step)
        return tuple(found)

    def _views_before(self, step: int, waiting: set[int]) -> list[int]:
        needed, stack = [], [one for one in self.graph.nodes[step].after if one in waiting]
        while stack:
            view = stack.pop()
            if view in waiting:
                waiting.discard(view)
                needed.append(view)
                stack += [one for one in self.graph.nodes[view].after if one in waiting]
        place = {number: place for place, number in enumerate(self.graph.order)} if len(needed) > 1 else {}
        return sorted(needed, key=lambda view: place.get(view, 0))


def _views(graph: Graph) -> frozenset[int]:
    """Nodes that make and write nothing, and on which only nodes wait that use all that they use."""
    waiting: list[list[int]] = [[] for _ in graph.nodes]
    for number, node in enumerate(graph.nodes):
        for other in node.after:
            waiting[other].append(number)
    return frozenset(
        number
        for number, node in enumerate(graph.nodes)
        if not (node.makes or node.updates or node.scratch)
        and waiting[number]
        and all(set(graph.nodes[other].uses).issuperset(node.uses) for other in waiting[number])
    )


class Profile:
    """Steps with the bytes alive at each, ``live``; single steps can be left out again."""

    def __init__(self, problem: Problem, steps: Sequence[int]) -> None:
        self.problem, self.steps = problem, list(steps)
        self.is_run = [True] * len(self.steps)
        self._end = len(self.steps)
        count = len(problem.size)
        self._made: list[list[int]] = [[-1] if maker < 0 else [] for maker in problem.maker]
        self._used: list[list[int]] = [[] for _ in range(count)]
        for place, number in enumerate(self.steps):
            for buffer in problem.uses[number]:
                self._used[buffer].append(place)
            for buffer in problem.makes[number]:
                self._made[buffer].append(place)
        for buffer in range(count):
            if problem.stays[buffer]:
                self._used[buffer].append(self._end)
        self.live = self._measured()

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return int(self.live.max(initial=0))

    @property
    def extra_cost(self) -> float:
        """The cost of all steps that are no first runs."""
        first: set[int] = set()
        extra = 0.0
        for number, runs in zip(self.steps, self.is_run, strict=True):
            if runs:
                extra += self.problem.cost[number] if number in first else 0.0
                first.add(number)
        return extra

    def kept(self) -> list[int]:
        """The steps that are left."""
        return [number for number, runs in zip(self.steps, self.is_run, strict=True) if runs]

    def _measured(self) -> npt.NDArray[np.int64]:
        change = np.zeros(self._end + 2, dtype=np.int64)
        for buffer, made in enumerate(self._made):
            for birth, end in zip(made, (*made[1:], self._end + 1), strict=True):
                change[max(birth, 0)] += self.problem.size[buffer]
                change[self._last_use(buffer, birth, end) + 1] -= self.problem.size[buffer]
        live = np.cumsum(change)[: self._end + 1]
        live[: self._end] += np.array([self.problem.scratch[number] for number in self.steps], dtype=np.int64)
        return live

    def _last_use(self, buffer: int, birth: int, end: int) -> int:
        """The last use of what is made at ``birth`` and made anew at ``end``; its birth if there is none."""
        used = self._used[buffer]
        index = bisect_right(used, end) - 1
        return used[index] if index >= 0 and used[index] > birth else max(birth, 0)

    # --- leaving out --------------------------------------------------------------------------------------------------

    def leave_out(self, place: int, budget: int) -> bool:
        """Leave the repeated step at ``place`` out, if no more than ``budget`` bytes are alive then; whether it was."""
        number, size = self.steps[place], self.problem.size
        more: list[tuple[int, int]] = []
        changes: list[tuple[int, int, int]] = []  # first and last place, bytes
        for buffer in self.problem.makes[number]:
            before, after = self._neighbours(buffer, place)
            old, new = self._last_use(buffer, before, place), self._last_use(buffer, place, after)
            if new > place:  # read later: the earlier one lives on
                changes.append((old + 1, place - 1, size[buffer]))
                more.append((old + 1, place))
            else:
                changes.append((place, place, -size[buffer]))
        for buffer in self.problem.uses[number]:
            changes.append(self._without_use(buffer, place))
        changes.append((place, place, -self.problem.scratch[number]))
        for first, last, change in changes:
            self.live[first : last + 1] += change
        if any(self.live[first : last + 1].max(initial=0) > budget for first, last in more):
            for first, last, change in changes:
                self.live[first : last + 1] -= change
            return False
        self._forget(place)
        return True

    def _neighbours(self, buffer: int, place: int) -> tuple[int, int]:
        """When the buffer is made before and after ``place``."""
        made = self._made[buffer]
        index = bisect_left(made, place)
        return made[index - 1], made[index + 1] if index + 1 < len(made) else self._end + 1

    def _without_use(self, buffer: int, place: int) -> tuple[int, int, int]:
        """The places at which the buffer is alive for the use at ``place`` only, and its bytes, taken away."""
        made, used = self._made[buffer], self._used[buffer]
        index = bisect_left(made, place)
        birth, end = made[index - 1], made[index] if index < len(made) else self._end + 1
        if self._last_use(buffer, birth, end) != place:
            return 0, -1, 0
        before = used[bisect_left(used, place) - 1] if used[0] < place else -1
        return max(birth, before, 0) + 1, place, -self.problem.size[buffer]

    def _forget(self, place: int) -> None:
        self.is_run[place] = False
        for buffer in self.problem.makes[self.steps[place]]:
            self._made[buffer].remove(place)
        for buffer in self.problem.uses[self.steps[place]]:
            self._used[buffer].remove(place)


def unrolled(graph: Graph, steps: Sequence[int]) -> Graph:
    """The graph in which every step is a node of its own: runs after the first are called ``... (again)`` and make
    buffers of their own."""
    buffers, newest = list(graph.buffers), list(range(len(graph.buffers)))
    nodes: list[Node] = []
    last_run: dict[int, int] = {}
    for step in steps:
        node = graph.nodes[step]
        reads, updates = (tuple(newest[one] for one in some) for some in (node.reads, node.updates))
        name, makes = node.name, node.makes
        if step in last_run:
            name = f"{name} (again)"
            makes = tuple(range(len(buffers), len(buffers) + len(makes)))
            for buffer, made in zip(node.makes, makes, strict=True):
                buffers.append(Buffer(f"{graph.buffers[buffer].name} (again)", graph.buffers[buffer].bytes))
                newest[buffer] = made
        after = tuple(sorted({last_run[one] for one in node.after if one in last_run}))
        last_run[step] = len(nodes)
        nodes.append(replace(node, name=name, reads=reads, makes=makes, updates=updates, after=after))
    return Graph(tuple(nodes), tuple(buffers), tuple(newest[one] for one in graph.outputs))
