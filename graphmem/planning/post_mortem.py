"""Post mortem: the cause of a recorded out-of-memory error, and changes that prevent it, each a replay of its own.

The snapshot says what was asked for, what the driver had free and what PyTorch held: together, all that it could have
had. In that room the run is replayed with other settings; a setting saves it when the last request is served too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import get_allocation_size
from graphmem.answering.question import Question
from graphmem.answering.stages import replay_recorded
from graphmem.base.versions import version_named
from graphmem.devices import Device, custom_device
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.estimate import Estimate
from graphmem.replay import Replay, replay
from graphmem.sources.snapshot import Recording, heap_at_death, trace_of
from graphmem.trace import EventKind, Trace

#: Values that are tried of each setting. Which one helps depends on the sizes of the run, so several are.
_TRIED = (
    ("expandable_segments", ("True",)),
    ("max_split_size_mb", ("32", "64", "128", "256", "512")),
    ("garbage_collection_threshold", ("0.6", "0.8")),
    ("roundup_power2_divisions", ("4", "8", "16")),
)
#: ``kLargeBuffer``: the segment for requests between 1 and 10 MiB (``c10/core/AllocatorConfig.h``).
_LARGE_SEGMENT_BYTES = 20 << 20
#: How much of the span between the least and the most live bytes memory falls and rises by between two iterations.
_SWING = 0.3
#: How much of its bytes an iteration shares with an earlier one where a run repeats: one of the two makes the state of
#: the optimizer too.
_ALIKE = 0.75
_LEAST_ALLOCATIONS = 20
_HOLDERS, _HOLES = 10, 10


@dataclass(frozen=True)
class Holder:
    """The memory that one source line held when the run died."""

    bytes: int
    blocks: int
    operator: str
    source: str


@dataclass(frozen=True)
class Attempt:
    """One change. ``spare_bytes``: what was never reserved where it saves the run, else None. Where it does not,
    ``missing_bytes`` is what the request that was refused then lacked, where that is known: the same request, unless
    ``earlier`` is true. ``batch``: the batch that was tried, None for that of the run."""

    change: str
    options: str
    saves: bool
    spare_bytes: int | None = None
    missing_bytes: int | None = None
    earlier: bool = False
    batch: int | None = None


@dataclass(frozen=True)
class PostMortem:
    """All figures in bytes. ``missing_bytes`` is the segment that the request needed less what the driver had free; 0
    where the driver had enough and a limit of the process refused it. ``holes`` are the largest of ``hole_count``
    pieces of free memory inside segments, ``usable_bytes`` the largest one that the request could have been served
    from. ``agrees``: whether the replay dies of the same request; ``repeats``: whether the iteration that it died in is
    like an earlier one."""

    requested_bytes: int
    segment_bytes: int
    driver_free_bytes: int
    missing_bytes: int
    operator: str
    source: str
    reserved_bytes: int
    allocated_bytes: int
    room_bytes: int
    hole_bytes: int
    hole_count: int
    usable_bytes: int
    holes: tuple[int, ...]
    holders: tuple[Holder, ...]
    agrees: bool
    repeats: bool
    attempts: tuple[Attempt, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As plain values, memory in bytes."""
        return asdict(self)


