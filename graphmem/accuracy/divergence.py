"""Where a predicted run and a measured one part: their allocations lined up in order, and what lies between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphmem.accuracy.align import Match, align
from graphmem.base.documents import fits, read_gzipped_json
from graphmem.errors import TraceError
from graphmem.trace import EventKind, Place, Trace

#: Allocations shown of each side of a difference.
_SHOWN = 8


@dataclass(frozen=True)
class Changes:
    """The allocations (positive bytes) and frees (negative) that a device allocator sees, and the event behind each."""

    sizes: tuple[int, ...]
    events: tuple[int, ...]

    def allocations(self) -> Changes:
        """The allocations alone."""
        kept = [(size, event) for size, event in zip(self.sizes, self.events, strict=True) if size > 0]
        return Changes(tuple(size for size, _ in kept), tuple(event for _, event in kept))


def changes_of(trace: Trace) -> Changes:
    """The changes of a predicted trace."""
    signs = {int(EventKind.ALLOC): 1, int(EventKind.FREE): -1}
    sizes = [storage.bytes if storage.place is Place.DEVICE else 0 for storage in trace.storages]
    rows = [
        (signs[kind] * sizes[subject], event)
        for event, (kind, subject) in enumerate(zip(trace.kinds.tolist(), trace.subjects.tolist(), strict=True))
        if kind in signs and sizes[subject]
    ]
    return Changes(tuple(size for size, _ in rows), tuple(event for _, event in rows))


def measured_changes(path: Path) -> Changes:
    """The changes of a trace that ``graphmem measure --traces`` wrote. Raises :class:`TraceError`."""
    signs = {"alloc": 1, "free_requested": -1}
    try:
        events = read_gzipped_json(path)["events"]
        rows = [(signs[action] * size, at) for at, (action, _, size, _) in enumerate(events) if action in signs]
        if not all(fits(size, int) for size, _ in rows):
            raise ValueError("a size is no whole number of 64 bits")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a measured trace: {error}") from None
    return Changes(tuple(size for size, _ in rows), tuple(event for _, event in rows))


def describe_divergence(trace: Trace, measured: Changes, number: int) -> Iterator[str]:
    """Lines for people: how much of both runs matches in order, and the first ``number`` differences with the operator,
    module and source line on the predicted side."""
    ours, theirs = changes_of(trace).allocations(), measured.allocations()
    match = align(ours.sizes, theirs.sizes)
    yield f"{len(ours.sizes):,} allocations predicted, {len(theirs.sizes):,} measured, {match.share:.2%} match in order"
    for start_a, end_a, start_b, end_b in _first(match, number):
        yield ""
        yield f"predicted allocation {start_a:,}, measured allocation {start_b:,}:"
        for index in range(start_a, min(end_a, start_a + _SHOWN)):
            yield f"  predicted {ours.sizes[index]:>15,} B  {_place(trace, ours.events[index])}"
        if end_a - start_a > _SHOWN:
            yield f"  predicted {end_a - start_a - _SHOWN:,} more"
        yield f"  measured  {_listed(theirs.sizes[start_b:end_b])}"
        if start_a > 0:
            yield f"  the last that both have: {_place(trace, ours.events[start_a - 1])}"


def _first(match: Match, number: int) -> list[tuple[int, int, int, int]]:
    return match.differences()[:number]


def _place(trace: Trace, event: int) -> str:
    operator = trace.operators[int(trace.event_operators[event])]
    label = trace.storages[int(trace.subjects[event])].label
    parts = (operator.name, label and f"[{label}]", operator.module, str(trace.phases[operator.phase]), operator.source)
    return "  ".join(part for part in parts if part)


def _listed(sizes: Sequence[int]) -> str:
    shown = ", ".join(f"{size:,} B" for size in sizes[:_SHOWN])
    more = f" and {len(sizes) - _SHOWN:,} more" if len(sizes) > _SHOWN else ""
    return shown + more if sizes else "nothing there"
