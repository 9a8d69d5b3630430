"""The Trace: the ordered storage allocations and frees of one run. The narrow waist of graphmem.

Producers (a captured PyTorch step, a planned ONNX graph, a recorded GPU snapshot) know frameworks and no allocator;
consumers (allocators, reports) know bytes and no framework. All sizes are *requested* bytes: rounding is an
allocator's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmem.errors import TraceError

SCHEMA = "graphmem.trace/1"
MAX_STORAGE_BYTES = 2**63 - 1


class Category(IntEnum):
    """What a storage is for. The order is the order of every breakdown."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    ACTIVATION = 4
    INPUT = 5
    TEMPORARY = 6
    WORKSPACE = 7
    COMMUNICATION = 8
    UNKNOWN = 9  # a recorded run that does not say


class Place(IntEnum):
    """Where a storage lives. Only ``DEVICE`` storages reach a device allocator.

    ``MANAGED`` memory comes from the driver, outside every allocator, and moves between host and device by pages.
    """

    DEVICE = 0
    HOST = 1
    PINNED = 2
    MANAGED = 3


class EventKind(IntEnum):
    """What an event does to its subject (a storage index; unused for the last two)."""

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2
    SYNCHRONIZE = 3
    EMPTY_CACHE = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run. ``iteration`` 0 is everything before the first iteration."""

    iteration: int
    name: str

    def __str__(self) -> str:
        return self.name if self.iteration == 0 else f"iteration {self.iteration} {self.name}"


@dataclass(frozen=True, slots=True)
class Operator:
    """What caused events: ``name`` (``aten.mm``), ``module`` path, index of its ``phase``, ``source`` line."""

    name: str
    module: str = ""
    phase: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: requested ``bytes``, purpose, stream of allocation, place, and a ``label`` for people."""

    bytes: int
    category: Category = Category.UNKNOWN
    stream: int = 0
    place: Place = Place.DEVICE
    label: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """One row of a trace: ``subject`` is a storage index, ``stream`` is used by ``RECORD_STREAM`` only."""

    kind: EventKind
    subject: int
    operator: int
    stream: int = 0


@dataclass(frozen=True)
class Trace:
    """The whole run. Event columns are parallel arrays of one length (int64); a storage is allocated exactly once.

    ``source`` says where the trace comes from; ``notes`` are free ``key: text`` remarks of the producer.
    """

    source: str
    phases: tuple[Phase, ...]
    operators: tuple[Operator, ...]
    storages: tuple[Storage, ...]
    kinds: npt.NDArray[np.int64]
    subjects: npt.NDArray[np.int64]
    event_operators: npt.NDArray[np.int64]
    event_streams: npt.NDArray[np.int64]
    notes: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.kinds)

    def events(self) -> Iterable[Event]:
        """The events as values, in order (convenient, not fast)."""
        columns = (self.kinds, self.subjects, self.event_operators, self.event_streams)
        for kind, subject, operator, stream in zip(*(c.tolist() for c in columns), strict=True):
            yield Event(EventKind(kind), subject, operator, stream)

    def live_at(self, position: int) -> list[int]:
        """Indices of the storages alive after event ``position``, in order of allocation."""
        head = slice(0, position + 1)
        freed = set(self.subjects[head][self.kinds[head] == EventKind.FREE].tolist())
        allocated = self.subjects[head][self.kinds[head] == EventKind.ALLOC].tolist()
        return [index for index in allocated if index not in freed]


@dataclass
class TraceBuilder:
    """Collects events and builds a :class:`Trace`; lives inside one producer and dies with it."""

    source: str
    phases: list[Phase] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)
    categories: list[Category] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def phase(self, iteration: int, name: str) -> int:
        """Index of the phase, added if it is new."""
        wanted = Phase(iteration, name)
        if wanted not in self.phases:
            self.phases.append(wanted)
        return self.phases.index(wanted)

    def operator(self, name: str, module: str = "", phase: int = 0, source: str = "") -> int:
        """Add an operator; returns its index."""
        self.operators.append(Operator(name, module, phase, source))
        return len(self.operators) - 1

    def alloc(
        self,
        size: int,
        operator: int,
        category: Category = Category.TEMPORARY,
        *,
        stream: int = 0,
        place: Place = Place.DEVICE,
        label: str = "",
    ) -> int:
        """Record the birth of a storage of ``size`` requested bytes; returns its index."""
        index = len(self.storage_bytes)
        self.storage_bytes.append(size)
        self.categories.append(category)
        self.streams.append(stream)
        self.places.append(place)
        self.labels.append(label)
        self.rows.append((0, index, operator, 0))
        return index

    def free(self, storage: int, operator: int) -> None:
        """Record the death of a storage."""
        self.rows.append((1, storage, operator, 0))

    def event(self, kind: EventKind, operator: int, subject: int = -1, stream: int = 0) -> None:
        """Record a stream or cache event."""
        self.rows.append((int(kind), subject, operator, stream))

    def build(self) -> Trace:
        """The finished trace, validated. Raises :class:`TraceError`."""
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 4)
        storages = zip(self.storage_bytes, self.categories, self.streams, self.places, self.labels, strict=True)
        trace = Trace(
            source=self.source,
            phases=tuple(self.phases) or (Phase(0, "run"),),
            operators=tuple(self.operators),
            storages=tuple(Storage(*row) for row in storages),
            kinds=columns[:, 0].copy(),
            subjects=columns[:, 1].copy(),
            event_operators=columns[:, 2].copy(),
            event_streams=columns[:, 3].copy(),
            notes=tuple(self.notes),
        )
        validate(trace)
        return trace


