"""Which buffers to drop and make again, to stay within a budget."""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from itertools import pairwise

from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Graph
from graphmem.plan_memory.recompute import bounds, exact
from graphmem.plan_memory.recompute.chain import cheapest_within
from graphmem.plan_memory.recompute.greedy import GivenUp, evicting
from graphmem.plan_memory.recompute.steps import Problem, Profile, unrolled
from graphmem.units import format_bytes

#: Graphs of more nodes (views left out) are not given to the solver.
EXACT_NODES = 30
#: Powers of the time until a buffer is needed that the greedy way is tried with.
_PATIENCE = (1.0, 0.5, 0.0, 2.0)
#: How many tiers of prices there are at most, and how much dearer the next one is at least.
_TIERS, _WIDE = 3, 1.5
#: Sums of the same costs in another order differ by less than this share.
_ROUNDING = 1e-9


@public_value(frozen=True)
class Remat:
    """A schedule that recomputes. ``steps`` are indices of nodes of the graph it was asked for, in the order in which
    they run; a node that comes again makes its buffers anew. Bytes are requested ones.

    ``dropped``: names of the buffers that are made more than once; ``extra_cost``: what the runs after the first ones
    cost, in the unit of ``Node.cost`` (or bytes made, of a graph whose nodes cost nothing); ``lower_bound``: no
    schedule with first runs in this order costs less; ``is_proven``: this one costs no more; ``method`` found it.
    """

    source: Graph = field(repr=False)
    steps: tuple[int, ...] = field(repr=False)
    budget: int
    peak_before: int
    peak: int
    extra_cost: float
    cost_before: float
    lower_bound: float
    method: str

    @property
    def is_proven(self) -> bool:
        return self.extra_cost <= self.lower_bound * (1 + _ROUNDING)

    @cached_property
    def graph(self) -> Graph:
        """The graph in which every run is a node of its own."""
        return unrolled(self.source, self.steps)

    @cached_property
    def again(self) -> tuple[int, ...]:
        """The nodes that run more than once, each once, in order."""
        seen: set[int] = set()
        again = {step for step in self.steps if step in seen or seen.add(step)}  # type: ignore[func-returns-value]
        return tuple(sorted(again))

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(self.source.buffers[one].name for step in self.again for one in self.source.nodes[step].makes)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose nodes run more than once, in order."""
        return tuple(
            dict.fromkeys(self.source.nodes[step].module for step in self.again if self.source.nodes[step].module)
        )

    def __str__(self) -> str:
        share = f"{self.extra_cost / self.cost_before:.1%} of one run" if self.cost_before else "nothing"
        proof = "proven least" if self.is_proven else f"at least {self.lower_bound:.4g}"
        return (
            f"peak {format_bytes(self.peak_before)} -> {format_bytes(self.peak)} (budget {format_bytes(self.budget)}): "
            f"{len(self.again)} nodes run again, {self.extra_cost:.4g} more ({share}; {proof}; {self.method})"
        )


def remat(graph: Graph, budget: int, *, seconds: float = 20.0) -> Remat:
    """A schedule of ``graph`` that never holds more than ``budget`` bytes, by making buffers again that it dropped.

    First runs keep the order of the graph. Tried are, within about ``seconds``: an integer program (graphs of up to
    30 nodes, where SciPy is installed), dynamic programming over blocks for what goes forward and back again, and
    evictions by cost, size and time until needed; the cheapest found is the answer, after every repeated run was
    left out that the budget allows to. Buffers whose maker is not ``repeatable``, or reads what is overwritten, stay.

    Raises :class:`graphmem.errors.GraphError` for a budget that no schedule can meet, or that none was found for.
    """
    budget, seconds = checked_budget(budget), checked_seconds(seconds)
    deadline = time.monotonic() + seconds
    problem = Problem(graph)
    plain = Profile(problem, problem.order)
    total = sum(problem.cost[number] for number in problem.order)
    if plain.peak <= budget:
        return Remat(graph, graph.order, budget, plain.peak, plain.peak, 0.0, total, 0.0, "nothing to do")
    _refuse_impossible(problem, budget)
    bound = bounds.least_cost(problem, budget)
    found: list[tuple[float, Profile, str]] = []
    small = len(problem.order) <= EXACT_NODES
    solved = exact.solve(problem, budget, seconds / 2) if small else None
    if solved is not None:
        if solved.is_impossible:
            raise GraphError(
                f"no schedule with first runs in this order has a peak of {_bytes(budget)} or less (proven)"
            )
        bound = max(bound, solved.bound)
        if solved.steps is not None:
            found.append(_refined(problem, solved.steps, budget, deadline, "integer program"))
    if solved is None or not solved.is_optimal:
        for method, steps in _tried(problem, budget, deadline):
            found.append(_refined(problem, steps, budget, deadline, method))
    found = [one for one in found if one[1].peak <= budget]
    if not found:
        raise GraphError(_none_found(problem, budget, plain.peak, deadline))
    cost, best, method = min(found, key=lambda one: one[0])
    if solved is not None and solved.is_optimal:
        bound = cost  # the solver's own figure but for its rounding
    whole = problem.with_views(best.kept())
    return Remat(graph, whole, budget, plain.peak, best.peak, cost, total, min(bound, cost), method)


def _tried(problem: Problem, budget: int, deadline: float) -> Iterator[tuple[str, list[int]]]:
    """Ways to find a schedule, with what each finds: among all nodes, then among cheap ones only."""
    for dearest in (math.inf, *_tiers(problem)):
        if time.monotonic() > deadline:
            return
        among = Problem(problem.graph, dearest)
        if bounds.least_bytes(among)[0] > budget:
            continue
        if (steps := cheapest_within(among, budget, deadline)) is not None:
            yield "blocks", steps
        for patience in _PATIENCE:
            with contextlib.suppress(GivenUp):
                yield f"evictions, patience {patience:g}", evicting(among, budget, deadline, patience)


def _tiers(problem: Problem) -> list[float]:
    """Prices up to which nodes are about as dear: those before the widest gaps."""
    prices = sorted({problem.price(number) for number in problem.order if problem.cost[number] > 0})
    gaps = sorted(((after / before, before) for before, after in pairwise(prices)), reverse=True)
    return sorted(price for ratio, price in gaps[:_TIERS] if ratio > _WIDE)


def _refined(
    problem: Problem, steps: list[int], budget: int, deadline: float, method: str
) -> tuple[float, Profile, str]:
    """The schedule without the repeated runs that nothing reads or the budget does not ask for, dear ones first."""
    profile = Profile(problem, steps)
    changed = profile.peak <= budget
    while changed:
        changed = False
        seen: set[int] = set()
        repeated = []
        for place, number in enumerate(profile.steps):
            if profile.is_run[place]:
                if number in seen:
                    repeated.append(place)
                seen.add(number)
        repeated.sort(key=lambda place: -problem.cost[profile.steps[place]])
        for place in repeated:
            if time.monotonic() > deadline:
                changed = False
                break
            changed = profile.leave_out(place, budget) or changed
    profile = Profile(problem, profile.kept())
    return profile.extra_cost, profile, method


def _none_found(problem: Problem, budget: int, peak: int, deadline: float) -> str:
    """No schedule was found: which budgets would have been met."""
    least, _ = bounds.least_bytes(problem)
    low, high = budget, peak
    if time.monotonic() > deadline:
        return f"no schedule within {_bytes(budget)} was found in time; give more seconds"
    for _ in range(6):
        middle = (low + high) // 2
        if any(True for _ in _tried(problem, middle, deadline)):
            high = middle
        else:
            low = middle
    return (
        f"no schedule within {_bytes(budget)} was found; one within {_bytes(high)} was, and none can have less than "
        f"{_bytes(least)}"
    )


def _refuse_impossible(problem: Problem, budget: int) -> None:
    least, where = bounds.least_bytes(problem)
    if budget < least:
        place = f"while {shown(problem.graph.nodes[where].name)} runs" if where >= 0 else "of inputs and outputs"
        raise GraphError(f"no schedule has a peak of {_bytes(budget)}: {_bytes(least)} are needed {place}")


def check_same(planned: Graph, given: Graph) -> None:
    """Raises :class:`GraphError` unless what was planned is a plan for the graph that is given."""
    if [node.name for node in planned.nodes] != [node.name for node in given.nodes]:
        raise GraphError("this answer is for another graph: its nodes have other names")


def checked_budget(budget: int) -> int:
    """A budget as a number of bytes. Raises :class:`GraphError`."""
    try:
        size = operator.index(budget)
    except TypeError:
        size = -1
    if size < 0:
        raise GraphError(f"a budget of {shown(budget)}; accepted: whole numbers of bytes from 0 on")
    return size


def checked_seconds(seconds: float) -> float:
    """A limit of time. Raises :class:`GraphError`."""
    if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds >= 0):
        raise GraphError(f"seconds is {shown(seconds)}; accepted: finite numbers from 0 on")
    return float(seconds)


def _bytes(size: int) -> str:
    return f"{size} bytes"
