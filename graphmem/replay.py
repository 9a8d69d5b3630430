"""Feed a trace to an allocator and keep the bytes it holds after every event.

    Trace + Allocator -> Replay

Only storages on the device reach the allocator; those in host, pinned and managed memory are summed beside it. All
figures are bytes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import (
    GIVE,
    PASS,
    STOP,
    TAKE,
    Allocator,
    ConfigurableAllocator,
    ForwardingAllocator,
    LimitedAllocator,
    Played,
    PoolAllocator,
    SegmentView,
    WaitingAllocator,
)
from graphmem.base.records import dataclass
from graphmem.errors import DeviceOutOfMemory, TraceError
from graphmem.trace import MAX_STORAGE_BYTES, Calls, EventKind, Place, Trace


@dataclass(frozen=True)
class OutOfMemory:
    """The first allocation that the allocator refused: index of the event, and the allocator's error."""

    event: int
    error: DeviceOutOfMemory


@dataclass(frozen=True)
class Replay:
    """The memory of an allocator while a trace ran: three levels after every event of the trace (int64, same length).

    After an out-of-memory that stopped the replay, the arrays go on with the values it stopped at. The peaks are the
    allocator's own maxima: a retry gives segments back before it takes new ones, which no after-event value shows.
    """

    requested_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int
    managed_peak_bytes: int
    out_of_memory: OutOfMemory | None
    retries: int
    find_segments: Callable[[], tuple[SegmentView, ...]] = field(repr=False, compare=False)
    #: Bytes of every private pool's segments when reserved bytes were at their peak, by the pool's number.
    private_reserved_at_peak: dict[int, int] = field(default_factory=dict)
    #: Shapes of calls whose first plan's workspace was refused, and that went on with a later plan.
    later_plans: int = 0

    def __len__(self) -> int:
        return len(self.requested_bytes)

    @cached_property
    def segments(self) -> tuple[SegmentView, ...]:
        """The allocator's segments at the end."""
        return self.find_segments()


#: What is done at an event, given its subject and its stream.
_Action = Callable[[int, int], object]


