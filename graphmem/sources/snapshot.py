"""A recorded GPU run: PyTorch's memory snapshot (``torch.cuda.memory._dump_snapshot``) as a trace.

The format is that of ``torch/csrc/cuda/Module.cpp`` (read at 2.10, seen from 2.6 and 2.11): ``segments``, the heap when
the snapshot was taken, and ``device_traces``, the last events before, oldest first. The events are a ring buffer and
often begin in the middle of a run; what was alive then is derived by walking them backwards from the final heap.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from graphmem.allocators.base import BlockView, SegmentView
from graphmem.base.documents import open_file, read_bounded
from graphmem.errors import TraceError, UsageError
from graphmem.sources.plain_pickle import load_plain_pickle
from graphmem.trace import MAX_STORAGE_BYTES, Category, EventKind, Trace, TraceBuilder

#: States of blocks (``Module.cpp``; the docstring of ``_snapshot`` has the second of the two names for a pending one).
_STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "free",
}
_BLOCK_ACTIONS = ("alloc", "free_requested", "free_completed")
_TAKES_MEMORY = ("segment_alloc", "segment_map")
_GIVES_MEMORY = ("segment_free", "segment_unmap")
#: A request that nothing could be found for, before the error is raised; ``device_free`` stands in place of an address.
_REFUSED = "oom"
#: What empties a private pool that is held for the rest of the trace.
_EMPTY_POOL = (EventKind.RELEASE_POOL, EventKind.EMPTY_POOL, EventKind.CREATE_POOL)
#: Bytes of the largest snapshot that is read, and the first byte of a pickle of protocol 2 or later.
LARGEST_SNAPSHOT = 4 << 30
_PICKLE = b"\x80"
BEFORE = "before recording"
RECORDED = "recorded"
#: Of what was made while recording, without a stack: backward passes have none of Python's.
_NO_STACK = "(no stack recorded)"
#: ``kMinBlockSize`` and ``kSmallSize`` of ``c10/core/AllocatorConfig.h``: what blocks are rounded to, and the largest
#: request of the small pool.
_ROUNDING, _SMALL_REQUEST = 512, 1 << 20


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """A block that was alive: address, requested bytes, stream index, where it was allocated if that is known, and the
    index of its private pool (0: none)."""

    address: int
    requested_bytes: int
    stream: int
    name: str = ""
    source: str = ""
    pool: int = 0


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event. ``size`` is the requested size of a block, or the bytes of a segment; ``stream`` and ``pool`` are
    indices, the latter 0 outside private pools; ``category`` and ``label`` say what a block is for, where that is
    written, as ``graphmem export`` does."""

    action: str
    address: int
    size: int
    stream: int
    name: str = ""
    source: str = ""
    pool: int = 0
    category: Category = Category.UNKNOWN
    label: str = ""


@dataclass(frozen=True, slots=True)
class Death:
    """The request that a run died of: its bytes (rounded as blocks are), what the driver had free then, and how many
    events of the recording came before it."""

    requested_bytes: int
    free_bytes: int
    position: int
    stream: int
    name: str = ""
    source: str = ""


