"""Schedulers against the engines' own steps, and what holds for any load."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphmem.serving.base import Request
from graphmem.serving.fleet import loaded
from graphmem.serving.load_options import OverTime
from graphmem.serving.loads import drawn
from graphmem.serving.over_time import Course, LoadAnswer, Speed
from graphmem.serving.sglang.radix_tree import RadixTree, Text
from graphmem.serving.sglang.scheduler import Scheduler as SGLang
from graphmem.serving.vllm.block_pool import BlockPool
from graphmem.serving.vllm.connectors import Host, Receiver, Sender
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import Scheduler
from tests.recorded.scheduling import ENGINES, loads, stepped
from tests.support.examples import examples


def simulate(*load: Any, **options: Any) -> LoadAnswer:
    """The answer of a course that is followed."""
    course = Course(*load, **options)
    course.follow()
    return course.answer()


@pytest.mark.parametrize(
    ("engine", "number"), [(engine, number) for engine in ENGINES for number in range(len(loads(engine)))]
)
def test_every_step_is_the_engines(engine: str, number: int) -> None:
    """Tokens of every request, who is preempted, blocks in use, who is finished."""
    load = loads(engine)[number]
    assert stepped(load) == load["steps"]


def test_the_loads_are_hard_enough() -> None:
    preempting = [load for load in loads("vllm") if any(step[1] for step in load["steps"])]
    assert len(preempting) >= 10
    assert {load["batches_in_flight"] for load in preempting} == {1, 2}
    assert {len(load["windows"]) for load in preempting} == {1, 2, 3}
    assert {load["prefix_caching"] for load in preempting} == {True, False}
    sharing = [load for load in loads("vllm") if any(len(request) > 3 for request in load["requests"])]
    assert len(sharing) >= 16
    assert {load.get("role", "host" if "host_blocks" in load else "") for load in sharing} == {
        "", "host", "prefill", "decode",
    }  # fmt: skip
    assert sum(any(step[1] for step in load["steps"]) for load in sharing) >= 8


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


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 5)), max_size=60))
def test_the_pool_is_that_of_a_list(steps: list[tuple[int, int, int]]) -> None:
    """Against the queue written out block by block: its names, those first taken first."""
    pool = BlockPool(30)
    queue: list[object] = [None] * 30
    plain = 0
    holders: dict[str, int] = {}
    shared: dict[str, Any] = {}
    for kind, amount, owner in steps:
        name = f"shared {owner}"
        if kind <= 1 and amount <= len(queue):
            pool.take(amount)
            plain += amount
            queue = queue[amount:]
            shared = {key: one for key, one in shared.items() if holders[key] or key in queue}
        elif kind == 2 and amount <= plain:
            pool.give_back(amount, 0, ())
            queue = [None] * amount + queue
            plain -= amount
        elif kind == 3 and amount <= plain and not pool.kept(owner):
            pool.give_back(0, amount, (), owner)
            queue += [(owner, position) for position in reversed(range(amount))]
            plain -= amount
        elif kind == 4 and pool.kept(owner):
            found = min(pool.kept(owner), amount)
            pool.take_back(owner, found)
            queue = [
                one if not isinstance(one, tuple) or one[0] != owner else "nobody's"
                for one in queue if not isinstance(one, tuple) or one[0] != owner or one[1] >= found
            ]  # fmt: skip
            plain += found
        elif kind == 5 and name not in shared and plain:
            shared[name] = pool.publish(name, holders=1)
            holders[name] = 1
            plain -= 1
        elif kind == 5 and name in shared and holders[name]:
            pool.give_back(0, 0, [shared[name]])
            holders[name] -= 1
            queue += [] if holders[name] else [name]
        elif kind == 5 and name in shared:
            assert pool.found([name, "another"]) == [shared[name]]
            pool.hold([shared[name]])
            holders[name] += 1
            queue.remove(name)
        assert pool.free == len(queue)
        assert {name for name in holders if pool.found([name])} == set(shared)
        for number in range(6):
            assert pool.kept(number) == sum(isinstance(one, tuple) and one[0] == number for one in queue)


class _Stepped(Scheduler):
    """One that makes every step."""

    def alike(self, last: Any) -> int:
        return 0


@example([(0.0, 60, 150, 0, 0), (0.0, 81, 1, 0, 0)], 20, 1, 16, 1, "decode")  # one that decodes has made room alone
@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 150), st.integers(1, 150), st.integers(0, 100), st.integers(0, 2)),
        min_size=1, max_size=25,
    ),
    st.integers(20, 60), st.integers(1, 8), st.integers(16, 300), st.integers(1, 2),
    st.sampled_from(["", "host", "prefill", "decode"]),
)  # fmt: skip
@settings(max_examples=examples(400), deadline=None)
def test_steps_that_are_alike_may_be_made_at_once(
    asked: list[tuple[float, int, int, int, int]], blocks: int, most: int, tokens: int, in_flight: int, kind: str
) -> None:
    layout = Layout((Group(Spec(1, None), 1),), 16, in_flight * tokens)
    requests = sorted(
        (Request(at, prompt, output, (("sS"[name % 2], min(prompt, shared)),) if name and shared else ())
         for at, prompt, output, shared, name in asked),
        key=lambda one: one.arrival,
    )  # fmt: skip

    def course(maker: type[Scheduler]) -> Any:
        connectors = {"host": Host(8, 16), "prefill": Sender(), "decode": Receiver()}
        scheduler = maker(
            layout, blocks, max_num_seqs=most, max_num_batched_tokens=max(most, tokens), max_model_len=300,
            batches_in_flight=in_flight, connector=connectors.get(kind),
        )  # fmt: skip
        answer = simulate(scheduler, requests, 1000.0, Speed(), token_seconds=0.001)
        assert scheduler.used_blocks == 0
        return answer

    once, stepped_ = course(Scheduler), course(_Stepped)
    near = ("mean_used", "timeline", "wait_p50", "wait_p99", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    for name, value in vars(stepped_).items():
        if name not in (*near, "first_preemption"):
            assert getattr(once, name) == value, name
    for name in near[2:]:
        assert getattr(once, name) == pytest.approx(getattr(stepped_, name), abs=1e-6)


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


def _sglang(pages: int, page: int, most: int, chunk: int, in_flight: int, caching: bool) -> SGLang:
    return SGLang(
        pages * page, page_size=page, max_running_requests=most, chunked_prefill_size=chunk, max_prefill_tokens=400,
        context_length=300, batches_in_flight=in_flight, prefix_caching=caching,
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 150), st.integers(1, 150), st.integers(0, 100), st.integers(0, 2)),
        min_size=1, max_size=25,
    ),
    st.integers(40, 400), st.sampled_from([1, 4, 16]), st.integers(1, 8), st.sampled_from([-1, 16, 64, 300]),
    st.integers(1, 2), st.booleans(),
)  # fmt: skip
@settings(max_examples=examples(150), deadline=None)
def test_sglang_ends_any_load_and_may_make_steps_at_once(
    asked: list[tuple[float, int, int, int, int]], pages: int, page: int, most: int, chunk: int, in_flight: int,
    caching: bool,
) -> None:  # fmt: skip
    requests = sorted(
        (Request(at, prompt, output, (("sS"[name % 2], min(prompt, shared)),) if name and shared else ())
         for at, prompt, output, shared, name in asked),
        key=lambda one: one.arrival,
    )  # fmt: skip

    def course(steps_at_once: bool) -> LoadAnswer:
        scheduler = _sglang(pages, page, most, chunk, in_flight, caching)
        if not steps_at_once:
            scheduler.alike = lambda last: 0  # type: ignore[method-assign]
        answer = simulate(scheduler, requests, 10_000.0, Speed())
        assert scheduler.used_blocks == scheduler.running == scheduler.waiting == 0
        assert answer.finished + answer.refused == len(requests)
        assert answer.most_used <= 1
        assert answer.most_running <= most
        return answer

    once, stepped_ = course(True), course(False)
    for name in ("steps", "tokens_computed", "tokens_computed_again", "preemptions", "found_tokens", "most_used"):
        assert getattr(once, name) == getattr(stepped_, name), name
    for name in ("wait_p99", "ttft_p99", "tpot_p99"):
        assert getattr(once, name) == pytest.approx(getattr(stepped_, name), abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 30)), max_size=40), st.integers(1, 8))
def test_the_tree_is_that_of_whole_texts(steps: list[tuple[int, int, int]], page: int) -> None:
    """Against all prefixes written out: what is there, how much, and that what is locked stays."""
    tree, known, locked = RadixTree(page), set[tuple[object, ...]](), []
    for kind, tokens, shared in steps:
        text: Text = (("s", min(shared, tokens)), (kind, 60)) if shared else ((kind, 60),)
        written = tuple("s" if at < min(shared, tokens) else kind for at in range(tokens))
        prefixes = {written[:stop] for stop in range(page, tokens + 1, page)}
        node = tree.match(text, tokens)
        assert node.stop == page * len(prefixes & known)
        if kind < 3:
            node = tree.insert(text, tokens)
            known |= prefixes
            if kind == 2:
                locked.append(tree.lock(node))
        elif kind == 4 and locked:
            tree.unlock(locked.pop())
        assert tree.held + tree.evictable == page * len(known)
    held = tree.held
    assert tree.evict(1 << 20) == page * len(known) - held
    assert (tree.held, tree.evictable) == (held, 0)


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

    def make(role: str = "") -> Scheduler:
        return Scheduler(layout, 1000, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=300)

    served: Any = SimpleNamespace(
        scheduler=make, refusal=None, cards=1, kv_cache=SimpleNamespace(block_bytes=16, block_size=16)
    )
    requests = drawn(120.0, 100.0, ((50.0, 100),), ((50.0, 50),), 300)
    report = loaded(served, requests, 100.0, Speed(step_seconds=0.1), OverTime(max_wait=5.0), "")
    assert report.answer.given_up_at is None
    too_few = [100.0 if one.followed is None else one.followed for one in report.tried[1:] if not one.enough]
    assert len(too_few) >= 3
    assert sum(too_few) < 60.0 * len(too_few)