class Player:
    """Shows the events of one run to an allocator. The columns of the table of storages may grow while it plays.

    ``calls`` are those that can do with less, by their storages: ``sizes`` are changed to those that they got.
    """

    def __init__(
        self,
        allocator: Allocator,
        sizes: list[int],
        streams: list[int],
        pools: list[int],
        calls: Mapping[int, Calls],
        handles: dict[int, Any] | None = None,
    ) -> None:
        self._allocator = allocator
        self._calls = calls
        self._sizes, self._streams, self._pools = sizes, streams, pools
        self._handles = {} if handles is None else handles  # of storages that live
        #: Of the request that was refused last.
        self.error: DeviceOutOfMemory

    def play(
        self,
        events: Iterator[tuple[int, int, int]],
        note_allocated: Callable[[int], object],
        note_reserved: Callable[[int], object],
        fractions: Sequence[float] = (),
        settings: Sequence[str] = (),
    ) -> int:
        """Play (kind, subject, stream) to the end, and note the bytes allocated and reserved after each; -1.

        The storage whose request is refused ends it, with a :class:`DeviceOutOfMemory` that is kept in ``error``: its
        index. Playing goes on after it with the same iterator.
        """
        allocator, handles, actions = self._allocator, self._handles, self._actions(fractions, settings)
        sizes, streams, malloc, free = self._sizes, self._streams, allocator.malloc, allocator.free
        for kind, subject, stream in events:
            try:
                if kind == _ALLOC:
                    handles[subject] = malloc(sizes[subject], streams[subject])
                elif kind == _FREE:
                    handle = handles.pop(subject, None)
                    if handle is not None:  # nothing was allocated: 0 bytes, or refused
                        free(handle)
                elif kind in actions:
                    actions[kind](subject, stream)
            except DeviceOutOfMemory as error:
                if kind != _ALLOC or not self._takes_later_plan(subject):
                    self.error = error.with_traceback(None)  # which would hold the frames of who plays
                    return subject
            note_allocated(allocator.allocated_bytes)
            note_reserved(allocator.reserved_bytes)
        return -1

    def _actions(self, fractions: Sequence[float], settings: Sequence[str]) -> dict[int, _Action]:
        """The rarer kinds of events with the action at one of them. Those that the allocator knows nothing of are
        missing."""
        allocator = self._allocator
        actions: dict[int, _Action] = {
            EventKind.RECORD_STREAM: self._record_stream,
            EventKind.SYNCHRONIZE: self._synchronized(),
            EventKind.EMPTY_CACHE: lambda *_: allocator.empty_cache(),
        }
        if isinstance(allocator, LimitedAllocator):
            limited = allocator
            actions[EventKind.REFUSED] = lambda index, _: limited.refuse(*self._request(index))
            actions[EventKind.MEMORY_FRACTION] = lambda row, _: limited.limit_to_fraction(fractions[row])
        if isinstance(allocator, ConfigurableAllocator):
            configurable = allocator
            actions[EventKind.ALLOCATOR_SETTINGS] = lambda row, _: configurable.change_settings(settings[row])
        if isinstance(allocator, PoolAllocator):
            actions |= self._actions_of_pools(allocator)
        return actions

    def _synchronized(self) -> _Action:
        allocator = self._allocator
        waiting = allocator if isinstance(allocator, WaitingAllocator) else None

        def synchronize(later: int, stream: int) -> None:
            if later < 0:
                allocator.synchronize()
            elif waiting is not None:
                waiting.wait_for(stream, later)

        return synchronize

    def _actions_of_pools(self, allocator: PoolAllocator) -> dict[int, _Action]:
        return {
            _ALLOC_IN_POOL: lambda index, _: self._take_in_pool(allocator, index),
            EventKind.CREATE_POOL: lambda pool, _: allocator.create_or_incref_pool(pool),
            EventKind.BEGIN_POOL: lambda pool, _: allocator.begin_allocate_to_pool(pool),
            EventKind.END_POOL: lambda pool, _: allocator.end_allocate_to_pool(pool),
            EventKind.RELEASE_POOL: lambda pool, _: allocator.release_pool(pool),
            EventKind.EMPTY_POOL: lambda pool, _: allocator.empty_pool(pool),
            EventKind.ENTER_CAPTURE: lambda *_: allocator.enter_capture(),
            EventKind.LEAVE_CAPTURE: lambda *_: allocator.leave_capture(),
        }

    def _request(self, index: int) -> tuple[int, int, int]:
        """Bytes, stream and pool of a storage."""
        return self._sizes[index], self._streams[index], self._pools[index] if self._pools else 0

    def _take_in_pool(self, allocator: PoolAllocator, index: int) -> None:
        self._handles[index] = allocator.malloc_in_pool(*self._request(index))

    def _record_stream(self, index: int, stream: int) -> None:
        if self._handles.get(index) is not None:
            self._allocator.record_stream(self._handles[index], stream)

    def _takes_later_plan(self, subject: int) -> bool:
        """True if the call that was refused its workspace does with that of a later plan."""
        calls = self._calls.get(subject)
        if calls is None:
            return False
        first = 1 if subject == calls.storages[0] else 0
        for plan in range(first, len(calls.bytes)):
            try:
                self._handles[subject] = self._allocator.malloc(calls.bytes[plan], self._streams[subject])
            except DeviceOutOfMemory:
                continue
            calls.settle(plan, subject, self._sizes)
            return True
        return False


