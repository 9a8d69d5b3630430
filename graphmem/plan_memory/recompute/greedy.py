"""Rematerialisation as an allocator would do it that knows what comes: when the budget is full, what is cheap to have
again, large, and not needed soon goes first. After DTR (Kirisame et al., ICLR 2021), whose cost of a buffer counts the
neighbours that are gone too; that it is needed again at a known time stands in place of when it was used last."""

from __future__ import annotations

import heapq
import math
import time

from graphmem.plan_memory.recompute.steps import Problem

#: Candidates that are weighed when something has to go: the largest.
_CANDIDATES = 200
#: A schedule of more steps than so many times the nodes is given up: it makes the same again and again.
_MOST_STEPS = 12


class GivenUp(Exception):
    """This way there is no schedule under the budget, or not in time."""


def evicting(problem: Problem, budget: int, deadline: float, patience: float = 1.0) -> list[int]:
    """Steps under ``budget`` bytes. ``patience`` is the power of the time until a buffer is needed in its score.

    Raises :class:`GivenUp`; ``deadline`` is one of ``time.monotonic``.
    """
    return _Run(problem, budget, deadline, patience).steps()


class _Run:
    def __init__(self, problem: Problem, budget: int, deadline: float, patience: float) -> None:
        self._problem, self._budget, self._deadline, self._patience = problem, budget, deadline, patience
        count = len(problem.size)
        self._resident = [maker < 0 for maker in problem.maker]
        self._next = [0] * count  # index into the users of each buffer
        self._live = sum(size for size, here in zip(problem.size, self._resident, strict=True) if here)
        self._droppable: set[int] = set()
        self._gone = _Gone(problem)
        self._steps: list[int] = []
        self._now = 0

    def steps(self) -> list[int]:
        for place, number in enumerate(self._problem.order):
            self._now = place
            missing = [buffer for buffer in self._problem.uses[number] if not self._resident[buffer]]
            if missing:
                self._bring_back(missing, {*self._problem.uses[number]})
            self._run(number, {*self._problem.uses[number]})
            self._used(number)
        self._now = len(self._problem.order)
        missing = [one for one, stays in enumerate(self._problem.stays) if stays and not self._resident[one]]
        if missing:
            self._bring_back(missing, {one for one, stays in enumerate(self._problem.stays) if stays})
        return self._steps

    def _used(self, number: int) -> None:
        """The first run of a node is over: what nobody needs any more goes for good."""
        problem = self._problem
        for buffer in problem.uses[number]:
            self._next[buffer] += 1
        for buffer in (*problem.uses[number], *problem.makes[number]):
            self._settle(buffer)

    def _settle(self, buffer: int) -> None:
        if not self._resident[buffer]:
            return
        if self._next[buffer] >= len(self._problem.users[buffer]):
            self._leave(buffer)
        elif self._problem.maker[buffer] >= 0 and self._problem.until[self._problem.maker[buffer]] >= 0:
            self._droppable.add(buffer)

    def _leave(self, buffer: int) -> None:
        self._resident[buffer] = False
        self._live -= self._problem.size[buffer]
        self._droppable.discard(buffer)

    # --- having again -------------------------------------------------------------------------------------------------

    def _bring_back(self, missing: list[int], pinned: set[int]) -> None:
        """Run again what makes the missing buffers, and what of theirs is missing."""
        problem = self._problem
        runs: dict[int, None] = {}
        stack = [problem.maker[buffer] for buffer in missing]
        while stack:
            number = stack.pop()
            if number in runs:
                continue
            if number < 0 or problem.until[number] < self._now:
                raise GivenUp
            runs[number] = None
            stack += [problem.maker[one] for one in problem.uses[number] if not self._resident[one]]
        left: dict[int, int] = {}
        for number in runs:
            for buffer in problem.uses[number]:
                left[buffer] = left.get(buffer, 0) + 1
        kept = set(pinned)
        for number in sorted(runs, key=problem.place.__getitem__):
            self._run(number, kept | left.keys())
            for buffer in problem.uses[number]:
                left[buffer] -= 1
                if not left[buffer]:
                    del left[buffer]
                    if buffer not in kept:
                        self._settle(buffer)
            for buffer in problem.makes[number]:
                if buffer not in left and buffer not in kept:
                    self._settle(buffer)

    def _run(self, number: int, pinned: set[int]) -> None:
        problem = self._problem
        fresh = [buffer for buffer in problem.makes[number] if not self._resident[buffer]]
        again = [buffer for buffer in problem.makes[number] if self._resident[buffer]]
        needed = sum(problem.size[buffer] for buffer in problem.makes[number]) + problem.scratch[number]
        self._make_room(needed, pinned.union(again))
        for buffer in fresh:
            self._resident[buffer] = True
            self._live += problem.size[buffer]
        self._gone.came_back(number)
        self._steps.append(number)
        if len(self._steps) > _MOST_STEPS * len(problem.order) + 100:
            raise GivenUp

    # --- dropping -----------------------------------------------------------------------------------------------------

    def _make_room(self, needed: int, pinned: set[int]) -> None:
        while self._live + needed > self._budget:
            if time.monotonic() > self._deadline:
                raise GivenUp
            largest = heapq.nlargest(
                _CANDIDATES,
                (buffer for buffer in self._droppable if buffer not in pinned and self._can_return(buffer)),
                key=self._problem.size.__getitem__,
            )
            if not largest:
                raise GivenUp
            worst = min(largest, key=self._score)
            self._leave(worst)
            self._gone.went(self._problem.maker[worst])

    def _next_use(self, buffer: int) -> int:
        users = self._problem.users[buffer]
        return users[self._next[buffer]] if self._next[buffer] < len(users) else self._now

    def _can_return(self, buffer: int) -> bool:
        """Whether it can be made when it is needed next: all that its maker reads can, or will be there."""
        problem, wanted = self._problem, self._next_use(buffer)
        maker = problem.maker[buffer]
        if not problem.size[buffer] or problem.until[maker] < wanted:
            return False
        return all(
            problem.recoverable[one] or (self._resident[one] and problem.users[one][-1] >= wanted)
            for one in problem.uses[maker]
        )

    def _score(self, buffer: int) -> float:
        maker = self._problem.maker[buffer]
        cost = self._problem.cost[maker] + self._gone.around(maker)
        wait = max(self._next_use(buffer) - self._now, 1)
        return cost / (self._problem.size[buffer] * math.pow(wait, self._patience))


