"""Rematerialisation: schedules that are what they say, beside an exhaustive search where that is possible."""

from __future__ import annotations

import heapq
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.errors import GraphError
from graphmem.plan_memory import Buffer, Graph, Node, Remat, remat
from graphmem.plan_memory.recompute import exact
from graphmem.plan_memory.recompute.bounds import least_bytes, least_cost
from graphmem.plan_memory.recompute.steps import Problem, Profile
from tests.plan_memory.graphs import chain, graphs, peak_of
from tests.support.examples import examples


def _check(graph: Graph, found: Remat) -> None:
    assert peak_of(found.graph) == found.peak <= found.budget
    assert list(dict.fromkeys(found.steps)) == sorted(set(found.steps), key=found.steps.index)
    assert set(found.steps) == set(range(len(graph.nodes)))
    assert found.extra_cost >= found.lower_bound
    for step in found.again:
        assert graph.nodes[step].repeatable
        assert not graph.nodes[step].updates


@settings(max_examples=examples(60), deadline=None)
@given(graphs(), st.floats(0.3, 1.0))
def test_schedules_keep_their_budget(graph: Graph, share: float) -> None:
    budget = int(peak_of(graph) * share)
    try:
        found = remat(graph, budget, seconds=2)
    except GraphError:
        return  # whether rightly, the exhaustive search below tells
    _check(graph, found)


@settings(max_examples=examples(60), deadline=None)
@given(graphs())
def test_bytes_at_every_step_are_those_of_the_trace(graph: Graph) -> None:
    assert Profile(Problem(graph), graph.order).peak == peak_of(graph)


def test_chain_of_fifty_layers() -> None:
    graph = chain(50)
    assert peak_of(graph) == 530
    found = remat(graph, 160)
    _check(graph, found)
    assert found.extra_cost <= 40  # 38 by the bound of every moment
    assert found.lower_bound >= 37
    assert set(found.dropped) <= {f"a{layer}" for layer in range(50)}


def _cheapest(problem: Problem, budget: int) -> float | None:
    """The least extra cost of any schedule with first runs in order, by Dijkstra over (place, what is there)."""
    inputs = frozenset(buffer for buffer, maker in enumerate(problem.maker) if maker < 0)
    queue: list[tuple[float, int, int, frozenset[int]]] = [(0.0, 0, 0, inputs)]
    done: set[tuple[int, frozenset[int]]] = set()
    ties = itertools.count(1)
    while queue:
        cost, _, place, there = heapq.heappop(queue)
        if (place, there) in done:
            continue
        done.add((place, there))
        is_over = place == len(problem.order)
        if is_over and all(buffer in there for buffer, stays in enumerate(problem.stays) if stays):
            return cost
        for buffer in there - inputs:
            heapq.heappush(queue, (cost, next(ties), place, there - {buffer}))
        for other in range(min(place + 1, len(problem.order))):
            number = problem.order[other]
            if other < place and problem.until[number] < place:
                continue
            if there.issuperset(problem.uses[number]):
                held = sum(problem.size[one] for one in there | set(problem.makes[number])) + problem.scratch[number]
                if held <= budget:
                    price = problem.cost[number] if other < place else 0.0
                    after = there.union(problem.makes[number])
                    heapq.heappush(queue, (cost + price, next(ties), max(place, other + 1), after))
    return None


@pytest.mark.parametrize("budget", range(50, 100, 10))
def test_small_chains_cost_no_more_than_an_exhaustive_search_finds(budget: int) -> None:
    graph = chain(4)
    least = _cheapest(Problem(graph), budget)
    if least is None:
        with pytest.raises(GraphError):
            remat(graph, budget)
        return
    found = remat(graph, budget)
    assert found.extra_cost == least
    assert found.is_proven


@settings(max_examples=examples(25), deadline=None)
@given(graphs(most_nodes=6).filter(lambda graph: bool(graph.nodes)), st.floats(0.5, 1.0))
def test_integer_program_is_exact(graph: Graph, share: float) -> None:
    pytest.importorskip("scipy")
    problem = Problem(graph)
    if not all(problem.stays[buffer] for buffer, maker in enumerate(problem.maker) if maker < 0):
        return  # the program keeps inputs that could go, and says so
    budget = int(peak_of(graph) * share)
    if budget < least_bytes(problem)[0]:
        assert _cheapest(problem, budget) is None
        return
    least = _cheapest(problem, budget)
    assert least is None or least_cost(problem, budget) <= least + 1e-9
    solved = exact.solve(problem, budget, 10)
    assert solved is not None
    if least is None:
        assert solved.is_impossible
    else:
        assert solved.steps is not None
        assert Profile(problem, solved.steps).peak <= budget
        assert Profile(problem, solved.steps).extra_cost == pytest.approx(least)


def test_what_cannot_be_made_again_stays() -> None:
    dropout = Node("dropout", (0,), (1,), cost=1, repeatable=False)
    use, last = Node("use", (1,), (2,), cost=1), Node("last", (1, 2), (3,), cost=1)
    graph = Graph((dropout, use, last), (Buffer("x", 1, True), *(Buffer(name, 10) for name in "abc")), (3,))
    with pytest.raises(GraphError, match="31 bytes are needed while 'last' runs"):
        remat(graph, 30)


def test_a_node_runs_again_only_before_what_it_reads_is_overwritten() -> None:
    buffers = (Buffer("w", 1, True), Buffer("a", 10), Buffer("b", 10), Buffer("c", 10), Buffer("d", 1))
    make, use, write = Node("make", (0,), (1,)), Node("use", (1,), (2,)), Node("write", (2,), updates=(0,))
    rest, end = Node("rest", (2,), (3,)), Node("end", (1, 3), (4,))
    again = remat(Graph((make, use, rest, end), buffers, (4,)), 22)
    assert again.steps.count(0) == 2
    with pytest.raises(GraphError, match="no schedule"):
        remat(Graph((make, use, write, rest, end), buffers, (4,)), 22)


HUGE = Graph(
    tuple(Node(f"n{one}", (one,), (one + 1,)) for one in range(20_000)),
    tuple(Buffer(f"b{one}", 8) for one in range(20_001)),
    tuple(range(20_001)),
)


@pytest.mark.parametrize(
    ("budget", "seconds", "message"),
    [
        (-1, 1, "a budget of -1; accepted"),
        (1.5, 1, "a budget of 1.5; accepted"),
        ("1 GiB", 1, "a budget of '1 GiB'; accepted"),
        (None, 1, "a budget of None; accepted"),
        (0, 1, "no schedule has a peak of 0 bytes"),
        (49, 1, "no schedule has a peak of 49 bytes: 50 bytes are needed while 'b3' runs"),
        (60, float("nan"), "seconds is nan; accepted"),
        (60, -1, "seconds is -1; accepted"),
        (60, "soon", "seconds is 'soon'; accepted"),
    ],
)
def test_bad_asks_are_one_line(budget: int, seconds: float, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        remat(chain(4), budget, seconds=seconds)
    assert str(caught.value).startswith(message)


def test_graph_without_nodes_and_one_of_zero_bytes() -> None:
    assert remat(Graph((), ()), 0).peak == 0
    assert remat(Graph((Node("n", (), (0,)),), (Buffer("b", 0),)), 0).steps == (0,)


@pytest.mark.slow
def test_huge_graph_ends_in_time() -> None:
    begin = time.monotonic()
    with pytest.raises(GraphError, match="no schedule"):
        remat(HUGE, 8 * 10_000, seconds=2)
    assert time.monotonic() - begin < 30
