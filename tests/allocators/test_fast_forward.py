"""Events that compiled code plays at once, against the allocator's own methods: levels, segments, what follows."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import AllocConf, parse_alloc_conf
from graphmem.allocators.base import GIVE, PASS, STOP, TAKE
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator, fast_forward
from graphmem.replay import replay
from graphmem.trace import EventKind, Trace, TraceBuilder
from graphmem.units import GIB, MIB
from tests.support.examples import examples

pytest.importorskip("numba")


def _both(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, capacity: int | None, version: tuple[int, int], conf: str = ""
) -> None:
    """Hold a replay at once to one by the allocator's own methods."""
    made = []
    for before in (1 << 60, 0):
        monkeypatch.setattr(sys.modules[replay.__module__], "_BEFORE_COMPILING", before)
        one = PyTorchCachingAllocator(capacity, parse_alloc_conf(conf, version), version)
        made.append((one, replay(trace, one, stop_at_oom=False)))
    (slow, expected), (fast, found) = made
    for level in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        assert getattr(found, level).tolist() == getattr(expected, level).tolist()
        assert getattr(found, f"peak_{level}") == getattr(expected, f"peak_{level}")
    assert found.segments == expected.segments
    assert (found.retries, str(found.out_of_memory)) == (expected.retries, str(expected.out_of_memory))
    assert fast.driver.__dict__.keys() == slow.driver.__dict__.keys()
    assert (fast.driver.used_bytes, fast.driver.peak_used_bytes) == (
        slow.driver.used_bytes,
        slow.driver.peak_used_bytes,
    )
    for count in ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams", "num_ooms"):
        assert getattr(fast, count) == getattr(slow, count)


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Requests and frees of two streams, with what ends the plain path among them, or not."""
    builder = TraceBuilder("drawn")
    operator = builder.operator("drawn")
    alive: list[int] = []
    sizes = st.one_of(st.integers(0, 3 * MIB), st.integers(0, 300).map(lambda count: count * MIB // 4))
    for _ in range(draw(st.integers(1, 60))):
        what = draw(st.sampled_from(("take", "take", "take", "give", "give", "other")))
        if what == "take":
            alive.append(builder.alloc(draw(sizes), operator, stream=draw(st.integers(0, 1))))
        elif what == "give" and alive:
            builder.free(alive.pop(draw(st.integers(0, len(alive) - 1))), operator)
        elif what == "other":
            kind = draw(st.sampled_from((EventKind.SYNCHRONIZE, EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE)))
            builder.event(kind, operator)
    return builder.build()


_CONFS = (
    "",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:21,roundup_power2_divisions:8",
    "max_split_size_mb:21",
    "max_split_size_mb:40,max_non_split_rounding_mb:25,large_segment_size_mb:24",
    "roundup_power2_divisions:[1:16,2:1,64:4,>:2]",
    "garbage_collection_threshold:0.6,roundup_power2_divisions:4",
)


@settings(max_examples=examples(300), deadline=None)
@given(
    trace=_traces(),
    capacity=st.sampled_from((None, 64 * MIB, 256 * MIB)),
    version=st.sampled_from(((2, 11), (2, 13))),
    conf=st.sampled_from(_CONFS),
)
def test_any_events(trace: Trace, capacity: int | None, version: tuple[int, int], conf: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if version < (2, 12) and "large_segment" in conf:
            conf = conf.rpartition(",")[0]
        _both(monkeypatch, trace, capacity, version, conf)


def test_what_is_played_at_once_and_what_ends_it() -> None:
    sizes, streams = [3 * MIB, 700, 30 * MIB], [0, 1, 0]
    kinds, subjects = np.array([TAKE, TAKE, GIVE, PASS, STOP, TAKE]), np.array([0, 1, 0, -1, -1, 2])
    allocator = PyTorchCachingAllocator(GIB)
    played = fast_forward.fast_forward(allocator, kinds, subjects, sizes, streams)
    assert played is not None
    assert played.allocated.tolist() == [3 * MIB, 3 * MIB + 1024, 1024, 1024]
    assert played.reserved.tolist() == [20 * MIB, 22 * MIB, 22 * MIB, 22 * MIB]
    handles = played.restore()
    assert list(handles) == [1]
    allocator.free(handles[1])
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 22 * MIB)


@pytest.mark.parametrize(("conf", "freed", "asked", "retries"), [("", 40, 50, 1), ("max_split_size_mb:21", 60, 38, 0)])
def test_what_is_given_back_to_make_room_is_played_at_once(
    monkeypatch: pytest.MonkeyPatch, conf: str, freed: int, asked: int, retries: int
) -> None:
    """All that can be; with a limit of splitting, one segment is enough."""
    builder = TraceBuilder("one that fits once the cache is given back")
    operator = builder.operator("x")
    stays = [builder.alloc(size * MIB, operator) for size in (24, freed, 30)]
    builder.free(stays[1], operator)
    builder.alloc(asked * MIB, operator)
    trace = builder.build()
    _both(monkeypatch, trace, 120 * MIB, (2, 13), conf)
    allocator = PyTorchCachingAllocator(120 * MIB, parse_alloc_conf(conf, (2, 13)), (2, 13))
    kinds = np.where(trace.kinds == EventKind.ALLOC, TAKE, GIVE)
    played = fast_forward.fast_forward(allocator, kinds, trace.subjects, trace.columns.bytes, trace.columns.streams)
    assert played is not None
    assert (len(played.allocated), played.retries) == (len(trace), retries)
    assert played.reserved[-1] == (24 + 30 + asked) * MIB


@pytest.mark.parametrize("conf", _CONFS)
def test_settings_are_played_at_once(conf: str) -> None:
    allocator = PyTorchCachingAllocator(GIB, parse_alloc_conf(conf, (2, 13)), (2, 13))
    kinds, subjects = np.array([TAKE, TAKE, GIVE]), np.array([0, 1, 0])
    played = fast_forward.fast_forward(allocator, kinds, subjects, [30 * MIB, 700], [0, 0])
    assert played is not None
    assert len(played.allocated) == 3


def test_what_else_limits_is_left_to_the_allocator() -> None:
    assert not PyTorchCachingAllocator(GIB, AllocConf(per_process_memory_fraction=0.5)).is_plain
    assert not PyTorchCachingAllocator(GIB, torch_version=(2, 12)).is_plain  # numbers blocks, not segments
    assert not PyTorchCachingAllocator(GIB, track_stats=True).is_plain
    used = PyTorchCachingAllocator(GIB)
    assert used.is_plain
    used.malloc(1)
    assert not used.is_plain
