"""Rematerialisation as an allocator would do it that knows what comes: when the budget is full, what is cheap to have
again, large, and not needed soon goes first. After DTR (Kirisame et al., ICLR 2021): the cost of a buffer is that of
all that is gone and has to run for it; when it is needed again stands in place of when it was used last."""

from __future__ import annotations

import heapq
import math
import time

from graphmem.plan_memory.recompute.steps import Problem

#: Candidates that are weighed when something has to go: the largest.
_CANDIDATES = 200
#: What needs more nodes than so many to come back is not dropped.
_MOST_RUNS = 100
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
        self._candidates: list[int] = []
        self._news = 0  # how much has gone or come since they were chosen
        # Until when a buffer has to be there, or be made again, for others that were dropped; these times as a heap.
        self._wanted = [-1] * count
        self._ends: list[tuple[int, int]] = []
        self._steps: list[int] = []
        self._now = 0

    def steps(self) -> list[int]:
        for place, number in enumerate(self._problem.order):
            self._now = place
            if not place % 256 and time.monotonic() > self._deadline:
                raise GivenUp
            while self._ends and self._ends[0][0] < place:
                self._settle(heapq.heappop(self._ends)[1])
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
        """Whoever used it has run: it goes, stays, or may be dropped."""
        if not self._resident[buffer]:
            return
        if self._next[buffer] >= len(self._problem.users[buffer]) and self._wanted[buffer] < self._now:
            self._leave(buffer)
        elif self._problem.can_go(buffer):
            self._news += buffer not in self._droppable
            self._droppable.add(buffer)

    def _leave(self, buffer: int) -> None:
        self._resident[buffer] = False
        self._live -= self._problem.size[buffer]
        self._news += buffer in self._droppable
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
        self._steps.append(number)
        if len(self._steps) > _MOST_STEPS * len(problem.order) + 100:
            raise GivenUp

    # --- dropping -----------------------------------------------------------------------------------------------------

    def _make_room(self, needed: int, pinned: set[int]) -> None:
        while self._live + needed > self._budget:
            if time.monotonic() > self._deadline:
                raise GivenUp
            score, worst = self._worst(pinned)
            if score == math.inf and self._news:  # all that were looked at are needed now
                self._look_again()
                score, worst = self._worst(pinned)
            if score == math.inf:
                raise GivenUp
            self._drop(worst)

    def _worst(self, pinned: set[int]) -> tuple[float, int]:
        """The least score of the candidates, and whose it is."""
        if self._news * 32 > len(self._droppable):
            self._look_again()
        there = (one for one in self._candidates if one in self._droppable and one not in pinned)
        return min(((self._score(one), one) for one in there), default=(math.inf, -1))

    def _look_again(self) -> None:
        """The largest of what may be dropped are the candidates, until some have gone or come."""
        sized = (one for one in self._droppable if self._problem.size[one])
        self._candidates = heapq.nlargest(_CANDIDATES, sized, key=self._problem.size.__getitem__)
        self._news = 0

    def _drop(self, buffer: int) -> None:
        until = self._needed_until(buffer)
        for one in self._way_back(buffer)[1]:
            if until > self._wanted[one]:
                self._wanted[one] = until
                heapq.heappush(self._ends, (until, one))
        self._leave(buffer)

    def _score(self, buffer: int) -> float:
        """What dropping it costs for a byte that it frees, the less the longer it is not needed; infinite where it must
        stay. What would be gone before it is needed, and has to be held for it, frees less."""
        until = self._needed_until(buffer)
        cost, kept = self._way_back(buffer)
        freed = self._problem.size[buffer] - sum(self._problem.size[one] for one in kept if self._last(one) < until)
        if freed <= 0:
            return math.inf
        wait = max(self._next_use(buffer) - self._now, 1)
        return cost / (freed * math.pow(wait, self._patience))

    def _way_back(self, buffer: int) -> tuple[float, set[int]]:
        """The cost of all that runs to make it again as things are, infinite where it cannot be; and what that begins
        with, inputs that are always there left out."""
        problem, until = self._problem, self._needed_until(buffer)
        cost, kept, runs, stack = 0.0, set[int](), set[int](), [problem.maker[buffer]]
        while stack:
            number = stack.pop()
            if number in runs:
                continue
            if number < 0 or problem.until[number] < until or len(runs) > _MOST_RUNS:
                return math.inf, kept
            runs.add(number)
            cost += problem.cost[number]
            for one in problem.uses[number]:
                if not self._resident[one]:
                    stack.append(problem.maker[one])
                elif not (problem.stays[one] and problem.maker[one] < 0):
                    kept.add(one)
        return cost, kept

    def _next_use(self, buffer: int) -> int:
        users = self._problem.users[buffer]
        return users[self._next[buffer]] if self._next[buffer] < len(users) else self._wanted[buffer]

    def _needed_until(self, buffer: int) -> int:
        """Until when it has to be there or be made again, once it is dropped: its next use, and others' need of it."""
        return max(self._next_use(buffer), self._wanted[buffer])

    def _last(self, buffer: int) -> int:
        """Until when it is there in any case."""
        users = self._problem.users[buffer]
        return max(users[-1] if self._next[buffer] < len(users) else -1, self._wanted[buffer])
