"""From a trace and its replay to the Estimate: peaks by level and phase, the breakdown, the largest storages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from graphmem.base.figures import Doubts, Figure, Loads
from graphmem.devices import Device
from graphmem.estimate import (
    MEANINGS,
    Breakdown,
    CardUse,
    Diagnostic,
    Estimate,
    Fit,
    HeldBytes,
    LiveStorage,
    Moment,
    Peak,
    PhasePeak,
    PoolUse,
    Refusals,
    Timeline,
)
from graphmem.replay import Replay
from graphmem.runtimes.base import Runs
from graphmem.trace import Category, EventKind, Operator, Place, Trace

Found = TypeVar("Found")


def summarize(
    trace: Trace,
    runs: Runs,
    card: Device,
    *,
    model: str,
    runtime: str,
    allocator: str,
    step: str,
    refusals: Refusals | None = None,
    top: int = 10,
    assumptions: Sequence[str] = (),
    diagnostics: Sequence[Diagnostic] = (),
    details: Mapping[str, object] | None = None,
    context: Sequence[Figure] = (),
    loads: Loads | None = None,
    doubts: Doubts | None = None,
    probability: float | None = None,
    margin: float | None = None,
    levels: Sequence[tuple[str, str]] = MEANINGS,
) -> Estimate:
    """The Estimate of a run on ``card``: every figure is of the run there where it fits, else of one without a limit.
    ``context``: held by the process outside its allocator, given the libraries it ``loads``, and its sum is that of
    ``card``; ``doubts``: why figures may be others, None where there is no doubt; ``probability``, ``margin`` and
    ``refusals`` as in :class:`~graphmem.estimate.Fit`, ``levels`` as in the estimate.

    The moment of the peak is the fullest one (most allocated bytes) of those at which the most is reserved. The first
    of them, at which reserved memory grew last, shows little of its use: segments stay, and a small storage may have
    taken the last one.
    """
    replay = runs.on_card
    grew = _first_maximum(replay.reserved_bytes)
    at_peak = replay.reserved_bytes == replay.reserved_bytes.max(initial=0)
    position = _first_maximum(np.where(at_peak, replay.allocated_bytes, -1))
    moment = _moment(trace, position)
    share = float(fits_card(runs, card, refusals)) if doubts is None else probability
    return Estimate(
        model=model,
        runtime=runtime,
        allocator=allocator,
        step=step,
        gpu=card.name,
        peak=Peak(
            replay.peak_requested_bytes,
            replay.peak_allocated_bytes,
            replay.peak_reserved_bytes,
            replay.peak_reserved_bytes + card.context_bytes,
        ),
        ideal_bytes=replay.peak_requested_bytes,
        phases=tuple(_phases(trace, replay, card.context_bytes)),
        moment=moment,
        last_growth=_moment(trace, grew),
        breakdown=_breakdown(trace, replay, position, card.context_bytes),
        top=_at(trace, position, _largest, top),
        fit=replace(_fit(trace, runs, card, refusals), probability=share, margin=margin),
        doubts=doubts or Doubts(),
        levels=levels,
        host_bytes=replay.host_peak_bytes,
        pinned_bytes=replay.pinned_peak_bytes,
        managed_bytes=replay.managed_peak_bytes,
        assumptions=tuple(assumptions),
        diagnostics=diagnostics,
        details={} if details is None else details,
        pools=tuple(_pools(trace, replay, position)),
        held=_at(trace, position, _held),
        card=_use(runs.limited or replay, card, context, loads or Loads()) if context else None,
        timeline=Timeline(replay.requested_bytes, replay.allocated_bytes, replay.reserved_bytes),
        trace=trace,
    )


def _first_maximum(values: npt.NDArray[np.int64]) -> int:
    """Index of the first event at the maximum; -1 for an empty run."""
    return int(np.argmax(values)) if len(values) else -1


def _moment(trace: Trace, position: int) -> Moment:
    if position < 0:
        return Moment(-1, "", "", "", "")
    operator = trace.operators[int(trace.event_operators[position])]
    return Moment(position, str(trace.phases[operator.phase]), operator.name, operator.module, operator.source)


def _at(trace: Trace, position: int, find: Callable[..., Found], *asked: object) -> Found:
    """What ``find`` finds at an event of the trace. The peaks of many settings lie at few events: it is kept."""
    known: dict[object, Found] = trace.kept.setdefault("moments", {})
    key = find, position, *asked
    if key not in known:
        known[key] = find(trace, position, *asked)
    return known[key]


def _by_category(trace: Trace, position: int) -> Mapping[Category, int]:
    """Bytes of the storages on the device that live after an event."""
    columns, live = trace.columns, _live_on_device(trace, position)
    categories, sizes = columns.categories[live], columns.bytes[live]
    return {category: int(sizes[categories == category].sum()) for category in Category}


def _breakdown(trace: Trace, replay: Replay, position: int, context_bytes: int) -> Breakdown:
    by_category = _at(trace, position, _by_category)
    requested = sum(by_category.values())
    allocated = int(replay.allocated_bytes[position]) if position >= 0 else 0
    reserved = replay.peak_reserved_bytes
    breakdown = {category.name: size for category, size in by_category.items() if category not in _RARE}
    breakdown |= {category.name: by_category[category] for category in _RARE if by_category[category]}
    breakdown["ROUNDING"] = allocated - requested
    breakdown["FRAGMENTATION"] = reserved - allocated
    breakdown["CONTEXT"] = context_bytes
    return breakdown


def _live_on_device(trace: Trace, position: int) -> npt.NDArray[np.int64]:
    """Indices of the storages on the device that live after an event."""
    live = trace.alive_at(position)
    on_device: npt.NDArray[np.int64] = live[trace.columns.places[live] == Place.DEVICE]
    return on_device


#: Whose source line says more than their category.
_BY_LINE = (Category.HELD, Category.UNKNOWN)
#: Shown only where there is something of it.
_RARE = (Category.KV_CACHE, Category.HELD, Category.UNKNOWN)


def _held(trace: Trace, position: int) -> tuple[HeldBytes, ...]:
    """The bytes that the program holds, or whose purpose a recording does not have, by the line that made them."""
    by_line = Counter[str]()
    live = _live_on_device(trace, position)
    for index in live[np.isin(trace.columns.categories[live], _BY_LINE)].tolist():
        operator = _maker(trace, index)
        by_line[operator.source or operator.name] += trace.storages[index].bytes
    return tuple(HeldBytes(size, line) for line, size in by_line.most_common() if size)


def _maker(trace: Trace, storage: int) -> Operator:
    """The operator that made a storage."""
    return trace.operators[int(trace.event_operators[trace.birth_of[storage]])]


def _pools(trace: Trace, replay: Replay, position: int) -> Iterator[PoolUse]:
    """The private pools at the peak, those with one label together."""
    requested = Counter[int]()
    for index in trace.live_at(position) if trace.pools else ():
        requested[trace.storages[index].pool] += trace.storages[index].bytes
    by_label: dict[str, list[int]] = {}
    for number, pool in enumerate(trace.pools, 1):
        if replay.private_reserved_at_peak.get(number):
            by_label.setdefault(pool.label, []).append(number)
    for label, numbers in by_label.items():
        reserved = sum(replay.private_reserved_at_peak[number] for number in numbers)
        yield PoolUse(label, len(numbers), reserved, sum(requested[number] for number in numbers))


def _phases(trace: Trace, replay: Replay, context_bytes: int) -> list[PhasePeak]:
    """The peak of each phase that has events, at the event before it began too: what is held then counts."""
    if not len(trace):
        return []
    begins, phases = _stretches(trace)
    levels = (replay.requested_bytes, replay.allocated_bytes, replay.reserved_bytes)
    # Of every stretch of one phase, with the event before it.
    before = np.maximum(begins - 1, 0)
    most = [np.maximum(np.maximum.reduceat(level, begins), level[before]).tolist() for level in levels]
    by_phase: dict[int, list[tuple[int, int, int]]] = {}
    for number, of_stretch in zip(phases, zip(*most, strict=True), strict=True):
        by_phase.setdefault(number, []).append(of_stretch)
    peaks = []
    for number, of_stretches in by_phase.items():
        requested, allocated, reserved = map(max, zip(*of_stretches, strict=True))
        peaks.append(
            PhasePeak(
                trace.phases[number].iteration,
                trace.phases[number].name,
                Peak(requested, allocated, reserved, reserved + context_bytes),
            )
        )
    return peaks


def _stretches(trace: Trace) -> tuple[npt.NDArray[np.int64], list[int]]:
    """The events with which a stretch of one phase begins, and its phase."""
    if "stretches" not in trace.kept_of_events:
        begins = np.flatnonzero(np.diff(trace.phase_of_event, prepend=-1))
        trace.kept_of_events["stretches"] = begins, trace.phase_of_event[begins].tolist()
    found: tuple[npt.NDArray[np.int64], list[int]] = trace.kept_of_events["stretches"]
    return found


def _largest(trace: Trace, position: int, top: int) -> tuple[LiveStorage, ...]:
    """The ``top`` largest storages on the device that live at an event of the trace, with who made them."""
    live = _live_on_device(trace, position)
    largest = live[np.lexsort((live, -trace.columns.bytes[live]))[:top]]
    found = []
    for index in largest.tolist():
        storage, operator = trace.storages[index], _maker(trace, index)
        phase = str(trace.phases[operator.phase])
        found.append(
            LiveStorage(
                storage.bytes,
                storage.category.name,
                storage.label,
                operator.name,
                operator.module,
                operator.source,
                phase,
            )
        )
    return tuple(found)


def _use(replay: Replay, card: Device, context: Sequence[Figure], loads: Loads) -> CardUse:
    return CardUse(
        process_bytes=replay.peak_reserved_bytes + card.context_bytes,
        others_bytes=card.others_bytes,
        driver_bytes=card.driver_bytes,
        context=tuple(context),
        loads=loads,
    )


def fits_card(runs: Runs, card: Device, refusals: Refusals | None = None) -> bool:
    """True if a run fits ``card``: as it is, or with cached segments given back. A program that gave up does not."""
    if refusals is not None and not refusals.went_on:
        return False
    if runs.limited is not None:
        return runs.limited.out_of_memory is None
    return runs.main.peak_reserved_bytes + card.taken_bytes <= card.capacity_bytes


def _fit(trace: Trace, runs: Runs, card: Device, refusals: Refusals | None) -> Fit:
    """Whether a run fits the card, and with how much to spare. If it succeeds only because the cache is flushed, its
    peak within the card is the one that counts."""
    limited, unlimited = runs.limited, runs.main.peak_reserved_bytes + card.context_bytes
    room = card.capacity_bytes - card.others_bytes
    fits, flushed = fits_card(runs, card, refusals), limited is not None and unlimited > room
    failed_at = -1 if fits else _failed_at(trace, runs)
    held = runs.on_card.peak_reserved_bytes + card.context_bytes
    if refusals is not None and not fits:
        held = max(held, refusals.needed_bytes + card.context_bytes)
    return Fit(
        card.name,
        card.capacity_bytes,
        held,
        room - held,
        fits,
        needs_cache_flush=fits and flushed,
        failed_at=None if fits or failed_at < 0 else _moment(trace, failed_at),
        others_bytes=card.others_bytes,
        unlimited_bytes=unlimited,
        refusals=refusals,
    )


def _failed_at(trace: Trace, runs: Runs) -> int:
    """The event at which memory runs out on the card, or the last request that a program was refused there; -1 if it is
    not known."""
    if runs.limited is not None and runs.limited.out_of_memory is not None:
        return runs.limited.out_of_memory.event
    return int(max((trace.kinds == EventKind.REFUSED).nonzero()[0], default=-1))