@dataclass(frozen=True)
class Recording:
    """One device's part of a snapshot, checked for consistency.

    ``start_blocks`` were alive, ``start_pending`` freed but not yet reusable when the first event happened;
    ``start_ranges`` are (address, bytes) of the memory held then, neighbours joined. ``settings`` is the text of
    ``PYTORCH_CUDA_ALLOC_CONF``; ``pools`` are PyTorch's names of the private pools, the first having index 1.
    """

    device: int
    settings: str
    events: tuple[RecordedEvent, ...]
    start_blocks: tuple[RecordedBlock, ...]
    start_pending: tuple[RecordedBlock, ...]
    start_ranges: tuple[tuple[int, int], ...]
    final_segments: tuple[SegmentView, ...]
    pools: tuple[tuple[int, int], ...]
    ignored_actions: tuple[tuple[str, int], ...]

    @property
    def peak_reserved_bytes(self) -> int:
        """The most memory the allocator held from the driver while the recording ran."""
        held = peak = sum(size for _, size in self.start_ranges)
        for event in self.events:
            if event.action in _TAKES_MEMORY:
                held += event.size
                peak = max(peak, held)
            elif event.action in _GIVES_MEMORY:
                held -= event.size
        return peak

    @property
    def death(self) -> Death | None:
        """The last request that was refused, if nothing was allocated after it."""
        for position in range(len(self.events) - 1, -1, -1):
            event = self.events[position]
            if event.action == "alloc":
                return None
            if event.action == _REFUSED:
                return Death(event.size, event.address, position, event.stream, event.name, event.source)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether the recording began before the first allocation."""
        return not self.start_ranges


def read_snapshot(path: str | Path, device: int | None = None) -> Trace:
    """The trace of a snapshot file: requested sizes, lifetimes and streams; purposes are unknown.

    ``device`` is needed when the file holds several. Raises :class:`graphmem.errors.TraceError` for files that are
    damaged, contradict themselves, or are no plain data, and :class:`graphmem.errors.UsageError` for a device that the
    file does not hold.
    """
    return trace_of(read_recording(path, device))


def read_recording(path: str | Path, device: int | None = None) -> Recording:
    """The events and heaps of a snapshot file, with addresses. Raises as :func:`read_snapshot` does."""
    try:
        with open_file(path) as file:
            return recording_in(file, device)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"cannot read the snapshot {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except TraceError as error:
        raise TraceError(f"snapshot {str(path)!r}: {error}") from None


def recording_in(file: io.BufferedReader, device: int | None = None) -> Recording:
    """The same from a file that is open. Raises :class:`ValueError` for one that is too large, too."""
    head = file.peek(1)[:1]
    if head != _PICKLE:  # before the rest is read
        raise TraceError(
            f"it begins with {head!r}: neither a trace of 'graphmem export', which is JSON, nor a memory "
            "snapshot, which is a pickle"
        )
    return recording_of(load_plain_pickle(read_bounded(file, LARGEST_SNAPSHOT)), device)


def recording_of(snapshot: object, device: int | None = None) -> Recording:
    """The same from the value that ``torch.cuda.memory._snapshot()`` returns."""
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise TraceError("not a memory snapshot: the keys 'segments' and 'device_traces' are missing")
    segments = [_mapping(segment, "a segment") for segment in _list(snapshot, "segments")]
    device_traces = _list(snapshot, "device_traces")
    chosen = _choose_device(segments, device_traces, device)
    indices = _Indices()
    rows = device_traces[chosen] if chosen < len(device_traces) else []
    if not isinstance(rows, list):
        raise TraceError("a device trace is not a list")
    own_segments = [segment for segment in segments if _integer(segment, "device", 0) == chosen]
    frames = _Frames()
    final = tuple(_segment(segment, indices) for segment in own_segments)
    ignored: Counter[str] = Counter()
    events = tuple(
        event for index, row in enumerate(rows) if (event := _event(index, row, indices, frames, ignored)) is not None
    )
    if final and not any("pool_id" in row for row in rows if isinstance(row, dict)):
        events = _with_pools(events, final)
    walk = _Backwards(final, _block_frames(own_segments, frames), events)
    walk.run()
    return Recording(
        device=chosen,
        settings=_settings(snapshot),
        events=events,
        start_blocks=tuple(sorted(walk.live.values(), key=_address)),
        start_pending=tuple(sorted(walk.pending.values(), key=_address)),
        start_ranges=tuple(walk.memory.joined()),
        final_segments=final,
        pools=tuple(indices.pools)[1:],
        ignored_actions=tuple(sorted(ignored.items())),
    )


def trace_of(recording: Recording) -> Trace:
    """The trace of a recording.

    Blocks alive at its start are allocated first, in the phase ``before recording`` (in order of address: theirs is
    lost). A free that waited for other streams stands where the memory came back, not where it was asked for. Where
    memory went back to the driver the cache was emptied, by the program or by the allocator's own retry; an event says
    so, lest a replay keep what the run had given up. A private pool is held all the time, as nothing in the recording
    says when; where its memory went back, it is let go for a moment.
    """
    return _Writer(recording).run()


class _Writer:
    """Writes the trace of a recording, event by event."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._builder = TraceBuilder(source="PyTorch memory snapshot")
        self._storages: dict[int, int] = {}
        self._operators: dict[tuple[str, str], int] = {}
        self._emptied: set[int] = set()  # pools whose memory is going back

    def run(self) -> Trace:
        """The whole trace; of a run that died, up to the request that killed it: what followed was done for want of
        it."""
        recording, builder = self._recording, self._builder
        self._write_start()
        self._phase = builder.phase(0, RECORDED)
        actions = {event.action for event in recording.events}
        frees = "free_completed" if "free_completed" in actions else "free_requested"
        death = recording.death
        own_retries = _own_retries(recording) if death is not None else frozenset()
        for position, event in enumerate(recording.events):
            if position in own_retries:
                continue
            if event.action == _REFUSED:
                refused = self._write_refused(event)
                if death is not None and position == death.position:
                    break
                builder.refuse(refused)
            elif event.action in _GIVES_MEMORY:
                self._write_emptied(event)
            else:
                self._emptied.clear()
                if event.action == "alloc":
                    operator = self._operator(event.name or event.action, event.source)
                    self._write_block(event, event.size, operator)
                elif event.action == frees:
                    operator = self._operator(event.name or event.action, event.source)
                    builder.free(self._storages.pop(event.address), operator)
        if not builder.operators:
            builder.operator(RECORDED, phase=self._phase)
        builder.notes += _notes(recording)
        return builder.build()

    def _write_start(self) -> None:
        """The pools, and the blocks that were alive before the first event."""
        recording, builder = self._recording, self._builder
        if recording.pools:
            beginning = builder.operator(BEFORE, phase=builder.phase(0, BEFORE))
            for first, second in recording.pools:
                builder.event(EventKind.CREATE_POOL, beginning, builder.pool(f"private pool ({first}, {second})"))
        for block in (*recording.start_blocks, *recording.start_pending):
            operator = builder.operator(block.name or BEFORE, phase=builder.phase(0, BEFORE), source=block.source)
            self._write_block(block, block.requested_bytes, operator)

    def _write_block(self, made: RecordedBlock | RecordedEvent, size: int, operator: int) -> None:
        category, label = (made.category, made.label) if isinstance(made, RecordedEvent) else (Category.UNKNOWN, "")
        self._storages[made.address] = self._builder.alloc(
            size, operator, category, stream=made.stream, pool=made.pool, label=label
        )

    def _write_refused(self, event: RecordedEvent) -> int:
        """The storage of a request that nothing could be found for."""
        name = event.name or "the request that was refused"
        operator = self._builder.operator(name, phase=self._phase, source=event.source)
        return self._builder.alloc(event.size, operator, event.category, stream=event.stream, label=event.label)

    def _write_emptied(self, event: RecordedEvent) -> None:
        """The first of the segments in a row that a pool gives back."""
        if event.pool in self._emptied:
            return
        self._emptied.add(event.pool)
        for kind in _EMPTY_POOL if event.pool else (EventKind.EMPTY_CACHE,):
            self._builder.event(kind, self._operator("empty_cache", event.source), event.pool or -1)

    def _operator(self, name: str, source: str) -> int:
        place = (name, source)
        if place not in self._operators:
            self._operators[place] = self._builder.operator(name, phase=self._phase, source=source)
        return self._operators[place]