class _Gone:
    """Nodes whose results are gone, in groups of neighbours (DTR's equivalence classes), and what each group costs."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._group: dict[int, int] = {}  # of a node that is gone
        self._parent: list[int] = []
        self._cost: list[float] = []

    def went(self, number: int) -> None:
        if number in self._group:
            return
        group = len(self._parent)
        self._parent.append(group)
        self._cost.append(self._problem.cost[number])
        for other in self._groups_around(number):
            self._parent[other] = group
            self._cost[group] += self._cost[other]
        self._group[number] = group

    def came_back(self, number: int) -> None:
        """As in DTR the rest of its group stays together."""
        group = self._group.pop(number, None)
        if group is not None:
            self._cost[self._root(group)] -= self._problem.cost[number]

    def around(self, number: int) -> float:
        """The cost of all groups that the node touches."""
        return sum(self._cost[group] for group in self._groups_around(number))

    def _groups_around(self, number: int) -> set[int]:
        problem = self._problem
        before = (problem.maker[one] for one in problem.uses[number])
        after = (
            problem.order[place]
            for one in problem.makes[number]
            for place in problem.users[one]
            if place < len(problem.order)
        )
        return {self._root(self._group[other]) for other in (*before, *after) if other in self._group}

    def _root(self, group: int) -> int:
        while self._parent[group] != group:
            self._parent[group] = group = self._parent[self._parent[group]]
        return group