def post_mortem(
    recording: Recording,
    *,
    torch_version: tuple[int, int],
    alloc_conf: str | None = None,
    batch: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> PostMortem:
    """The cause of a recorded out-of-memory error, and the changes that would have prevented it.

    ``alloc_conf`` stands in for the settings of the snapshot. ``batch`` is the batch that the run was given: with it a
    batch of one less is tried where the run repeats. Raises :class:`UsageError` for a recording of a run that did not
    die, and for settings that this version of PyTorch refuses.
    """
    death = recording.death
    if death is None:
        raise UsageError("the recorded run did not run out of memory")
    settings = recording.settings if alloc_conf is None else alloc_conf
    heap = heap_at_death(recording)
    grows = "expandable_segments:true" in settings.lower()
    segment = death.requested_bytes if grows else get_allocation_size(death.requested_bytes, _LARGE_SEGMENT_BYTES)
    missing = max(segment - death.free_bytes, 0)
    # A driver that had enough was not asked: the process has a limit of its own, and what it held was nearly that.
    room = heap.reserved_bytes + (death.free_bytes if missing else segment - 1)
    sizes = sorted((hole.bytes for hole in heap.holes), reverse=True)
    trial = _Trial(trace_of(recording), room, torch_version)
    base = trial.run(settings)
    valleys = _valleys(trial.trace)
    repeats = _repeats(trial.trace, valleys)
    attempts = _attempts(trial, settings, valleys, say)
    if batch is not None and batch > 1 and repeats:
        say("a batch of one less")
        smaller = _with_smaller_batch(trial.trace, valleys, batch, batch - 1)
        tried = trial.attempt(f"a batch of {batch - 1} instead of {batch} (about)", "", settings, smaller)
        attempts.append(replace(tried, batch=batch - 1))
    elif repeats:
        say("half the batch")
        smaller = _with_smaller_batch(trial.trace, valleys, 2, 1)
        attempts.append(trial.attempt("half the batch (about)", "", settings, smaller))
    return PostMortem(
        requested_bytes=death.requested_bytes,
        segment_bytes=segment,
        driver_free_bytes=death.free_bytes,
        missing_bytes=missing,
        operator=death.name,
        source=death.source,
        reserved_bytes=heap.reserved_bytes,
        allocated_bytes=heap.reserved_bytes - sum(sizes),
        room_bytes=room,
        hole_bytes=sum(sizes),
        hole_count=len(sizes),
        usable_bytes=max((hole.bytes for hole in heap.holes if hole.is_usable), default=0),
        holes=tuple(sizes[:_HOLES]),
        holders=tuple(_holders((b.requested_bytes, b.name, b.source) for b in heap.blocks)),
        agrees=base.out_of_memory is not None and base.out_of_memory.event == len(trial.trace) - 1,
        repeats=repeats,
        attempts=tuple(attempts),
    )


def replay_dead(
    recording: Recording,
    *,
    device: Device | None = None,
    alloc_conf: str | None = None,
    torch_version: str | None = None,
    runtime: str | None = None,
    batch: int | None = None,
    top: int = 10,
    margin: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """A run that died, replayed with the request that killed it on ``device``, by default in the room that it had;
    ``details["out_of_memory"]`` is its :class:`PostMortem` as plain values.

    Arguments as of :func:`graphmem.analyze.replay_trace` and :func:`post_mortem`. Raises :class:`GraphmemError`.
    """
    version = version_named(torch_version)
    found = post_mortem(recording, torch_version=version, alloc_conf=alloc_conf, batch=batch, say=say)
    card = device or room_of(found)
    question = Question(
        None, runtime=runtime, device=card, alloc_conf=alloc_conf, torch_version=torch_version, top=top, margin=margin
    )
    estimate = replay_recorded(trace_of(recording), question, died=device is not None)
    document = {**found.to_dict(), "in_its_room": device is None}
    return estimate.with_details(out_of_memory=document)


def room_of(found: PostMortem) -> Device:
    """A card with the memory that the run could get: a snapshot does not name the card, nor what else was on it."""
    return replace(
        custom_device(found.room_bytes),
        name="the room that the run had",
        capacity_source="the snapshot: what PyTorch held and what the driver had free",
        context_bytes=0,
        context_source="not part of the room",
        context_measured=True,
        empty_context_bytes=0,
        empty_context_source="not part of the room",
        board_bytes=None,
    )


def _holders(blocks: Iterator[tuple[int, str, str]]) -> Iterator[Holder]:
    total, count = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for size, name, source in blocks:
        total[name, source] += size
        count[name, source] += 1
    for (name, source), size in total.most_common(_HOLDERS):
        yield Holder(size, count[name, source], name or "before recording", source)


class _Trial:
    """Replays of one trace in one room."""

    def __init__(self, trace: Trace, room: int, torch_version: tuple[int, int]) -> None:
        self.trace, self.room, self._version = trace, room, torch_version

    def run(self, settings: str, trace: Trace | None = None) -> Replay:
        """The whole trace until the first request that is refused."""
        conf = parse_alloc_conf(settings, self._version)
        allocator = PyTorchCachingAllocator(None, conf, self._version, driver=CudaDriver(self.room))
        return replay(self.trace if trace is None else trace, allocator)

    def attempt(self, change: str, options: str, settings: str, trace: Trace | None = None) -> Attempt:
        """The outcome of one change."""
        tried = self.trace if trace is None else trace
        done = self.run(settings, tried)
        if done.out_of_memory is None:
            return Attempt(change, options, True, spare_bytes=self.room - done.peak_reserved_bytes)
        error: DeviceOutOfMemory = done.out_of_memory.error
        missing = error.requested_bytes - error.free_bytes
        earlier = done.out_of_memory.event < len(tried) - 1
        return Attempt(change, options, False, missing_bytes=missing if missing > 0 else None, earlier=earlier)


def _attempts(trial: _Trial, settings: str, valleys: Sequence[int], say: Callable[[str], None]) -> list[Attempt]:
    """Replay the run with each setting that it did not have, at its best value; with an emptied cache where iterations
    end (``valleys``); and with all of them together."""
    found, best = [], []
    for name, values in _TRIED:
        if name in settings:
            continue
        tried = []
        for value in values:
            conf = _joined(settings, f"{name}:{value}")
            say(f"{name}:{value}")
            tried.append(trial.attempt(f"{name}:{value}", f"PYTORCH_ALLOC_CONF={conf}", conf))
        found.append(min(tried, key=_rank))
        best.append(found[-1].change)
    if valleys:
        say("empty_cache")
        often = "once" if len(valleys) == 1 else f"{len(valleys)} times"
        places = f"torch.cuda.empty_cache() where an iteration ends ({often}{_last_place(trial, valleys)})"
        emptied = _with_emptied_cache(trial.trace, valleys)
        found.append(trial.attempt(places, "", settings, emptied))
    if len(best) > 1:
        say("together")
        conf = _joined(settings, *best)
        found.append(trial.attempt("these settings together", f"PYTORCH_ALLOC_CONF={conf}", conf))
        if valleys:
            words = "these settings together, with empty_cache"
            found.append(trial.attempt(words, f"PYTORCH_ALLOC_CONF={conf}", conf, emptied))
    return found


def _rank(attempt: Attempt) -> tuple[bool, bool, int, int]:
    """Those that save a run come first, those with the most to spare before others."""
    return not attempt.saves, attempt.earlier, -(attempt.spare_bytes or 0), attempt.missing_bytes or 0


def _joined(settings: str, *more: str) -> str:
    return ",".join(filter(None, (settings.strip(), *more)))


# --- iterations -------------------------------------------------------------------------------------------------------


def _valleys(trace: Trace) -> list[int]:
    """The events after which least is alive, once an iteration: memory has fallen there by a good part of its span, and
    rises by as much before it falls again."""
    live = _live(trace)
    if not len(live):
        return []
    swing = _SWING * (int(live.max()) - int(live.min()))
    valleys: list[int] = []
    top, low, low_at, falling = 0, 0, 0, False
    for position, value in enumerate(live.tolist()):
        if falling:
            if value <= low:
                low, low_at = value, position
            elif value - low >= swing:
                valleys.append(low_at)
                falling, top = False, value
        elif value >= top:
            top = value
        elif top - value >= swing:
            falling, low, low_at = True, value, position
    return valleys


def _live(trace: Trace) -> Any:
    sizes = np.array([storage.bytes for storage in trace.storages], dtype=np.int64)
    signs = np.where(trace.kinds == EventKind.ALLOC, 1, np.where(trace.kinds == EventKind.FREE, -1, 0))
    return np.cumsum(np.where(signs == 0, 0, signs * sizes[np.where(signs == 0, 0, trace.subjects)]))


def _last_place(trial: _Trial, valleys: Sequence[int]) -> str:
    """After which line least is alive, where that is known."""
    operator = trial.trace.operators[int(trial.trace.event_operators[valleys[-1]])]
    return f", as after {operator.source}" if operator.source else ""


def _with_emptied_cache(trace: Trace, valleys: Sequence[int]) -> Trace:
    """The trace with the cache emptied after each of these events."""
    at = np.array(valleys, dtype=np.int64) + 1

    def inserted(column: Any, values: Any) -> Any:
        return np.insert(column, at, values)

    return replace(
        trace,
        kinds=inserted(trace.kinds, int(EventKind.EMPTY_CACHE)),
        subjects=inserted(trace.subjects, -1),
        event_operators=inserted(trace.event_operators, trace.event_operators[at - 1]),
        event_streams=inserted(trace.event_streams, 0),
    )


def _births(trace: Trace, begin: int, end: int) -> list[int]:
    """Storages that are born between two events, in order."""
    part = slice(begin, end)
    born: list[int] = trace.subjects[part][trace.kinds[part] == EventKind.ALLOC].tolist()
    return born


def _repeats(trace: Trace, valleys: Sequence[int]) -> bool:
    """Whether the iteration that the run died in began as an earlier one did: with the same sizes, as often."""
    if not valleys:
        return False
    bounds = [0, *(position + 1 for position in valleys), len(trace)]
    parts = [[trace.storages[i].bytes for i in _births(trace, a, b)] for a, b in pairwise(bounds)]
    last = Counter(parts[-1][:-1])
    if last.total() < _LEAST_ALLOCATIONS:  # it died where one begins
        return len(parts) > 2 and parts[-2] == parts[-3]
    return any(_bytes(last & Counter(earlier)) >= _ALIKE * _bytes(last) for earlier in parts[:-1])


def _bytes(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _with_smaller_batch(trace: Trace, valleys: Sequence[int], batch: int, fewer: int) -> Trace:
    """The trace of about the same run with ``fewer`` samples: what an iteration makes and lets go shrinks where its
    bytes are a multiple of the batch, unless it has the size of something that stays, as gradients have of parameters.
    """
    alive = [set(trace.live_at(position)) for position in (*valleys, len(trace) - 2)]
    kept = {i for before, after in pairwise(alive) for i in before & after}  # an output may be held for one iteration
    staying = {trace.storages[i].bytes for i in kept}
    storages = tuple(
        storage
        if number in kept or storage.bytes in staying or storage.bytes % batch
        else replace(storage, bytes=storage.bytes // batch * fewer)
        for number, storage in enumerate(trace.storages)
    )
    return replace(trace, storages=storages)
