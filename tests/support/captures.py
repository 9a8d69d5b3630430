"""Small captures for tests, and questions to ask of their traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from graphmem.capture.session.session import Session, capture
from graphmem.devices import Device, described_device
from graphmem.trace import Category, EventKind, Phase, Place, Trace
from graphmem.training.processes import Processes
from graphmem.training.program import Steps
from graphmem.units import GIB

H100 = described_device("H100", (9, 0), 80 * GIB, 132, 2048)
TORCH_VERSION = (2, 13)


@dataclass(frozen=True)
class Born:
    """A storage with everything the trace says of its birth; ``freed`` is the event it died at, None if it stayed."""

    index: int
    bytes: int
    category: Category
    place: Place
    label: str
    operator: str
    module: str
    phase: Phase
    source: str
    event: int
    freed: int | None


def record(
    step: Callable[[], Any] | Callable[[Session], Any],
    device: Device = H100,
    world_size: int | None = None,
    leave_after: int | None = None,
) -> Trace:
    """The trace of a step function, which may take the :class:`Session`, and is one of ``world_size`` processes.

    Its loops end after ``leave_after`` optimizer steps, if given.
    """

    def run(session: Session) -> None:
        either: Callable[..., Any] = step
        if step.__code__.co_argcount:
            either(session)
        else:
            either()

    processes = None if world_size is None else Processes(world_size)
    return capture(
        run,
        source="test",
        device=device,
        torch_version=TORCH_VERSION,
        processes=processes,
        leave_after=None if leave_after is None else Steps(leave_after, 0),
    ).trace


def births(trace: Trace, place: Place | None = Place.DEVICE) -> list[Born]:
    """Every storage in order of birth; those of one ``place`` unless it is None."""
    freed = {
        subject: event
        for event, (kind, subject) in enumerate(zip(trace.kinds.tolist(), trace.subjects.tolist(), strict=True))
        if kind == EventKind.FREE
    }
    return [born for born in _births(trace, freed) if place is None or born.place is place]


def _births(trace: Trace, freed: dict[int, int]) -> Iterator[Born]:
    for event, row in enumerate(trace.events()):
        if row.kind is not EventKind.ALLOC:
            continue
        storage, operator = trace.storages[row.subject], trace.operators[row.operator]
        yield Born(
            index=row.subject,
            bytes=storage.bytes,
            category=storage.category,
            place=storage.place,
            label=storage.label,
            operator=operator.name,
            module=operator.module,
            phase=trace.phases[operator.phase],
            source=operator.source,
            event=event,
            freed=freed.get(row.subject),
        )


def of(trace: Trace, category: Category) -> list[Born]:
    """Device storages of one category."""
    return [born for born in births(trace) if born.category is category]


def sizes(born: list[Born]) -> list[int]:
    """Their bytes, in order of birth."""
    return [one.bytes for one in born]


def live_bytes(trace: Trace, event: int, place: Place = Place.DEVICE) -> int:
    """Requested bytes alive after an event."""
    storages = (trace.storages[index] for index in trace.live_at(event))
    return sum(storage.bytes for storage in storages if storage.place is place)


def lasts(trace: Trace, born: Born) -> bool:
    """Whether a storage is still alive when the last one is born."""
    return born.freed is None or born.freed > births(trace, None)[-1].event


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    """Every event with all that a trace says of it, to compare one trace with another."""
    found = []
    for event in trace.events():
        storage = trace.storages[event.subject] if event.kind in (EventKind.ALLOC, EventKind.FREE) else None
        operator = trace.operators[event.operator]
        found.append((event.kind, event.subject, storage, operator.name, operator.module, operator.source))
    return found