def replay(trace: Trace, allocator: Allocator, *, stop_at_oom: bool = True) -> Replay:
    """Run the whole trace through ``allocator``, which should be new.

    With ``stop_at_oom=False`` a refused storage is treated as never allocated and the trace goes on.
    """
    columns = trace.columns
    private = allocator if trace.pools and isinstance(allocator, PoolAllocator) else None
    if private is not None:
        for number, pool in enumerate(trace.pools, 1):
            private.declare_pool(number, use_on_oom=pool.use_on_oom, no_split=pool.no_split)
    kinds, at_once = _kinds(trace, in_pools=private is not None)
    played = None
    if max(next(_made), _expected) > _BEFORE_COMPILING and isinstance(allocator, ForwardingAllocator):
        played = allocator.fast_forward(at_once, trace.subjects, columns.bytes, columns.streams)
    if played is not None and len(played.allocated) == len(trace):
        return _played_whole(trace, allocator, played)

    refused: set[int] = set()
    out_of_memory: OutOfMemory | None = None
    allocated: list[int] = []
    reserved: list[int] = []
    handles = {} if played is None else played.restore()
    before = 0 if played is None else len(played.allocated)
    rest = slice(before, None)
    events = zip(*(column[rest].tolist() for column in (kinds, trace.subjects, trace.event_streams)), strict=True)
    shapes = [Calls(plans.bytes, plans.storages) for plans in trace.plans]
    calls = {index: shape for shape in shapes for index in shape.storages}
    sizes, pools = columns.bytes.tolist(), columns.pools.tolist() if private is not None else []
    player = Player(allocator, sizes, columns.streams.tolist(), pools, calls, handles)
    while (subject := player.play(events, allocated.append, reserved.append, trace.fractions, trace.settings)) >= 0:
        refused.add(subject)
        if out_of_memory is None:
            out_of_memory = OutOfMemory(before + len(allocated), player.error)
        if stop_at_oom:
            break
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)

    done = before + len(allocated)
    allocated_array = _levels(played and played.allocated, allocated, len(trace), allocator.allocated_bytes)
    reserved_array = _levels(played and played.reserved, reserved, len(trace), allocator.reserved_bytes)
    live = _live_bytes(trace, sizes, refused, done)
    return Replay(
        allocated_bytes=allocated_array,
        reserved_bytes=reserved_array,
        peak_allocated_bytes=max(getattr(allocator, "peak_allocated_bytes", 0), _peak(allocated_array)),
        peak_reserved_bytes=max(getattr(allocator, "peak_reserved_bytes", 0), _peak(reserved_array)),
        out_of_memory=out_of_memory,
        retries=getattr(allocator, "num_alloc_retries", 0),
        find_segments=allocator.segments,
        private_reserved_at_peak=private.private_reserved_at_peak if private is not None else {},
        later_plans=sum(shape.chosen > 0 for shape in shapes),
        **live._asdict(),
    )


#: Replays of a process before compiled code is loaded, which takes as long as so many.
_BEFORE_COMPILING = 40
_made, _expected = itertools.count(1), 0


def expect_replays(count: int) -> None:
    """So many replays are about to be made: many are worth loading compiled code before the first."""
    global _expected
    _expected = count


#: Replays of a trace that are kept: as many as a sweep may have settings of the allocator.
_MOST_KEPT = 32


def replay_kept(trace: Trace, rules: Hashable, make: Callable[[], Allocator]) -> Replay:
    """The replay in a fresh allocator, which is made for these ``rules`` and nothing else: that of the last time."""
    kept: dict[Hashable, Replay] = trace.kept.setdefault("replays", {})
    found = kept.get(rules)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            del kept[next(iter(kept))]
        found = kept[rules] = replay(trace, make())
    return found


def _played_whole(trace: Trace, allocator: Allocator, played: Played) -> Replay:
    """The replay of events that were all played at once: nothing was refused."""

    def segments() -> tuple[SegmentView, ...]:
        played.restore()
        return allocator.segments()

    return Replay(
        allocated_bytes=played.allocated,
        reserved_bytes=played.reserved,
        peak_allocated_bytes=played.peak_allocated,
        peak_reserved_bytes=_peak(played.reserved),
        out_of_memory=None,
        retries=played.retries,
        find_segments=segments,
        **_live_of(trace)._asdict(),
    )


