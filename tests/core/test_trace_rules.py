"""The rules of a trace's events, checked all at once and one by one."""

from __future__ import annotations

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
    _events_hold,
    _name_first_broken,
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
