"""Address plans: nothing overlaps, everything is where it was asked to be, and small ones are as low as any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.errors import GraphmemError
from graphmem.plan_memory import AddressPlan, offsets, packing
from graphmem.plan_memory.addresses import sections
from graphmem.replay import most_requested
from graphmem.trace import Place, Trace, TraceBuilder
from tests.plan_memory.graphs import graphs, layered
from tests.support.examples import examples

#: Birth, death and bytes of a storage.
Life = tuple[int, int, int]

lives = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, 5), st.integers(1, 6)).map(
        lambda one: (one[0], one[0] + one[1], one[2])
    ),
    min_size=1,
    max_size=6,
)


def trace_of(lives: Sequence[Life], unit: int = 1) -> Trace:
    builder = TraceBuilder("lives")
    operator = builder.operator("op")
    events = sorted(
        [(birth, 1, index) for index, (birth, _, _) in enumerate(lives)]
        + [(death, 0, index) for index, (_, death, _) in enumerate(lives)]
    )
    storages = {}
    for _, is_birth, index in events:
        if is_birth:
            storages[index] = builder.alloc(lives[index][2] * unit, operator)
        else:
            builder.free(storages[index], operator)
    return builder.build()


def check(trace: Trace, plan: AddressPlan, alignment: int = 1, forbidden: Sequence[tuple[int, int]] = ()) -> None:
    """No two storages that are alive together overlap, and the height is that of the highest."""
    there = [index for index, address in enumerate(plan.addresses) if address is not None]
    assert there == [i for i, one in enumerate(trace.storages) if one.bytes and one.place is Place.DEVICE]
    spans = {i: (plan.addresses[i] or 0, (plan.addresses[i] or 0) + trace.storages[i].bytes) for i in there}
    birth, death = trace.birth_of, trace.death_of
    for one, other in itertools.combinations(there, 2):
        if birth[one] < death[other] and birth[other] < death[one]:
            assert spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0]
    for low, high in spans.values():
        assert low % alignment == 0
        assert low >= 0
        assert all(high <= begin or end <= low for begin, end in forbidden)
    highest = max((high for _, high in spans.values()), default=0)
    assert highest <= plan.height < highest + alignment
    assert plan.lower_bound <= plan.height


def least_height(lives: Sequence[Life], obstacles: Sequence[tuple[int, int]] = ()) -> int:
    """By going through all orders: each storage as low as it goes on those before it."""
    best = 1 << 30
    for order in itertools.permutations(range(len(lives))):
        at: dict[int, int] = {}
        for one in order:
            birth, death, size = lives[one]
            taken = sorted(
                [(at[o], at[o] + lives[o][2]) for o in at if lives[o][0] < death and birth < lives[o][1]]
                + list(obstacles)
            )
            address = 0
            for begin, end in taken:
                if address + size <= begin:
                    break
                address = max(address, end)
            at[one] = address
        best = min(best, max(at[one] + lives[one][2] for one in at))
    return best


@given(lives, st.sampled_from([(), ((2, 3),), ((0, 1), (4, 6))]))
@settings(max_examples=examples(100), deadline=None)
def test_small_plans_are_as_low_as_any(lives: list[Life], forbidden: tuple[tuple[int, int], ...]) -> None:
    trace = trace_of(lives)
    plan = offsets(trace, alignment=1, forbidden=forbidden, time_limit=600)
    check(trace, plan, 1, forbidden)
    in_order = [lives[index] for index in np.argsort([birth for birth, _, _ in lives], kind="stable")]
    assert plan.height == least_height(in_order, forbidden)
    assert plan.is_optimal


@given(lives, st.sampled_from([1, 3, 16]), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_pinned_storages_stay_and_nothing_touches_them(lives: list[Life], alignment: int, searched: bool) -> None:
    trace = trace_of(lives, unit=5)
    pinned = {0: 2 * alignment}
    forbidden = ((40 * alignment, 41 * alignment),)
    plan = offsets(trace, alignment=alignment, pinned=pinned, forbidden=forbidden, time_limit=0.2 if searched else 0)
    assert plan.addresses[0] == 2 * alignment
    check(trace, plan, alignment, forbidden)


@given(graphs())
@settings(max_examples=examples(100), deadline=None)
def test_a_graph_and_its_trace_have_plans_of_one_height(graph) -> None:  # type: ignore[no-untyped-def]
    plan, of_trace = (offsets(one, alignment=1, time_limit=1) for one in (graph, graph.trace()))
    assert plan.lower_bound == most_requested(graph.trace())
    assert (plan.lower_bound, plan.height) == (of_trace.lower_bound, of_trace.height)
    assert len(plan.addresses) == len(graph.buffers)
    assert [address is not None for address in plan.scratch] == [node.scratch > 0 for node in graph.nodes]


def test_compiled_and_interpreted_search_take_the_same_steps() -> None:
    graph = layered(40, reach=6)
    trace = graph.trace()
    first, end = sections(trace.birth_of, trace.death_of)
    members = np.arange(len(first))
    sizes = -(-trace.columns.bytes // 4096)
    counts = np.zeros(len(first), dtype=np.int64)
    packing.count_neighbours(first, end, members, counts, 10_000)
    starts = np.concatenate([[0], np.cumsum(counts)])
    others = np.empty(int(starts[-1]), dtype=np.int64)
    packing.write_neighbours(first, end, members, starts[:-1].copy(), others)
    none = np.zeros(len(first) + 1, dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    lives = packing.Lives(first, end, sizes, starts, others, *none)
    waiting = np.zeros(int(end.max()) + 1, dtype=np.int64)
    for one in members:
        waiting[first[one] : end[one]] += sizes[one]
    answers = []
    for function in (packing.search, getattr(packing.search, "py_func", packing.search)):
        zeros = np.zeros(len(first), dtype=np.int64)
        state = packing.State(zeros - 1, zeros.copy(), zeros.copy(), waiting.copy(), waiting.copy())
        left = np.array([300])
        answer = function(members, 0, 0, lives, state, int(waiting.max()), True, left)
        answers.append((answer, left[0], state.placed.tolist()))
    assert answers[0] == answers[1]


def test_of_very_many_each_is_placed_when_it_is_born(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphmem.plan_memory.addresses._MOST_PAIRS", 10)
    trace = layered(24).trace()
    plan = offsets(trace, forbidden=[(512, 1024)])
    assert plan.by == "as they are born"
    check(trace, plan, 512, [(0, 1024)])


def test_a_capacity_is_enough_or_said_to_be_too_little() -> None:
    trace = trace_of([(0, 2, 4), (1, 3, 4), (2, 4, 4)])
    assert offsets(trace, alignment=1, capacity=100).fits
    plan = offsets(trace, alignment=1, capacity=7)
    assert (plan.height, plan.lower_bound, plan.fits, plan.is_optimal) == (8, 8, False, True)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"alignment": 0}, "the alignment is 0; accepted: whole bytes from 1 on"),
        ({"alignment": 1.5}, "the alignment is 1.5"),
        ({"capacity": -1}, "the capacity is -1"),
        ({"pinned": {9: 0}}, "pinned names 9, which asks for no bytes here"),
        ({"pinned": {0: 7}}, "0 is pinned at 7; accepted: multiples of 512"),
        ({"pinned": {0: 0, 1: 0}}, "0 and 1 are pinned to addresses that overlap while both are alive"),
        ({"pinned": {0: 0}, "forbidden": [(1, 2)]}, r"0 is pinned to 0\.\.4, in the forbidden range 1\.\.2"),
        ({"forbidden": [(3, 2)]}, r"a forbidden range is a tuple; accepted: \(begin, end\) in bytes"),
        ({"forbidden": [7]}, "a forbidden range is 7"),
        ({"order": [0]}, "a trace has one order"),
    ],
)
def test_questions_that_have_no_answer(asked: dict[str, object], words: str) -> None:
    with pytest.raises(GraphmemError, match=words):
        offsets(trace_of([(0, 2, 4), (1, 3, 4)]), **asked)  # type: ignore[arg-type]


def test_nothing_asks_for_nothing() -> None:
    plan = offsets(TraceBuilder("empty").build())
    assert (plan.addresses, plan.height, plan.is_optimal) == ((), 0, True)