def _own_retries(recording: Recording) -> frozenset[int]:
    """The events with which the allocator gave memory back because a request did not fit: a replay does so itself where
    it has to. What it could get on the card is known from its death."""
    assert recording.death is not None
    held, changes = sum(size for _, size in recording.start_ranges), []
    for event in recording.events:
        changes.append(held)
        held += event.size if event.action in _TAKES_MEMORY else -event.size if event.action in _GIVES_MEMORY else 0
    room = changes[recording.death.position] + recording.death.free_bytes
    found: set[int] = set()
    burst: list[int] = []
    for position, event in enumerate(recording.events):
        if event.action in _GIVES_MEMORY:
            burst.append(position)
            continue
        wanted = event.size if event.action in _TAKES_MEMORY else room if event.action == _REFUSED else 0
        if burst and wanted and changes[burst[0]] + wanted > room:
            found.update(burst)
        burst = []
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Hole:
    """Free memory between blocks. ``is_usable``: it lies in segments of the kind, stream and pool that the request
    could be served from."""

    bytes: int
    is_usable: bool


@dataclass(frozen=True)
class HeapAtDeath:
    """The memory that PyTorch held when the run died: blocks with what made them, the free memory between them, and all
    of it."""

    blocks: tuple[RecordedBlock, ...]
    holes: tuple[Hole, ...]
    reserved_bytes: int


