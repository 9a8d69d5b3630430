"""The replay: levels after every event, peaks inside an event, what is not on the device, and running out of memory."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import AllocConf
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import TraceError, UsageError
from graphmem.replay import expect_replays, replay
from graphmem.trace import EventKind, Place, Plans, Trace, TraceBuilder, from_json, to_json
from graphmem.units import MIB
from tests import places
from tests.support.checked_allocator import CheckedAllocator
from tests.support.examples import examples

GOLDEN = places.PYTORCH / "allocator"


def _recorded(path: Path) -> tuple[Trace, dict[str, list[int]]]:
    """The events of an allocator recording as a trace, and its columns."""
    recording = json.loads(gzip.decompress(path.read_bytes()))
    builder = TraceBuilder(path.name)
    operator = builder.operator("recorded")
    storages: dict[int, int] = {}
    for event in recording["ev"]:
        match event:
            case ["a", name, size, stream]:
                storages[name] = builder.alloc(size, operator, stream=stream)
            case ["f", name]:
                builder.free(storages[name], operator)
            case ["r", name, stream]:
                builder.event(EventKind.RECORD_STREAM, operator, storages[name], stream)
            case ["s"]:
                builder.event(EventKind.SYNCHRONIZE, operator)
            case ["e"]:
                builder.event(EventKind.EMPTY_CACHE, operator)
    return builder.build(), {name: list(accumulate(steps)) for name, steps in recording["d"].items()}


@pytest.mark.parametrize("name", ["a00_default", "a07_default", "c16_streams3"])
def test_the_levels_of_a_recording(name: str) -> None:
    trace, columns = _recorded(GOLDEN / f"{name}.json.gz")
    allocator = PyTorchCachingAllocator(driver=CudaDriver(80 << 30, synchronize_completes_events=False))
    result = replay(trace, allocator)
    assert result.allocated_bytes.tolist() == columns["allocated"]
    assert result.reserved_bytes.tolist() == columns["reserved"]
    if name.startswith("a"):  # the recorded column counts pending blocks too
        assert result.requested_bytes.tolist() == columns["requested"]
    assert result.peak_reserved_bytes == max(columns["reserved"])
    assert (result.out_of_memory, result.retries) == (None, 0)
    assert sum(segment.total_size for segment in result.segments) == columns["reserved"][-1]


def test_out_of_memory_goes_on_when_asked() -> None:
    trace, columns = _recorded(GOLDEN / "d00_oom.json.gz")
    capacity = json.loads(gzip.decompress((GOLDEN / "d00_oom.json.gz").read_bytes()))["config"]["total_mib"] * MIB
    result = replay(trace, PyTorchCachingAllocator(capacity), stop_at_oom=False)
    assert result.allocated_bytes.tolist() == columns["allocated"]
    assert result.reserved_bytes.tolist() == columns["reserved"]
    assert result.requested_bytes.tolist() == columns["requested"]
    assert result.retries == columns["retries"][-1] > 0
    assert result.out_of_memory is not None
    assert result.out_of_memory.event == columns["ooms"].index(1)


def test_out_of_memory_stops() -> None:
    trace, columns = _recorded(GOLDEN / "d00_oom.json.gz")
    capacity = json.loads(gzip.decompress((GOLDEN / "d00_oom.json.gz").read_bytes()))["config"]["total_mib"] * MIB
    result = replay(trace, PyTorchCachingAllocator(capacity))
    stop = columns["ooms"].index(1)
    assert result.out_of_memory is not None
    assert result.out_of_memory.event == stop
    assert "CUDA out of memory" in str(result.out_of_memory.error)
    assert len(result) == len(result.allocated_bytes) == len(result.reserved_bytes) == len(trace)
    for ours, name in (
        (result.allocated_bytes, "allocated"),
        (result.reserved_bytes, "reserved"),
        (result.requested_bytes, "requested"),
    ):
        assert ours.tolist()[: stop + 1] == columns[name][: stop + 1]
        assert set(ours.tolist()[stop:]) == {columns[name][stop]}


def test_a_retry_inside_one_event_shows_in_the_peak_only() -> None:
    builder = TraceBuilder("made up")
    operator = builder.operator("x")
    for size in (40 * MIB, 50 * MIB, 60 * MIB):
        builder.free(builder.alloc(size, operator), operator)
    result = replay(builder.build(), PyTorchCachingAllocator(100 * MIB))
    assert result.reserved_bytes.tolist() == [40 * MIB, 40 * MIB, 90 * MIB, 90 * MIB, 60 * MIB, 60 * MIB]
    assert (result.peak_reserved_bytes, result.retries) == (90 * MIB, 1)


def test_storages_elsewhere_do_not_reach_the_allocator() -> None:
    builder = TraceBuilder("made up")
    operator = builder.operator("x")
    host = builder.alloc(1000, operator, place=Place.HOST)
    pinned = builder.alloc(300, operator, place=Place.PINNED)
    device = builder.alloc(512, operator)
    builder.event(EventKind.RECORD_STREAM, operator, host, 1)
    builder.free(host, operator)
    builder.alloc(400, operator, place=Place.HOST)
    builder.free(pinned, operator)
    builder.free(device, operator)
    builder.alloc(0, operator)
    builder.event(EventKind.SYNCHRONIZE, operator)
    builder.event(EventKind.EMPTY_CACHE, operator)
    result = replay(builder.build(), PyTorchCachingAllocator())
    assert result.requested_bytes.tolist() == [0, 0, 512, 512, 512, 512, 512, 0, 0, 0, 0]
    assert result.allocated_bytes.tolist() == result.requested_bytes.tolist()
    assert result.reserved_bytes.tolist() == [0, 0] + [2 * MIB] * 8 + [0]
    assert (result.host_peak_bytes, result.pinned_peak_bytes) == (
        1000,
        512,
    )  # pinned memory is rounded to powers of two
    assert (result.peak_requested_bytes, result.peak_allocated_bytes) == (512, 512)


def test_an_empty_trace() -> None:
    result = replay(TraceBuilder("empty").build(), IdealAllocator())
    assert (len(result), result.peak_reserved_bytes, result.host_peak_bytes, result.segments) == (0, 0, 0, ())


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30 * MIB), st.integers(0, 10), st.booleans()), max_size=40))
def test_levels_are_ordered_and_ideal_is_requested(steps: list[tuple[int, int, bool]]) -> None:
    builder = TraceBuilder("random")
    operator = builder.operator("x")
    live: list[int] = []
    for size, position, frees in steps:
        if frees and live:
            builder.free(live.pop(position % len(live)), operator)
        else:
            live.append(builder.alloc(size, operator))
    trace = builder.build()
    checked: Any = CheckedAllocator(PyTorchCachingAllocator())  # offers what a replay of this trace asks for
    ideal, real = replay(trace, IdealAllocator()), replay(trace, checked)
    assert np.array_equal(ideal.allocated_bytes, ideal.requested_bytes)
    assert np.array_equal(ideal.requested_bytes, real.requested_bytes)
    assert (real.requested_bytes <= real.allocated_bytes).all()
    assert (real.allocated_bytes <= real.reserved_bytes).all()
    assert ideal.peak_reserved_bytes == real.peak_requested_bytes == max(real.requested_bytes.tolist(), default=0)


def test_what_was_refused_is_tried_again_on_a_card_and_left_out_without_one() -> None:
    builder = TraceBuilder("a program that went on")
    operator = builder.operator("aten.empty")
    cached = builder.alloc(30 * MIB, operator)
    builder.free(cached, operator)
    builder.refuse(builder.alloc(80 * MIB, operator))
    builder.alloc(20 * MIB, operator)
    trace = builder.build()
    assert trace.refused == (1,)
    tight, roomy = (PyTorchCachingAllocator(capacity) for capacity in (50 * MIB, 200 * MIB))
    result = replay(trace, tight)
    assert result.out_of_memory is None
    assert (tight.num_ooms, tight.num_alloc_retries) == (1, 1)
    assert result.reserved_bytes.tolist() == [30 * MIB, 30 * MIB, 0, 20 * MIB]
    assert result.requested_bytes.tolist() == [30 * MIB, 0, 0, 20 * MIB]
    assert replay(trace, roomy).peak_reserved_bytes == 110 * MIB  # there it is served, and given back at once
    assert replay(trace, PyTorchCachingAllocator()).reserved_bytes.tolist() == result.reserved_bytes.tolist()
    assert replay(trace, IdealAllocator()).peak_reserved_bytes == 30 * MIB


def test_a_fraction_limits_what_follows_on_a_card() -> None:
    builder = TraceBuilder("a program that leaves room")
    operator = builder.operator("aten.empty")
    builder.alloc(40 * MIB, operator)
    builder.memory_fraction(0.5, operator)
    builder.alloc(40 * MIB, operator)
    trace = builder.build()
    stopped = replay(trace, PyTorchCachingAllocator(100 * MIB)).out_of_memory
    assert stopped is not None
    assert stopped.event == 2
    assert "50.00 MiB allowed" in str(stopped.error)
    assert replay(trace, PyTorchCachingAllocator()).out_of_memory is None


@pytest.mark.parametrize(
    ("kinds", "subjects", "message"),
    [
        ([12, 1], [0, 0], "was refused"),
        ([0, 12], [0, 0], "already alive"),
        ([13], [1], "memory fraction 1, which does not exist"),
    ],
)
def test_rules_of_limits(kinds: list[int], subjects: list[int], message: str) -> None:
    document = {
        "schema": "graphmem.trace/3",
        "source": "a test",
        "notes": {},
        "phases": [[0, "run"]],
        "operators": [["aten.empty", "", 0, ""]],
        "storages": [[512, "UNKNOWN", 0, "DEVICE", ""]],
        "events": {
            "kind": kinds,
            "subject": subjects,
            "operator": [0] * len(kinds),
            "stream": [0] * len(kinds),
        },
        "fractions": [0.5],
    }
    with pytest.raises(TraceError, match=message):
        from_json(json.dumps(document))
    with pytest.raises(TraceError, match="accepted: 0 to 1"):
        from_json(json.dumps(document | {"fractions": [1.5]}))


def test_pinned_memory_is_rounded_to_powers_of_two_and_kept() -> None:
    builder = TraceBuilder("made up")
    operator = builder.operator("x")
    for size in (3000, 4000, 100):
        storage = builder.alloc(size, operator, place=Place.PINNED)
        builder.free(storage, operator)
    builder.alloc(0, operator, place=Place.PINNED)
    builder.alloc(4096, operator, place=Place.PINNED)
    builder.alloc(2049, operator, place=Place.PINNED)
    assert replay(builder.build(), PyTorchCachingAllocator()).pinned_peak_bytes == 4096 + 128 + 4096


# --- calls that can do with less --------------------------------------------------------------------------------------

_PLANS = (60 * MIB, 30 * MIB, 8 * MIB, 0)


def _convolutions(kept: int) -> Trace:
    """Two calls of one shape and one of another beside ``kept`` bytes that stay."""
    builder = TraceBuilder("a network that is too large")
    operator = builder.operator("aten.convolution")
    builder.alloc(kept, operator)
    for shape in ("first", "first", "second"):
        builder.free(builder.alloc_for_call(shape, _PLANS, operator, label="cuDNN workspace"), operator)
    return builder.build()


def test_the_first_plan_is_taken_where_there_is_memory() -> None:
    result = replay(_convolutions(20 * MIB), PyTorchCachingAllocator())
    assert result.requested_bytes.tolist() == [20 * MIB, 80 * MIB, 20 * MIB, 80 * MIB, 20 * MIB, 80 * MIB, 20 * MIB]
    assert (result.later_plans, result.out_of_memory) == (0, None)


@pytest.mark.parametrize(("capacity", "plan"), [(80, 0), (79, 1), (50, 1), (49, 2), (40, 2), (39, 3), (20, 3)])
def test_a_plan_that_is_refused_gives_way_to_the_next(capacity: int, plan: int) -> None:
    allocator = PyTorchCachingAllocator(capacity * MIB)
    result = replay(_convolutions(20 * MIB), allocator)
    asked = 20 * MIB + _PLANS[plan]
    assert result.requested_bytes.tolist() == [20 * MIB, asked, 20 * MIB, asked, 20 * MIB, asked, 20 * MIB]
    assert (result.later_plans, result.out_of_memory) == (2 if plan else 0, None)


def test_the_plan_that_was_had_is_kept_when_there_is_memory_again() -> None:
    builder = TraceBuilder("a network beside something that goes")
    operator = builder.operator("aten.convolution")
    large = builder.alloc(40 * MIB, operator)
    builder.free(builder.alloc_for_call("shape", _PLANS, operator), operator)
    builder.free(large, operator)
    builder.free(builder.alloc_for_call("shape", _PLANS, operator), operator)
    result = replay(builder.build(), PyTorchCachingAllocator(70 * MIB))
    assert result.requested_bytes.tolist() == [40 * MIB, 70 * MIB, 40 * MIB, 0, 30 * MIB, 0]


def test_a_call_without_any_plan_that_fits_is_out_of_memory() -> None:
    builder = TraceBuilder("a network that is too large")
    operator = builder.operator("aten.convolution")
    builder.alloc(20 * MIB, operator)
    builder.alloc_for_call("shape", (60 * MIB, 30 * MIB), operator)
    assert replay(builder.build(), PyTorchCachingAllocator(40 * MIB)).out_of_memory is not None


def test_what_became_of_a_call_on_one_card_is_not_in_its_trace() -> None:
    builder = TraceBuilder("a program on a small card")
    operator = builder.operator("aten.convolution")
    storage = builder.alloc_for_call("shape", _PLANS, operator)
    builder.calls[storage].settle(2, storage, builder.storage_bytes)
    assert builder.storage_bytes == [8 * MIB]
    assert builder.alloc_for_call("shape", _PLANS, operator) == 1
    assert builder.storage_bytes[1] == 8 * MIB
    assert [storage.bytes for storage in builder.build().storages] == [60 * MIB, 60 * MIB]


def test_plans_are_written_and_read() -> None:
    trace = _convolutions(MIB)
    text = to_json(trace)
    assert '"schema":"graphmem.trace/4"' in text
    assert from_json(text).plans == trace.plans == (Plans((1, 2), _PLANS), Plans((3,), _PLANS))


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([[[1], [60 * MIB]]], "accepted: two sizes or more"),
        ([[[1], [60 * MIB, -1]]], "accepted: two sizes or more"),
        ([[[9], [60 * MIB, 0]]], "storage 9, which does not exist"),
        ([[[1], [60 * MIB, 0]], [[1], [60 * MIB, 1]]], "has other plans"),
        ([[[0], [60 * MIB, 0]]], "its first plan"),
        ([[[1]]], "malformed trace"),
        ([[["1"], [2, 1]]], "malformed trace"),
    ],
)
def test_rules_of_plans(plans: list[object], message: str) -> None:
    document = json.loads(to_json(_convolutions(MIB))) | {"plans": plans}
    with pytest.raises(TraceError, match=message):
        from_json(json.dumps(document))


def _loaded(during: str, after: str) -> Trace:
    """Weights of 24 MiB and 6 MiB that take the place of something larger, under settings of their own."""
    builder = TraceBuilder("an engine that loads a model")
    operator = builder.operator("load")
    scratch = [builder.alloc(size * MIB, operator) for size in (48, 24)]
    builder.allocator_settings(during, operator)
    for storage in scratch:
        builder.free(storage, operator)
    builder.alloc(6 * MIB, operator)
    builder.allocator_settings(after, operator)
    builder.alloc(6 * MIB, operator)
    return builder.build()


def test_settings_change_in_mid_run() -> None:
    """Blocks from 20 MiB on are not split while ``max_split_size_mb`` says so: the first 6 MiB open a new segment, the
    second find its rest; with 20 MiB of room they go into the 24 MiB that were freed."""
    trace = _loaded("max_split_size_mb:20", "")
    assert trace.settings == ("max_split_size_mb:20", "")
    assert from_json(to_json(trace)).settings == trace.settings
    assert '"schema":"graphmem.trace/5"' in to_json(trace)
    assert replay(trace, PyTorchCachingAllocator()).reserved_bytes[-1] == (48 + 24 + 20) * MIB
    assert replay(_loaded("", ""), PyTorchCachingAllocator()).reserved_bytes[-1] == (48 + 24) * MIB


def test_expandable_segments_begin_and_end_in_mid_run() -> None:
    """Both kinds lie side by side: the rest of the 24 MiB, which is free, serves while they are switched on, and then
    what was mapped does not."""
    assert replay(_loaded("expandable_segments:True", ""), PyTorchCachingAllocator()).reserved_bytes[-1] == 72 * MIB
    grown = PyTorchCachingAllocator(conf=AllocConf(expandable_segments=True))
    assert replay(_loaded("expandable_segments:True", ""), grown).reserved_bytes[-1] == (80 + 20) * MIB


@pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "max_split_size_mb:1"])
def test_settings_that_cannot_be_followed_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        replay(_loaded(text, ""), PyTorchCachingAllocator())


def test_an_allocator_without_settings_plays_on() -> None:
    assert replay(_loaded("max_split_size_mb:20", ""), IdealAllocator()).peak_allocated_bytes == 72 * MIB


def test_many_replays_that_are_about_to_be_made_are_worth_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[replay.__module__], "_made", itertools.count(1))
    asked: list[int] = []

    class Allocator(PyTorchCachingAllocator):
        def fast_forward(self, *columns: object) -> None:
            asked.append(1)

    trace = TraceBuilder("nothing").build()
    expect_replays(2)
    replay(trace, Allocator())
    assert not asked
    expect_replays(100)
    try:
        replay(trace, Allocator())
    finally:
        expect_replays(0)
    assert asked
