"""Offloading: plans that keep their budget, and wait no longer than they must."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.errors import GraphError
from graphmem.plan_memory import Graph, offload
from graphmem.plan_memory.offloading import _gaps
from graphmem.plan_memory.recompute.steps import Problem, Profile
from tests.plan_memory.graphs import chain, graphs, peak_of
from tests.support.examples import examples

pytest.importorskip("scipy")


@settings(max_examples=examples(40), deadline=None)
@given(graphs(), st.floats(0.3, 1.0), st.sampled_from((None, 0.5)))
def test_plans_keep_their_budget(graph: Graph, share: float, rate: float | None) -> None:
    budget = int(peak_of(graph) * share)
    try:
        found = offload(graph, budget, bandwidth=2.0, rate=rate)
    except GraphError:
        return  # what is said then, is tested below
    assert found.peak <= budget
    assert peak_of(found.graph) <= found.peak
    assert found.is_proven


@pytest.mark.parametrize("budget", [52, 61, 72])
def test_waits_as_long_as_the_best_of_all_choices(budget: int) -> None:
    problem = Problem(chain(5))
    live = Profile(problem, problem.order).live
    gaps = _gaps(problem, 3.0, 0.7)
    best = float("inf")
    for chosen in itertools.product((0, 1), repeat=len(gaps)):
        left = live.copy()
        for move in itertools.compress(gaps, chosen):
            left[problem.place[move.after] + 1 : problem.place[move.before]] -= move.bytes
        if left.max() <= budget:
            best = min(best, sum(move.waits for move in itertools.compress(gaps, chosen)))
    assert offload(chain(5), budget, bandwidth=3.0, rate=0.7).seconds == pytest.approx(best)


def test_copies_hide_behind_what_runs_meanwhile() -> None:
    waiting, hidden = (offload(chain(20), 120, bandwidth=20.0, rate=rate) for rate in (None, 1.0))
    assert waiting.moved_bytes == hidden.moved_bytes
    assert waiting.seconds == pytest.approx(2 * waiting.moved_bytes / 20)
    assert hidden.seconds < waiting.seconds / 100


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        (-5, {"bandwidth": 1.0}, "a budget of -5"),
        (2.5, {"bandwidth": 1.0}, "a budget of 2.5"),
        (0, {"bandwidth": 1.0}, "no offloading has a peak of 0 bytes"),
        (49, {"bandwidth": 1.0}, "no offloading has a peak of 49 bytes"),
        (60, {"bandwidth": 0}, "bandwidth is 0; accepted"),
        (60, {"bandwidth": -1.0}, "bandwidth is -1.0; accepted"),
        (60, {"bandwidth": float("inf")}, "bandwidth is inf; accepted"),
        (60, {"bandwidth": "fast"}, "bandwidth is 'fast'; accepted"),
        (60, {"bandwidth": 1.0, "rate": 0.0}, "rate is 0.0; accepted"),
        (60, {"bandwidth": 1.0, "seconds": -1}, "seconds is -1; accepted"),
    ],
)
def test_bad_asks_are_one_line(budget: int, options: dict[str, float], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        offload(chain(4), budget, **options)
    assert str(caught.value).startswith(message)