def heap_at_death(recording: Recording) -> HeapAtDeath:
    """The heap at the moment of the request that was refused, with what followed it undone."""
    death = recording.death
    assert death is not None
    walk = _Backwards(recording.final_segments, {}, recording.events[death.position + 1 :])
    walk.run()
    made = {block.address: (block.name, block.source) for block in recording.start_blocks}
    for event in recording.events[: death.position]:
        if event.action == "alloc":
            made[event.address] = event.name or _NO_STACK, event.source
    found = sorted((*walk.live.values(), *walk.pending.values()), key=_address)
    blocks = tuple(
        replace(block, name=made.get(block.address, ("", ""))[0], source=made.get(block.address, ("", ""))[1])
        for block in found
    )
    ranges = walk.memory.joined()
    return HeapAtDeath(blocks, tuple(_holes(recording, ranges, found)), sum(size for _, size in ranges))


def _holes(recording: Recording, ranges: Iterable[tuple[int, int]], blocks: Iterable[RecordedBlock]) -> Iterable[Hole]:
    """The gaps between blocks, segment by segment as far as segments are known."""
    death = recording.death
    assert death is not None
    sizes = {block.address: block.size for one in recording.final_segments for block in one.blocks}
    taken = [
        (block.address, max(-(-block.requested_bytes // _ROUNDING) * _ROUNDING, sizes.get(block.address, 0)))
        for block in blocks
    ]
    starts = {one.address: one for one in recording.final_segments}
    kind = "small" if death.requested_bytes <= _SMALL_REQUEST else "large"
    at = 0
    for start, size in ranges:
        cuts = sorted({start, start + size, *(address for address in starts if start < address < start + size)})
        for begin, end in pairwise(cuts):
            segment = starts.get(begin)
            usable = segment is None or (segment.kind, segment.stream, segment.pool) == (kind, death.stream, 0)
            while at < len(taken) and taken[at][0] < end:
                address, length = taken[at]
                if address > begin:
                    yield Hole(address - begin, usable)
                begin = max(begin, address + length)
                at += 1
            if begin < end:
                yield Hole(end - begin, usable)


def _notes(recording: Recording) -> Iterable[tuple[str, str]]:
    yield "device", str(recording.device)
    yield "allocator settings", recording.settings
    yield "recorded peak reserved", str(recording.peak_reserved_bytes)
    started = len(recording.start_blocks) + len(recording.start_pending)
    if started:
        size = sum(block.requested_bytes for block in (*recording.start_blocks, *recording.start_pending))
        yield "alive before recording", f"{started} blocks, {size} requested bytes"
    deferred = _deferred_frees(recording)
    if deferred:
        yield "deferred frees", f"{deferred} frees waited for other streams; they stand where the memory came back"
    if recording.pools:
        yield "private pools", f"{len(recording.pools)} (CUDA graphs, MemPool)"
    if recording.death is not None:
        death = recording.death
        yield "out of memory", f"the run died of a request for {death.requested_bytes} bytes, the last of this trace"
    if recording.ignored_actions:
        yield "ignored events", ", ".join(f"{count} {action}" for action, count in recording.ignored_actions)


def _deferred_frees(recording: Recording) -> int:
    """Frees that did not complete at once: something happened between their two events."""
    events = [event for event in recording.events if event.action in _BLOCK_ACTIONS]
    requested = any(event.action == "free_requested" for event in events)
    return sum(
        after.action == "free_completed" and (before.action, before.address) != ("free_requested", after.address)
        for before, after in pairwise(events)
        if requested
    )


class _Backwards:
    """Undoes every event, last one first; what is left is the state at the start. Contradictions are errors."""

    def __init__(
        self,
        final: tuple[SegmentView, ...],
        frames: Mapping[int, tuple[str, str]],
        events: tuple[RecordedEvent, ...],
    ) -> None:
        self.events = events
        self.live: dict[int, RecordedBlock] = {}
        self.pending: dict[int, RecordedBlock] = {}
        self.memory = _Ranges()
        # A recording may leave kinds of events out (skip_actions of _record_memory_history).
        actions = {event.action for event in events}
        self.two_steps = {"free_requested", "free_completed"} <= actions
        self.only_requests = "free_requested" in actions and not self.two_steps
        for segment in final:
            self.memory.add(segment.address, segment.total_size, "the final heap")
            for block in segment.blocks:
                self._remember_final(block, segment, frames)

    def _remember_final(self, block: BlockView, segment: SegmentView, frames: Mapping[int, tuple[str, str]]) -> None:
        name, source = frames.get(block.address, ("", ""))
        kept = RecordedBlock(block.address, block.requested_bytes, segment.stream, name, source, segment.pool)
        if block.state == "pending" and self.two_steps:
            self.pending[block.address] = kept
        elif block.state == "allocated" or (block.state == "pending" and not self.only_requests):
            self.live[block.address] = kept

    def run(self) -> None:
        for index in range(len(self.events) - 1, -1, -1):
            event = self.events[index]
            where = f"event {index} ({event.action} at {event.address:#x})"
            if event.action == _REFUSED:
                continue
            if event.action in _TAKES_MEMORY:
                self.memory.remove(event.address, event.size, where)
            elif event.action in _GIVES_MEMORY:
                self.memory.add(event.address, event.size, where)
            else:
                self._undo(event, where)
        for block in (*self.live.values(), *self.pending.values()):
            self.memory.check_holds(block.address, block.requested_bytes, f"the block at {block.address:#x}")

    def _undo(self, event: RecordedEvent, where: str) -> None:
        address = event.address
        self.memory.check_holds(address, event.size, where)
        block = RecordedBlock(address, event.size, event.stream, pool=event.pool)
        if event.action == "alloc":
            allocated = self.live.pop(address, None)
            if allocated is None or allocated.requested_bytes != event.size:
                raise TraceError(f"{where} allocates a block that is neither freed later nor alive at the end")
        elif self.two_steps and event.action == "free_requested":
            if self.pending.pop(address, None) is None:
                raise TraceError(f"{where} frees a block that does not become free later")
            self.live[address] = block
        else:
            if address in self.live or address in self.pending:
                raise TraceError(f"{where} frees a block that is still alive afterwards")
            (self.pending if self.two_steps else self.live)[address] = block


class _Ranges:
    """Disjoint address ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, size: int, where: str) -> None:
        """Add a range that must not overlap the others."""
        position = bisect_right(self._starts, address)
        overlaps_before = position > 0 and self._ends[position - 1] > address
        overlaps_after = position < len(self._starts) and self._starts[position] < address + size
        if size <= 0 or overlaps_before or overlaps_after:
            raise TraceError(f"{where}: memory at {address:#x}, {size} bytes, overlaps memory already held")
        self._starts.insert(position, address)
        self._ends.insert(position, address + size)

    def remove(self, address: int, size: int, where: str) -> None:
        """Take a range out, which may be a part or a whole run of neighbouring ones."""
        end = address + size
        while address < end:
            position = bisect_right(self._starts, address) - 1
            if position < 0 or self._ends[position] <= address:
                raise TraceError(f"{where}: memory at {address:#x} is not held afterwards")
            start, stop = self._starts.pop(position), self._ends.pop(position)
            for left, right in ((min(end, stop), stop), (start, address)):
                if left < right:
                    self._starts.insert(position, left)
                    self._ends.insert(position, right)
            address = min(end, stop)

    def check_holds(self, address: int, size: int, where: str) -> None:
        """Complain unless the range is held."""
        end = address + size
        while address < end:
            position = bisect_right(self._starts, address) - 1
            if position < 0 or self._ends[position] <= address:
                raise TraceError(f"{where} lies outside the memory held at that time")
            address = self._ends[position]

    def joined(self) -> list[tuple[int, int]]:
        """(address, bytes) of the ranges, neighbours joined."""
        found: list[tuple[int, int]] = []
        for start, end in zip(self._starts, self._ends, strict=True):
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], end - found[-1][0])
            else:
                found.append((start, end - start))
        return found


class _Indices:
    """Stream handles and names of pools as small indices, in order of appearance; what is default is 0."""

    def __init__(self) -> None:
        self._streams = {0: 0}
        self.pools = {(0, 0): 0}

    def stream(self, row: dict[str, Any]) -> int:
        return self._streams.setdefault(_integer(row, "stream", 0), len(self._streams))

    def pool(self, row: dict[str, Any], key: str) -> int:
        identity = row.get(key, (0, 0))
        if (
            not isinstance(identity, tuple | list)
            or len(identity) != 2
            or any(type(part) is not int for part in identity)
        ):
            raise TraceError(f"the key {key!r} does not hold a pair of numbers")
        return self.pools.setdefault((identity[0], identity[1]), len(self.pools))


class _Frames:
    """(operator, source) of a stack; snapshots share the lists of frames, so each is read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}

    def place(self, frames: object) -> tuple[str, str]:
        if not isinstance(frames, list) or not frames:
            return "", ""
        if id(frames) not in self._known:
            self._known[id(frames)] = _place(frames)
        return self._known[id(frames)]


def _place(frames: list[object]) -> tuple[str, str]:
    """The innermost ATen operator, or else function, and the innermost line that is not PyTorch's own."""
    readable = [frame for frame in frames if isinstance(frame, dict)]
    names = [_words_in(frame, "name") for frame in readable]
    operator = next((name for name in map(_aten_name, names) if name), "")
    own = next((frame for frame in readable if _is_users(_words_in(frame, "filename"))), None)
    if own is None:
        return operator or (names[0] if names else ""), ""
    line = own.get("line", 0)
    source = f"{_words_in(own, 'filename')}:{line}" if type(line) is int else _words_in(own, "filename")
    return operator or _words_in(own, "name"), source


def _words_in(frame: dict[str, object], key: str) -> str:
    found = frame.get(key)
    return found if isinstance(found, str) else ""


def _aten_name(name: str) -> str:
    """``aten.mm`` for the C++ frame ``at::_ops::mm::call(...)``."""
    if not name.startswith("at::_ops::"):
        return ""
    return "aten." + name.removeprefix("at::_ops::").split("::", 1)[0]


def _is_users(filename: str) -> bool:
    return filename.endswith(".py") and "site-packages" not in filename and "/torch/" not in filename


def _choose_device(segments: list[dict[str, object]], device_traces: list[object], device: int | None) -> int:
    there = {_integer(segment, "device", 0) for segment in segments}
    there |= {index for index, rows in enumerate(device_traces) if rows}
    if device is not None:
        if device not in there:
            raise UsageError(f"the snapshot has no device {device}; accepted: {_listed(there)}")
        return device
    if len(there) != 1:
        raise TraceError(f"the snapshot holds {len(there)} devices ({_listed(there)}); say which one to read")
    return there.pop()


def _listed(devices: set[int]) -> str:
    return ", ".join(map(str, sorted(devices))) or "none"


def _segment(segment: dict[str, object], indices: _Indices) -> SegmentView:
    position = address = _integer(segment, "address")
    blocks: list[BlockView] = []
    for row in _list(segment, "blocks"):
        block = _mapping(row, "a block")
        state = _STATES.get(_text(block, "state"))
        if state is None:
            raise TraceError(f"a block has the state {block['state']!r}; accepted: {', '.join(_STATES)}")
        size = _integer(block, "size")
        # Older versions give blocks no address of their own; they tile the segment.
        if _integer(block, "address", position) != position:
            raise TraceError(f"the blocks of the segment at {address:#x} do not tile it")
        requested = 0 if state == "free" else _integer(block, "requested_size", size)
        if requested > size:
            raise TraceError(f"the block at {position:#x} is smaller than its request")
        blocks.append(BlockView(position, size, requested, state))
        position += size
    total = _integer(segment, "total_size")
    if position != address + total:
        raise TraceError(f"the blocks of the segment at {address:#x} do not fill it")
    stream, pool = indices.stream(segment), indices.pool(segment, "segment_pool_id")
    kind = _text(segment, "segment_type")
    return SegmentView(address, total, stream, kind, bool(segment.get("is_expandable", False)), tuple(blocks), pool)


def _with_pools(events: tuple[RecordedEvent, ...], final: tuple[SegmentView, ...]) -> tuple[RecordedEvent, ...]:
    """Events of versions that do not name their pool: those inside a segment that is there at the end, since it was
    obtained, belong to its pool."""
    ends = {segment.address: segment for segment in final if segment.pool}
    starts = sorted(ends)
    named = []
    for event in reversed(events):
        position = bisect_right(starts, event.address) - 1
        segment = ends.get(starts[position]) if position >= 0 else None
        if segment is not None and event.address < segment.address + segment.total_size:
            named.append(replace(event, pool=segment.pool))
            if event.action == "segment_alloc":
                del ends[segment.address]
        else:
            named.append(event)
    return tuple(reversed(named))


def _block_frames(segments: list[dict[str, Any]], frames: _Frames) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for segment in segments:
        position = _integer(segment, "address")
        for block in segment["blocks"]:
            found[position] = frames.place(block.get("frames"))
            position += block["size"]
    return found


def _event(index: int, row: object, indices: _Indices, frames: _Frames, ignored: Counter[str]) -> RecordedEvent | None:
    event = _mapping(row, f"event {index}")
    action = _text(event, "action")
    if action not in (*_BLOCK_ACTIONS, *_TAKES_MEMORY, *_GIVES_MEMORY, _REFUSED):
        # Not 'snapshot', which says nothing; but what is unknown must be seen.
        if action != "snapshot":
            ignored[action] += 1
        return None
    name, source = frames.place(event.get("frames"))
    # Module.cpp writes what the driver had free under a name of its own.
    free = "device_free" if action == _REFUSED and "device_free" in event else "addr"
    address, size = _integer(event, free), _integer(event, "size")
    place = (indices.stream(event), name, source, indices.pool(event, "pool_id"))
    return RecordedEvent(action, address, size, *place, *_purpose(event))


def _purpose(event: dict[str, object]) -> tuple[Category, str]:
    """What a block is for, of a category that is one of ours, and the label behind it."""
    name, words = _words_in(event, "category"), _words_in(event, "user_metadata")
    category = Category.__members__.get(name.upper(), Category.UNKNOWN)
    known = category is not Category.UNKNOWN and words.startswith(name)
    return category, words.removeprefix(name).strip() if known else ""


def _settings(snapshot: dict[str, Any]) -> str:
    settings = snapshot.get("allocator_settings")
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "") if isinstance(settings, dict) else ""
    return text if isinstance(text, str) else ""


def _address(block: RecordedBlock) -> int:
    return block.address


def _mapping(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TraceError(f"{what} is not a dict")
    return value


def _list(value: dict[str, object], key: str) -> list[object]:
    found = value.get(key)
    if not isinstance(found, list):
        raise TraceError(f"the key {key!r} does not hold a list")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise TraceError(f"the key {key!r} does not hold text")
    return found


def _integer(value: dict[str, object], key: str, default: int | None = None) -> int:
    found = value.get(key, default)
    if type(found) is not int or not 0 <= found <= MAX_STORAGE_BYTES:
        shown = found if type(found) is int else type(found).__name__
        raise TraceError(f"the key {key!r} holds {shown}; accepted: a number from 0 to 2**63 - 1")
    return found