def _levels(played: npt.NDArray[np.int64] | None, noted: list[int], events: int, last: int) -> npt.NDArray[np.int64]:
    """A level after every event: as played at once, as noted one by one, and the ``last`` one from there on."""
    if max(noted, default=0) > MAX_STORAGE_BYTES:
        raise TraceError("the allocator holds more than 2^63 - 1 bytes, more than any memory")
    levels = np.full(events, last, dtype=np.int64)
    start = 0 if played is None else len(played)
    levels[:start] = 0 if played is None else played
    levels[start : start + len(noted)] = noted
    return levels


# Plain integers: comparing with members of an IntEnum in the loop above costs more than allocating.
_ALLOC, _FREE = int(EventKind.ALLOC), int(EventKind.FREE)
_WITH_STORAGE = (_ALLOC, _FREE, int(EventKind.RECORD_STREAM), int(EventKind.REFUSED))
#: Kinds of events of this module alone: a request of a private pool, and what happens outside the device.
_ALLOC_IN_POOL, _ELSEWHERE = -1, 1 << 20
#: Kinds of events that an allocator may play at once; another ends them.
_AT_ONCE = {_ALLOC: TAKE, _FREE: GIVE, int(EventKind.SYNCHRONIZE): PASS, _ELSEWHERE: PASS}


