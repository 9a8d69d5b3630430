"""vLLM's scheduler against its own steps, and what holds for any load."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.serving.base import Request
from graphmem.serving.loads import drawn
from graphmem.serving.over_time import Speed, loaded, simulate
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import FreeBlocks, Scheduler
from tests.recorded.scheduling import loads, stepped
from tests.support.examples import examples


@pytest.mark.parametrize("number", range(len(loads())))
def test_every_step_is_the_engines(number: int) -> None:
    """Tokens of every request, who is preempted, blocks in use, who is finished."""
    load = loads()[number]
    assert stepped(load) == load["steps"]


def test_the_loads_are_hard_enough() -> None:
    preempting = [load for load in loads() if any(step[1] for step in load["steps"])]
    assert len(preempting) >= 10
    assert {load["batches_in_flight"] for load in preempting} == {1, 2}
    assert {len(load["windows"]) for load in preempting} == {1, 2, 3}
    assert {load["prefix_caching"] for load in preempting} == {True, False}


_REQUESTS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 120), st.integers(1, 120)).map(lambda one: Request(*one)),
    min_size=1,
    max_size=25,
)


@given(
    _REQUESTS, st.integers(1, 40), st.integers(1, 8), st.integers(8, 300), st.integers(1, 2), st.booleans(),
    st.sampled_from([(None,), (None, 40)]),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_any_load_ends_with_all_blocks_free(
    requests: list[Request], blocks: int, most: int, tokens: int, in_flight: int, caching: bool,
    windows: tuple[int | None, ...],
) -> None:  # fmt: skip
    layout = Layout(tuple(Group(Spec(1, window), 1) for window in windows), 16, in_flight * tokens)
    scheduler = Scheduler(
        layout, blocks, max_num_seqs=most, max_num_batched_tokens=tokens, max_model_len=200,
        batches_in_flight=in_flight, prefix_caching=caching,
    )  # fmt: skip
    requests.sort(key=lambda one: one.arrival)
    answer = simulate(scheduler, requests, 10_000.0, Speed())
    assert answer.finished + answer.refused == len(requests)
    assert answer.left_waiting == 0
    assert scheduler.used_blocks == 0
    assert answer.most_used <= 1
    assert answer.most_running <= most
    done = sum(
        one.prompt + min(one.output, 200 - one.prompt) - 1
        for one in requests
        if scheduler.fits(one)
    )  # fmt: skip
    assert answer.tokens_computed >= done  # what is lost by preemption comes on top
    if answer.preemptions == 0:
        assert answer.tokens_computed == done


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(0, 5)), max_size=40))
def test_free_blocks_are_those_of_a_list(steps: list[tuple[int, int, int]]) -> None:
    """Against the queue written out block by block: (owner, position), those first taken first."""
    free = FreeBlocks(30)
    queue: list[tuple[int, int]] = [(-1, 0)] * 30
    held = 0
    for kind, amount, owner in steps:
        if kind <= 1 and amount <= len(queue):
            free.take(amount)
            queue = queue[amount:]
            held += amount
        elif kind == 2 and amount <= held:
            free.put_first(amount)
            queue = [(-1, 0)] * amount + queue
            held -= amount
        elif kind == 3 and amount <= held and not free.kept(owner):
            free.put_last(amount, owner)
            queue += [(owner, position) for position in reversed(range(amount))]
            held -= amount
        elif kind == 4:
            kept = free.kept(owner)
            found = min(kept, amount)
            free.take_back(owner, found)
            queue = [
                one if one[0] != owner else (-1, 0) for one in queue if one[0] != owner or one[1] >= found
            ]  # fmt: skip
            held += found
        assert free.count == len(queue)
        for name in range(6):
            assert free.kept(name) == sum(one[0] == name for one in queue)


@pytest.mark.parametrize("rate", [1.0, 6.0, 30.0])
def test_a_load_is_given_up_only_where_it_is_hopeless(rate: float) -> None:
    layout = Layout((Group(Spec(1, None), 1),), 16, 2048)
    requests = drawn(rate, 60.0, ((50.0, 100), (99.0, 900)), ((50.0, 50), (99.0, 200)), 1200)

    def fresh() -> Scheduler:
        return Scheduler(layout, 150, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1200)

    whole = simulate(fresh(), requests, 60.0, Speed())
    part = simulate(fresh(), requests, 60.0, Speed(), bears=2.0)
    assert (part.given_up_at is not None) == (whole.wait_p99 > 2.0)
    if part.given_up_at is None:
        assert part == whole
    else:
        assert part.given_up_at < 60
        assert part.steps < whole.steps


class _Counted(deque[Any]):
    """A queue that counts the requests that somebody walks past."""

    walked = 0

    def __iter__(self) -> Iterator[Any]:
        self.walked += len(self)
        return super().__iter__()


def test_a_queue_that_grows_is_not_walked() -> None:
    """Work grows with tokens, not with ends times requests that wait."""
    layout = Layout((Group(Spec(1, None), 1),), 16, 2048)
    scheduler = Scheduler(layout, 10_000, max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=200)
    scheduler._waiting = queue = _Counted()
    requests = drawn(50.0, 900.0, ((50.0, 20),), ((50.0, 20),), 200)
    answer = simulate(scheduler, requests, 900.0, Speed(step_seconds=0.5))
    assert answer.most_waiting > 10_000
    assert answer.finished > 1000
    assert queue.walked == 0


def test_a_load_is_followed_to_its_end_on_one_copy_alone() -> None:
    """Of more copies that are too few, no more than shows it: an hour of 200 requests a second tries eight numbers."""
    layout = Layout((Group(Spec(1, None), 1),), 16, 2048)

    def make() -> Scheduler:
        return Scheduler(layout, 1000, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=300)

    served: Any = SimpleNamespace(scheduler=make, refusal=None, cards=1)
    requests = drawn(120.0, 100.0, ((50.0, 100),), ((50.0, 50),), 300)
    report = loaded(served, requests, 100.0, Speed(step_seconds=0.1), 5.0, "")
    assert report.answer.given_up_at is None
    too_few = [100.0 if one.followed is None else one.followed for one in report.tried[1:] if not one.enough]
    assert len(too_few) >= 3
    assert sum(too_few) < 60.0 * len(too_few)