def validate(trace: Trace) -> None:
    """Check every rule of the format; raises :class:`TraceError` naming the first event or storage that breaks one."""
    for index, storage in enumerate(trace.storages):
        if not 0 <= storage.bytes <= MAX_STORAGE_BYTES:
            raise TraceError(f"storage {index} has {storage.bytes} bytes; accepted: 0 to {MAX_STORAGE_BYTES}")
    for index, operator in enumerate(trace.operators):
        if not 0 <= operator.phase < len(trace.phases):
            raise TraceError(f"operator {index} ({operator.name}) names phase {operator.phase}, which does not exist")
    state = [0] * len(trace.storages)  # 0 not yet allocated, 1 alive, 2 freed
    for position, event in enumerate(trace.events()):
        if not 0 <= event.operator < len(trace.operators):
            raise TraceError(f"event {position} names operator {event.operator}, which does not exist")
        if event.kind in (EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE):
            continue
        if not 0 <= event.subject < len(state):
            raise TraceError(f"event {position} names storage {event.subject}, which does not exist")
        expected = 0 if event.kind == EventKind.ALLOC else 1
        if state[event.subject] != expected:
            problem = ("is not allocated yet", "is already alive", "has been freed")[state[event.subject]]
            raise TraceError(f"event {position} ({event.kind.name}): storage {event.subject} {problem}")
        if event.kind == EventKind.ALLOC:
            state[event.subject] = 1
        elif event.kind == EventKind.FREE:
            state[event.subject] = 2


def to_json(trace: Trace) -> str:
    """The trace as one JSON document (schema ``graphmem.trace/1``; columns of equal length, bytes as integers)."""
    document = {
        "schema": SCHEMA,
        "source": trace.source,
        "notes": dict(trace.notes),
        "phases": [[phase.iteration, phase.name] for phase in trace.phases],
        "operators": [[o.name, o.module, o.phase, o.source] for o in trace.operators],
        "storages": [[s.bytes, s.category.name, s.stream, s.place.name, s.label] for s in trace.storages],
        "events": {
            "kind": trace.kinds.tolist(),
            "subject": trace.subjects.tolist(),
            "operator": trace.event_operators.tolist(),
            "stream": trace.event_streams.tolist(),
        },
    }
    return json.dumps(document, separators=(",", ":"))


def from_json(text: str) -> Trace:
    """Read what :func:`to_json` wrote. Raises :class:`TraceError` for anything else."""
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise TraceError(f"not a graphmem trace: the key 'schema' must be {SCHEMA!r}")
    try:
        trace = _decode(document)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise TraceError(f"malformed trace: {type(error).__name__}: {error}") from None
    validate(trace)
    return trace


def _decode(document: dict[str, Any]) -> Trace:
    columns = document["events"]
    arrays = {name: _column(columns[name]) for name in ("kind", "subject", "operator", "stream")}
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("the event columns differ in length")
    for kind in set(arrays["kind"].tolist()):
        EventKind(kind)
    return Trace(
        source=str(document["source"]),
        phases=tuple(Phase(int(iteration), str(name)) for iteration, name in document["phases"]),
        operators=tuple(Operator(str(n), str(m), int(p), str(s)) for n, m, p, s in document["operators"]),
        storages=tuple(
            Storage(int(size), Category[category], int(stream), Place[place], str(label))
            for size, category, stream, place, label in document["storages"]
        ),
        kinds=arrays["kind"],
        subjects=arrays["subject"],
        event_operators=arrays["operator"],
        event_streams=arrays["stream"],
        notes=tuple((str(key), str(value)) for key, value in document["notes"].items()),
    )


def _column(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    if not all(type(value) is int for value in values):
        raise ValueError("event columns hold integers only")
    return np.array(values, dtype=np.int64)
