"""Rematerialisation of small graphs by an integer program, as Checkmate states it (Jain et al., MLSys 2020).

Stage ``t`` ends with the first run of the node at place ``t``; in a last one outputs are made again. ``run[t, i]``: the
node at place ``i`` runs in it; ``kept[t, b]``: buffer ``b`` is there when it begins; ``freed[t, i, b]``: after that run
``b`` is let go. The bytes alive are summed from run to run. Solved by HiGHS through SciPy (the extra ``pack``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from graphmem.base.records import dataclass
from graphmem.plan_memory.recompute.steps import Problem


@dataclass(frozen=True)
class Solved:
    """The best steps found (None: none in time), a lower bound on the extra cost, and whether nothing is cheaper."""

    steps: list[int] | None
    bound: float
    is_optimal: bool
    is_impossible: bool = False


def solve(problem: Problem, budget: int, seconds: float) -> Solved | None:
    """The cheapest schedule within ``budget`` bytes; None without SciPy."""
    try:
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        return None
    program = _Program(problem, budget)
    program.state()
    rows, columns, values = program.entries
    matrix = csr_array((values, (rows, columns)), shape=(len(program.low), len(program.cost)))
    scale = max(max(program.cost, default=0.0), 1e-30)
    found = milp(
        np.array(program.cost) / scale,
        integrality=np.array(program.is_whole),
        bounds=(np.zeros(len(program.cost)), np.array(program.most)),
        constraints=LinearConstraint(matrix, program.low, program.high),
        options={"time_limit": max(seconds, 1.0), "mip_rel_gap": 0.0},
    )
    # Inputs that could go are counted to the end: such a program is no bound.
    is_bound = all(problem.stays[buffer] for buffer, maker in enumerate(problem.maker) if maker < 0)
    if found.status == 2:
        return Solved(None, 0.0, False, is_impossible=is_bound)
    bound = max(float(found.mip_dual_bound or 0.0) * scale, 0.0) if is_bound else 0.0
    steps = None if found.x is None else program.steps(found.x)
    return Solved(steps, bound, is_bound and found.status == 0)


class _Program:
    """Variables and rows, added one by one."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self._problem, self._budget = problem, budget
        self.cost: list[float] = []
        self.is_whole: list[int] = []
        self.most: list[float] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._run: dict[tuple[int, int], int] = {}
        self._kept: dict[tuple[int, int], int] = {}
        self._scale = float(max(max(problem.size, default=1), 1))
        self._made = [buffer for buffer, maker in enumerate(problem.maker) if maker >= 0]
        self._place = {buffer: problem.place[problem.maker[buffer]] for buffer in self._made}
        self._users = {
            buffer: {place for place in problem.users[buffer] if place < len(problem.order)} for buffer in self._made
        }

    def _variable(self, cost: float = 0.0, whole: bool = True, most: float = 1.0) -> int:
        self.cost.append(cost)
        self.is_whole.append(int(whole))
        self.most.append(most)
        return len(self.cost) - 1

    def _row(self, low: float, high: float, terms: Iterable[tuple[int, float]]) -> None:
        rows, columns, values = self.entries
        for column, value in terms:
            rows.append(len(self.low))
            columns.append(column)
            values.append(value)
        self.low.append(low)
        self.high.append(high)

    def state(self) -> None:
        problem, stages = self._problem, len(self._problem.order)
        for stage in range(stages + 1):
            for place in self._places(stage):
                number = problem.order[place]
                may = place == stage or problem.until[number] >= stage
                self._run[stage, place] = self._variable(
                    problem.cost[number] if place < stage else 0.0, most=float(may)
                )
        for stage in range(stages + 2):
            for buffer in self._made:
                if self._place[buffer] < stage:
                    self._kept[stage, buffer] = self._variable()
        for stage in range(stages + 1):
            if stage < stages:
                self._row(1, 1, [(self._run[stage, stage], 1.0)])
            self._state_needs(stage)
            self._state_memory(stage)
        for buffer in self._made:
            if problem.stays[buffer]:
                self._row(1, 1, [(self._kept[stages + 1, buffer], 1.0)])

    def _places(self, stage: int) -> range:
        return range(min(stage + 1, len(self._problem.order)))

    def _state_needs(self, stage: int) -> None:
        """What a node reads was kept or is made; what is kept on was kept or made."""
        for place in self._places(stage):
            for buffer in self._problem.uses[self._problem.order[place]]:
                if buffer in self._place:
                    self._row(-np.inf, 0, [(self._run[stage, place], 1.0), *self._had(stage, buffer, -1.0)])
        for buffer in self._made:
            if self._place[buffer] <= stage:
                self._row(-np.inf, 0, [(self._kept[stage + 1, buffer], 1.0), *self._had(stage, buffer, -1.0)])

    def _had(self, stage: int, buffer: int, factor: float) -> list[tuple[int, float]]:
        terms = [(self._run[stage, self._place[buffer]], factor)]
        if (stage, buffer) in self._kept:
            terms.append((self._kept[stage, buffer], factor))
        return terms

    def _state_memory(self, stage: int) -> None:
        """The bytes alive at every run of the stage are those at its beginning, what was made, less what was freed."""
        problem, scale = self._problem, self._scale
        inputs = sum(size for buffer, size in enumerate(problem.size) if problem.maker[buffer] < 0)
        limit = (self._budget - inputs) / scale
        alive = self._variable(whole=False, most=limit)
        kept = [(self._kept[stage, one], problem.size[one] / scale) for one in self._made if (stage, one) in self._kept]
        self._row(0, 0, [(alive, -1.0), *kept])
        freed: list[tuple[int, float]] = []
        for place in self._places(stage):
            number, run = problem.order[place], self._run[stage, place]
            made = sum(problem.size[buffer] for buffer in problem.makes[number]) / scale
            after = self._variable(whole=False, most=limit)
            self._row(0, 0, [(after, -1.0), (alive, 1.0), (run, made), *((one, -size) for one, size in freed)])
            if problem.scratch[number]:
                self._row(-np.inf, limit, [(after, 1.0), (run, problem.scratch[number] / scale)])
            alive = after
            freed = [
                (self._freed(stage, place, buffer), problem.size[buffer] / scale)
                for buffer in dict.fromkeys((*problem.uses[number], *problem.makes[number]))
                if buffer in self._place and problem.size[buffer]
            ]

    def _freed(self, stage: int, place: int, buffer: int) -> int:
        """A buffer may go after a run, if it is there, not kept on, and not used by a later run of the stage."""
        freed = self._variable(whole=False)
        self._row(-np.inf, 0, [(freed, 1.0), (self._run[stage, place], -1.0)])
        self._row(-np.inf, 1, [(freed, 1.0), (self._kept[stage + 1, buffer], 1.0)])
        for other in self._users[buffer]:
            if place < other <= stage:
                self._row(-np.inf, 1, [(freed, 1.0), (self._run[stage, other], 1.0)])
        return freed

    def steps(self, solution: Any) -> list[int]:
        problem = self._problem
        return [
            problem.order[place]
            for stage in range(len(problem.order) + 1)
            for place in self._places(stage)
            if solution[self._run[stage, place]] > 0.5
        ]