def events_on_device(
    rows: Iterable[tuple[int, int, int, int]], places: Sequence[Place], pools: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Rows of a :class:`TraceBuilder` as a :class:`Player` takes them."""
    for kind, subject, _, stream in rows:
        if kind in _WITH_STORAGE:
            if places[subject] is not Place.DEVICE:
                continue
            if kind == _ALLOC and pools[subject]:
                kind = _ALLOC_IN_POOL
        yield kind, subject, stream


def _kinds(trace: Trace, *, in_pools: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The kind of every event on the device, and the same as :meth:`ForwardingAllocator.fast_forward` takes them."""
    kept: dict[bool, Any] = trace.kept_of_events.setdefault("kinds", {})
    if in_pools not in kept:
        kinds = _device_kinds(trace, in_pools=in_pools)
        kept[in_pools] = kinds, _at_once(kinds)
    found: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = kept[in_pools]
    return found


def _device_kinds(trace: Trace, *, in_pools: bool) -> npt.NDArray[np.int64]:
    """The kind of every event, ``_ALLOC_IN_POOL`` where the storage goes to a private pool, or ``_ELSEWHERE`` where it
    is not on the device."""
    has_subject = np.isin(trace.kinds, _WITH_STORAGE)
    elsewhere = np.zeros(len(trace), dtype=bool)
    elsewhere[has_subject] = trace.columns.places[trace.subjects[has_subject]] != Place.DEVICE
    kinds = np.where(elsewhere, _ELSEWHERE, trace.kinds)
    if in_pools:
        allocates = kinds == _ALLOC
        in_pool = trace.columns.pools[trace.subjects[allocates]] != 0
        kinds[allocates] = np.where(in_pool, _ALLOC_IN_POOL, _ALLOC)
    return kinds


def _at_once(kinds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The words of ``fast_forward`` for the kinds."""
    found = np.full(len(kinds), STOP, dtype=np.int64)
    for kind, word in _AT_ONCE.items():
        found[kinds == kind] = word
    return found


class _Live(NamedTuple):
    """Requested bytes after every event, and their peaks in each place."""

    requested_bytes: npt.NDArray[np.int64]
    peak_requested_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int
    managed_peak_bytes: int


def _live_of(trace: Trace) -> _Live:
    """Of a run in which every storage had what it asked for; worked out once."""
    if "live" not in trace.kept:
        trace.kept["live"] = _live_bytes(trace, trace.columns.bytes, set(), len(trace))
    found: _Live = trace.kept["live"]
    return found


def most_requested(trace: Trace) -> int:
    """The most bytes on the device that live at once, if every storage has what it asks for."""
    return _live_of(trace).peak_requested_bytes


def _live_bytes(trace: Trace, had: Sequence[int] | npt.NDArray[np.int64], refused: set[int], done: int) -> _Live:
    """By the bytes that each storage ``had``; events from ``done`` on did not happen."""
    _check_sum(trace)
    sizes, flow = np.array(had, dtype=np.int64), _flow(trace)
    if refused:
        sizes[list(refused)] = 0
    moved = sizes[flow.subjects[:done]] if len(sizes) else np.zeros(done, dtype=np.int64)
    levels = {place: np.cumsum(moved * signs[:done]) for place, signs in flow.signs.items()}
    device, *others = (levels.get(place, np.zeros(0, dtype=np.int64)) for place in Place)
    whole = _levels(device, [], len(trace), int(device[-1]) if len(device) else 0)
    host, pinned, managed = map(_peak, others)
    return _Live(whole, _peak(device), host, _pinned_held(trace, done) if pinned else 0, managed)


class _Flow(NamedTuple):
    """The storage of every event, 0 where it has none, and by places that occur: whether it comes (1), goes (-1), or
    neither (0)."""

    subjects: npt.NDArray[np.int64]
    signs: Mapping[Place, npt.NDArray[np.int64]]


def _flow(trace: Trace) -> _Flow:
    if "flow" not in trace.kept_of_events:
        signs = np.zeros(len(trace), dtype=np.int64)
        signs[trace.kinds == EventKind.ALLOC] = 1
        signs[trace.kinds == EventKind.FREE] = -1
        # Events without a storage may carry any subject, such as -1; their sign is 0.
        subjects = np.where(signs == 0, 0, trace.subjects)
        places = trace.columns.places[subjects] if len(trace.storages) else subjects
        there = {place: np.where(places == place, signs, 0) for place in Place}
        trace.kept_of_events["flow"] = _Flow(subjects, {place: one for place, one in there.items() if one.any()})
    found: _Flow = trace.kept_of_events["flow"]
    return found


def _pinned_held(trace: Trace, done: int) -> int:
    """Bytes that PyTorch's pinned allocator holds in the end, so the most it ever did: it rounds to powers of two and
    keeps freed memory for the next request of that size (``ATen/core/CachingHostAllocator.h`` of 2.13, no options)."""
    waiting, held = Counter[int](), 0
    for position, event in enumerate(trace.events()):
        if position >= done or event.kind not in (EventKind.ALLOC, EventKind.FREE):
            continue
        storage = trace.storages[event.subject]
        if storage.place != Place.PINNED or not storage.bytes:
            continue
        size = 1 << (storage.bytes - 1).bit_length()
        if event.kind == EventKind.FREE:
            waiting[size] += 1
        elif waiting[size]:
            waiting[size] -= 1
        else:
            held += size
    return held


def _check_sum(trace: Trace) -> None:
    """Sums are of 64 bits. Raises :class:`TraceError` where storages alive together have more."""
    if trace.columns.bytes.sum(dtype=np.float64) < MAX_STORAGE_BYTES / 2:
        return
    alive = 0
    for position, event in enumerate(trace.events()):
        if event.kind == EventKind.ALLOC:
            alive += trace.storages[event.subject].bytes
        elif event.kind == EventKind.FREE:
            alive -= trace.storages[event.subject].bytes
        if alive > MAX_STORAGE_BYTES:
            raise TraceError(f"more than 2^63 - 1 bytes are alive together, more than any memory (event {position})")


def _peak(values: npt.NDArray[np.int64]) -> int:
    return max(0, int(values.max())) if len(values) else 0
