"""The rules of a trace's events, checked all at once and one by one."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.errors import TraceError
from graphmem.trace import (
    Category,
    EventKind,
    Operator,
    Phase,
    Place,
    Storage,
    Trace,
    TraceBuilder,
    _events_hold,
    _name_first_broken,
    from_json,
    same,
    to_json,
    validate,
)

_STORAGES = 3
_KINDS = (
    EventKind.ALLOC,
    EventKind.FREE,
    EventKind.RECORD_STREAM,
    EventKind.REFUSED,
    EventKind.SYNCHRONIZE,
    EventKind.MEMORY_FRACTION,
    EventKind.ALLOCATOR_SETTINGS,
)
_EVENTS = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(-1, _STORAGES), st.integers(-1, 1)), max_size=8)


def _trace(events: list[tuple[EventKind, int, int]]) -> Trace:
    kinds, subjects, operators = (np.array([event[i] for event in events], dtype=np.int64) for i in range(3))
    return Trace(
        source="test",
        phases=(Phase(0, "run"),),
        operators=(Operator("made", "", 0, ""),),
        storages=tuple(Storage(512, Category.TEMPORARY, 0, Place.DEVICE, "") for _ in range(_STORAGES)),
        kinds=kinds,
        subjects=subjects,
        event_operators=operators,
        event_streams=np.zeros(len(events), dtype=np.int64),
        notes=(),
        fractions=(0.5,),
        settings=("max_split_size_mb:20",),
    )


@given(_EVENTS)
def test_what_holds_together_holds_one_by_one(events: list[tuple[EventKind, int, int]]) -> None:
    trace = _trace(events)
    try:
        _name_first_broken(trace)
    except TraceError:
        assert not _events_hold(trace)
    else:
        assert _events_hold(trace)


@given(st.lists(st.sampled_from((EventKind.ALLOC, EventKind.RECORD_STREAM, EventKind.FREE)), max_size=5))
def test_one_storage_begins_once_and_ends_once(kinds: list[EventKind]) -> None:
    first_free = kinds.index(EventKind.FREE) if EventKind.FREE in kinds else len(kinds)
    holds = not kinds or (
        kinds[0] == EventKind.ALLOC and kinds.count(EventKind.ALLOC) == 1 and first_free >= len(kinds) - 1
    )
    assert _events_hold(_trace([(kind, 0, 0) for kind in kinds])) == holds


def test_the_first_broken_event_is_named() -> None:
    events = [(EventKind.ALLOC, 0, 0), (EventKind.FREE, 0, 0), (EventKind.FREE, 0, 0), (EventKind.FREE, 1, 0)]
    with pytest.raises(TraceError, match=r"event 2 \(FREE\): storage 0 has been freed"):
        validate(_trace(events))


def test_storages_of_other_sizes_are_made_when_they_are_asked_for() -> None:
    builder = TraceBuilder("a step")
    operator = builder.operator("aten.mm")
    for size in (512, 1024):
        builder.alloc(size, operator, label="weight")
    trace = builder.build()
    assert trace.allocations.tolist() == [0, 1]
    resized = trace.resized(np.array([512, 2048]), {1: "bias"})
    assert (resized.storages[-1].bytes, resized.storages[-1].label) == (2048, "bias")
    assert resized.storages == (trace.storages[0], replace(trace.storages[1], bytes=2048, label="bias"))
    assert trace.storages != resized.storages
    assert resized.columns.bytes.tolist() == [512, 2048]
    assert resized.allocations is trace.allocations
    assert resized.labelled == {"weight": (0,), "bias": (1,)}
    assert same(resized, from_json(to_json(resized)))
    assert type(pickle.loads(pickle.dumps(resized)).storages) is tuple


def test_a_storage_past_the_last_of_other_sizes_is_no_storage() -> None:
    builder = TraceBuilder("a step")
    builder.alloc(512, builder.operator("aten.mm"))
    with pytest.raises(IndexError):
        _ = builder.build().resized(np.array([1024]), {}).storages[1]
