"""The Trace: the ordered storage allocations and frees of one run. The narrow waist of graphmem.

Producers (a captured PyTorch step, a planned ONNX graph, a recorded GPU snapshot) know frameworks and no allocator;
consumers (allocators, reports) know bytes and no framework. All sizes are *requested* bytes: rounding is an
allocator's business.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from graphmem.base.documents import parse_json, shown
from graphmem.base.records import dataclass
from graphmem.errors import TraceError

SCHEMA = "graphmem.trace/1"
#: The same with private pools: a table of pools, and the pool of every storage. Written only where there are any.
SCHEMA_WITH_POOLS = "graphmem.trace/2"
#: The same with what a program did about its limit: requests that were refused, and fractions of the card's memory that
#: it set. Written only where there are any, with the pools if there are any.
SCHEMA_WITH_LIMITS = "graphmem.trace/3"
#: The same with calls that can do with less: a table of their plans. Written only where there are any, with the rest of
#: the above if there is any.
SCHEMA_WITH_PLANS = "graphmem.trace/4"
#: The same with settings of the allocator that a program changed while it ran: a table of their texts. Written only
#: where there are any, with the rest of the above if there is any.
SCHEMA_WITH_SETTINGS = "graphmem.trace/5"
MAX_STORAGE_BYTES = 2**63 - 1


class Category(IntEnum):
    """The purpose of a storage. The order is the order of every breakdown."""

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
    HELD = 10  # what a whole program keeps from step to step: copies for averaging, buffers of its own
    KV_CACHE = 11  # keys and values, or states, of tokens that have been read


class Place(IntEnum):
    """Where a storage lives. Only ``DEVICE`` storages reach a device allocator.

    ``MANAGED`` memory comes from the driver, outside every allocator, and moves between host and device by pages.
    """

    DEVICE = 0
    HOST = 1
    PINNED = 2
    MANAGED = 3


class EventKind(IntEnum):
    """The kind of an event, by its effect on its subject: a storage index, from ``CREATE_POOL`` to ``EMPTY_POOL`` a
    pool's number; the others have none.

    A private pool exists while it is held: ``CREATE_POOL`` and ``BEGIN_POOL`` hold it once more, ``RELEASE_POOL`` once
    less. Between ``BEGIN_POOL`` and ``END_POOL`` requests are routed to it, though not all need be: each storage has a
    place. Between ``ENTER_CAPTURE`` and ``LEAVE_CAPTURE`` the current stream is captured into a CUDA graph.

    ``SYNCHRONIZE`` waits for all streams; with a subject, for its stream, but for what was given back last: so many
    blocks that the stream used. ``REFUSED`` is a request that was out of memory, and that the program went on without:
    its storage never lives. From ``MEMORY_FRACTION`` on only a part of the card's memory may be reserved; its subject
    is a row of the trace's table of fractions. From ``ALLOCATOR_SETTINGS`` on PyTorch's allocator follows other
    settings (``torch._C._accelerator_setAllocatorSettings``); its subject is a row of the table of their texts.
    """

    ALLOC = 0
    FREE = 1
    RECORD_STREAM = 2
    SYNCHRONIZE = 3
    EMPTY_CACHE = 4
    CREATE_POOL = 5
    BEGIN_POOL = 6
    END_POOL = 7
    RELEASE_POOL = 8
    EMPTY_POOL = 9
    ENTER_CAPTURE = 10
    LEAVE_CAPTURE = 11
    REFUSED = 12
    MEMORY_FRACTION = 13
    ALLOCATOR_SETTINGS = 14


#: Kinds whose subject is a storage.
OF_STORAGES = (EventKind.ALLOC, EventKind.FREE, EventKind.RECORD_STREAM, EventKind.REFUSED)
_OF_POOLS = (
    EventKind.CREATE_POOL,
    EventKind.BEGIN_POOL,
    EventKind.END_POOL,
    EventKind.RELEASE_POOL,
    EventKind.EMPTY_POOL,
)


#: Phases of a program that are no part of a training step.
BESIDE = ("evaluate", "generate", "save", "load")


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run. ``iteration`` 0 is everything before the first iteration."""

    iteration: int
    name: str

    def __str__(self) -> str:
        if self.iteration == 0:
            return self.name
        if self.name in BESIDE:
            return f"{self.name} after iteration {self.iteration}"
        return f"iteration {self.iteration} {self.name}"


@dataclass(frozen=True, slots=True)
class Operator:
    """The cause of events: ``name`` (``aten.mm``), ``module`` path, index of its ``phase``, ``source`` line."""

    name: str
    module: str = ""
    phase: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A private pool: its purpose, and the options of ``torch.cuda.MemPool``."""

    label: str
    use_on_oom: bool = False
    no_split: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """One storage: requested ``bytes``, purpose, stream of allocation, place, and a ``label`` for people.

    ``pool`` is the number of the private pool it lies in, from 1 on; 0 is the default one.
    """

    bytes: int
    category: Category = Category.UNKNOWN
    stream: int = 0
    place: Place = Place.DEVICE
    label: str = ""
    pool: int = 0


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans that a library's call can use: the ``bytes`` of each one's workspace, plan after plan in the order of
    trial, and the ``storages`` of the calls of this shape, in the order of their births.

    A request that is refused is made again for the next plan, and the calls that follow begin with the one that had its
    memory: PyTorch keeps it, and tries all anew where it is refused later (``run_single_conv``,
    ATen/native/cudnn/Conv_v8.cpp).
    """

    storages: tuple[int, ...]
    bytes: tuple[int, ...]


class Calls:
    """:class:`Plans` while they are played or recorded; ``chosen`` is the number of the plan that calls begin with."""

    __slots__ = ("bytes", "chosen", "storages")

    def __init__(self, bytes: tuple[int, ...], storages: Sequence[int] = ()) -> None:
        self.bytes, self.storages, self.chosen = bytes, list(storages), 0

    def settle(self, plan: int, storage: int, sizes: list[int]) -> None:
        """From this storage on the calls take this plan: their rows in ``sizes`` say so."""
        self.chosen = plan
        for index in self.storages:
            if index >= storage:
                sizes[index] = self.bytes[plan]


@dataclass(frozen=True, slots=True)
class Event:
    """One row of a trace: ``subject`` is a storage or a pool, ``stream`` is used by ``RECORD_STREAM`` only."""

    kind: EventKind
    subject: int
    operator: int
    stream: int = 0


class ResizedStorages(Sequence[Storage]):
    """Storages like others, with other bytes and some other labels, each made when it is asked for: who replays a trace
    asks for few."""

    def __init__(self, like: Sequence[Storage], sizes: npt.NDArray[np.int64], labels: Mapping[int, str]) -> None:
        self._like, self._sizes, self._labels = like, sizes, labels

    def __len__(self) -> int:
        return len(self._like)

    @overload
    def __getitem__(self, index: int) -> Storage: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Storage, ...]: ...

    def __getitem__(self, index: int | slice) -> Storage | tuple[Storage, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(len(self))[index])
        index = range(len(self))[index]
        like = self._like[index]
        label = self._labels.get(index, like.label)
        return Storage(int(self._sizes[index]), like.category, like.stream, like.place, label, like.pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, ResizedStorages)) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class Columns(NamedTuple):
    """The table of storages as arrays of whole numbers, a row a storage."""

    bytes: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int64]
    streams: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    pools: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Trace:
    """The whole run. Event columns are parallel arrays of one length (int64); a storage is allocated exactly once.

    ``source``: the origin of the trace; ``notes`` are free ``key: text`` remarks of the producer. ``pools`` are the
    private pools; the first is number 1. ``fractions`` are parts of the card's memory, 0 to 1. ``plans`` are of calls
    that can do with less than their storages have. ``settings`` are whole texts of PyTorch's allocator settings.
    ``predicted_plans``: of how many shapes of convolutions and recurrent networks cuDNN's plan was predicted, not
    asked. ``garbage_bytes``: the most that may wait on the card until Python looks for cycles of garbage.
    """

    source: str
    phases: tuple[Phase, ...]
    operators: tuple[Operator, ...]
    storages: Sequence[Storage]
    kinds: npt.NDArray[np.int64]
    subjects: npt.NDArray[np.int64]
    event_operators: npt.NDArray[np.int64]
    event_streams: npt.NDArray[np.int64]
    notes: tuple[tuple[str, str], ...] = ()
    pools: tuple[MemoryPool, ...] = ()
    fractions: tuple[float, ...] = ()
    plans: tuple[Plans, ...] = ()
    settings: tuple[str, ...] = ()
    predicted_plans: int = 0
    garbage_bytes: int = 0

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def refused(self) -> tuple[int, ...]:
        """Indices of the storages that were asked for in vain, in order."""
        return tuple(self.subjects[self.kinds == EventKind.REFUSED].tolist())

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Kind, subject, operator and stream of every event, in order."""
        columns = (self.kinds, self.subjects, self.event_operators, self.event_streams)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def events(self) -> Iterable[Event]:
        """The events as values, in order (convenient, not fast)."""
        for kind, subject, operator, stream in self.rows():
            yield Event(EventKind(kind), subject, operator, stream)

    # What many replays of one trace ask for is kept with it.

    @cached_property
    def columns(self) -> Columns:
        """The storages by their columns, but for labels."""
        rows = [(one.bytes, one.category, one.stream, one.place, one.pool) for one in self.storages]
        return Columns(*np.array(rows, dtype=np.int64).reshape(-1, len(Columns._fields)).T.copy())

    def resized(self, sizes: npt.NDArray[np.int64], labels: Mapping[int, str], **changed: Any) -> Trace:
        """The same events of storages with other bytes, those of ``labels`` with other labels; other fields ``changed``
        do not touch events. What does not depend on these is shared."""
        made = replace(self, storages=ResizedStorages(self.storages, sizes, labels), **changed)
        shared = {name: getattr(self, name) for name in _OF_EVENTS}
        if not labels:
            shared["labelled"] = self.labelled
        vars(made).update(shared, columns=self.columns._replace(bytes=sizes))
        return made

    @cached_property
    def labelled(self) -> dict[str, tuple[int, ...]]:
        """Indices of the storages by their labels, of those that have one."""
        found: dict[str, list[int]] = {}
        for index, storage in enumerate(self.storages):
            if storage.label:
                found.setdefault(storage.label, []).append(index)
        return {label: tuple(indices) for label, indices in found.items()}

    @cached_property
    def operator_names(self) -> frozenset[str]:
        """The names of all operators."""
        return frozenset(operator.name for operator in self.operators)

    @cached_property
    def allocations(self) -> npt.NDArray[np.int64]:
        """Positions of the events that allocate, in order."""
        return np.flatnonzero(self.kinds == EventKind.ALLOC)

    @cached_property
    def birth_of(self) -> npt.NDArray[np.int64]:
        """The position of the event that allocates each storage; past the last event where none does."""
        return self._position_of(self.allocations)

    @cached_property
    def death_of(self) -> npt.NDArray[np.int64]:
        """The position of the event that frees each storage; past the last event where none does."""
        return self._position_of(np.flatnonzero(self.kinds == EventKind.FREE))

    def _position_of(self, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        positions = np.full(len(self.storages), len(self), dtype=np.int64)
        positions[self.subjects[events]] = events
        return positions

    @cached_property
    def phase_of_event(self) -> npt.NDArray[np.int64]:
        """The index of the phase of every event."""
        phases = np.array([operator.phase for operator in self.operators], dtype=np.int64)
        return phases[self.event_operators]

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What was made of this trace, by all else that it depends on, for those who ask for it many times."""
        return {}

    @cached_property
    def kept_of_events(self) -> dict[Hashable, Any]:
        """The same of what was made of its events and the places of its storages, whatever their sizes."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def births(self) -> dict[int, int]:
        """Storages, and the operators that made them, as indices."""
        born = self.allocations
        return dict(zip(self.subjects[born].tolist(), self.event_operators[born].tolist(), strict=True))

    def until(self, position: int) -> Trace:
        """The trace as far as event ``position``."""
        columns = ("kinds", "subjects", "event_operators", "event_streams")
        return replace(self, **{name: getattr(self, name)[: position + 1] for name in columns})

    def live_at(self, position: int) -> list[int]:
        """Indices of the storages alive after event ``position``, in order of allocation."""
        alive: list[int] = self.alive_at(position).tolist()
        return alive

    def alive_at(self, position: int) -> npt.NDArray[np.int64]:
        """The same as an array."""
        until = np.searchsorted(self.allocations, position, side="right")
        allocated = self.subjects[self.allocations[:until]]
        alive: npt.NDArray[np.int64] = allocated[self.death_of[allocated] > position]
        return alive


#: What a trace's events and operators decide, whatever the sizes of its storages.
_OF_EVENTS = ("operator_names", "allocations", "birth_of", "death_of", "phase_of_event", "refused", "kept_of_events")


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
    storage_pools: list[int] = field(default_factory=list)
    pools: list[MemoryPool] = field(default_factory=list)
    fractions: list[float] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    #: Calls that can do with less, by the storage of each.
    calls: dict[int, Calls] = field(default_factory=dict)
    _shapes: dict[Any, Calls] = field(default_factory=dict)
    predicted_plans: int = 0
    garbage_bytes: int = 0

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
        pool: int = 0,
    ) -> int:
        """Record the birth of a storage of ``size`` requested bytes; returns its index."""
        index = len(self.storage_bytes)
        self.storage_bytes.append(size)
        self.categories.append(category)
        self.streams.append(stream)
        self.places.append(place)
        self.labels.append(label)
        self.storage_pools.append(pool)
        self.rows.append((0, index, operator, 0))
        return index

    def alloc_for_call(self, shape: object, plans: tuple[int, ...], operator: int, **options: Any) -> int:
        """Record the workspace of a call that has these ``plans`` (:class:`Plans`), of two or more sizes. Calls of one
        ``shape`` share the plan that had its memory."""
        calls = self._shapes.setdefault(shape, Calls(plans))
        index = self.alloc(calls.bytes[calls.chosen], operator, **options)
        calls.storages.append(index)
        self.calls[index] = calls
        return index

    def alloc_again(self, index: int, operator: int) -> int:
        """Record the birth of another storage like storage ``index``, of the same call if it is of one."""
        made = self.alloc(
            self.storage_bytes[index], operator, self.categories[index], stream=self.streams[index],
            place=self.places[index], label=self.labels[index], pool=self.storage_pools[index],
        )  # fmt: skip
        calls = self.calls.get(index)
        if calls is not None:
            self.storage_bytes[made] = calls.bytes[calls.chosen]
            calls.storages.append(made)
            self.calls[made] = calls
        return made

    def pool(self, label: str, *, use_on_oom: bool = False, no_split: bool = False) -> int:
        """Add a private pool; returns its number. Nothing holds it yet."""
        self.pools.append(MemoryPool(label, use_on_oom, no_split))
        return len(self.pools)

    def free(self, storage: int, operator: int) -> None:
        """Record the death of a storage."""
        self.rows.append((1, storage, operator, 0))

    def refuse(self, storage: int) -> None:
        """The birth of a storage, among the last events, was refused instead."""
        position = len(self.rows) - 1
        while self.rows[position][:2] != (int(EventKind.ALLOC), storage):  # another may have died meanwhile
            position -= 1
        self.rows[position] = (int(EventKind.REFUSED), *self.rows[position][1:])

    def memory_fraction(self, fraction: float, operator: int) -> None:
        """Record that no more than this part of the card's memory may be reserved."""
        self.fractions.append(fraction)
        self.event(EventKind.MEMORY_FRACTION, operator, len(self.fractions) - 1)

    def allocator_settings(self, text: str, operator: int) -> None:
        """Record that PyTorch's allocator follows these settings from now on, and no others."""
        self.settings.append(text)
        self.event(EventKind.ALLOCATOR_SETTINGS, operator, len(self.settings) - 1)

    def event(self, kind: EventKind, operator: int, subject: int = -1, stream: int = 0) -> None:
        """Record a stream or cache event."""
        self.rows.append((int(kind), subject, operator, stream))

    def columns(self) -> npt.NDArray[np.int64]:
        """The rows of events as an array of four columns: kind, subject, operator, stream."""
        flat = np.fromiter(itertools.chain.from_iterable(self.rows), np.int64, 4 * len(self.rows))
        return flat.reshape(-1, 4)

    def build(self) -> Trace:
        """The finished trace, validated. Raises :class:`TraceError`."""
        columns = self.columns()
        for calls in self._shapes.values():
            calls.settle(0, 0, self.storage_bytes)  # what became of them on one card is not the trace's
        rows = (self.storage_bytes, self.categories, self.streams, self.places, self.labels, self.storage_pools)
        storages = zip(*rows, strict=True)
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
            pools=tuple(self.pools),
            fractions=tuple(self.fractions),
            plans=tuple(Plans(tuple(calls.storages), calls.bytes) for calls in self._shapes.values()),
            settings=tuple(self.settings),
            predicted_plans=self.predicted_plans,
            garbage_bytes=self.garbage_bytes,
        )
        validate(trace)
        return trace


def same(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same events and storages, with the same operators."""
    columns = ("kinds", "subjects", "event_operators", "event_streams")
    tables = (
        "storages",
        "operators",
        "phases",
        "pools",
        "fractions",
        "plans",
        "settings",
        "predicted_plans",
        "garbage_bytes",
    )
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns) and all(
        getattr(one, name) == getattr(other, name) for name in tables
    )


#: What has become of a storage, in words.
_STATES = ("is not allocated yet", "is already alive", "has been freed", "was refused")


def validate(trace: Trace) -> None:
    """Check every rule of the format; raises :class:`TraceError` naming the first event or storage that breaks one."""
    _check_storages(trace)
    for index, operator in enumerate(trace.operators):
        if not 0 <= operator.phase < len(trace.phases):
            raise TraceError(f"operator {index} ({operator.name}) names phase {operator.phase}, which does not exist")
    for fraction in trace.fractions:
        if not 0.0 <= fraction <= 1.0:
            raise TraceError(f"a memory fraction is {fraction}; accepted: 0 to 1")
    for name in ("predicted_plans", "garbage_bytes"):
        if not 0 <= (number := getattr(trace, name)) <= MAX_STORAGE_BYTES:
            raise TraceError(f"{name} is {number}; accepted: 0 to {MAX_STORAGE_BYTES}")
    _check_plans(trace)
    if not _events_hold(trace):
        _name_first_broken(trace)


def _check_storages(trace: Trace) -> None:
    for index, storage in enumerate(trace.storages):
        if storage.bytes > MAX_STORAGE_BYTES:
            what = f" ({storage.label})" if storage.label else ""
            raise TraceError(f"storage {index}{what} has more than 2^63 - 1 bytes, more than any memory")
        if storage.bytes < 0:
            raise TraceError(f"storage {index} has {storage.bytes} bytes; accepted: 0 to {MAX_STORAGE_BYTES}")
        if storage.stream < 0:
            raise TraceError(f"storage {index} names the stream {storage.stream}; accepted: 0 or more")
        if not 0 <= storage.pool <= len(trace.pools):
            raise TraceError(f"storage {index} names pool {storage.pool}, which does not exist")


def _check_plans(trace: Trace) -> None:
    seen: set[int] = set()
    for number, plans in enumerate(trace.plans):
        sizes = plans.bytes
        if len(sizes) < 2 or not all(0 <= size <= MAX_STORAGE_BYTES for size in sizes):
            raise TraceError(f"the plans {number} ask for {list(sizes)} bytes; accepted: two sizes or more")
        for index in plans.storages:
            if not 0 <= index < len(trace.storages) or index in seen:
                raise TraceError(f"the plans {number} name storage {index}, which does not exist or has other plans")
            seen.add(index)
            if trace.storages[index].bytes != sizes[0]:
                raise TraceError(f"storage {index} has {trace.storages[index].bytes} bytes; its first plan {sizes[0]}")


#: Kinds of events whose subject is a row of a table of the trace, and what that table is called in errors.
_TABLES = (
    (OF_STORAGES, "storages", "storage {}, which does not exist"),
    ((EventKind.MEMORY_FRACTION,), "fractions", "memory fraction {}, which does not exist"),
    ((EventKind.ALLOCATOR_SETTINGS,), "settings", "allocator settings {}, which do not exist"),
)


def _events_hold(trace: Trace) -> bool:
    """True if all events keep the rules, checked at once; False also where private pools need single checks."""
    kinds, subjects = trace.kinds, trace.subjects
    if trace.pools or np.isin(kinds, _OF_POOLS).any() or not _are_rows(trace.event_operators, trace.operators):
        return False
    if not all(_are_rows(subjects[np.isin(kinds, of)], getattr(trace, table)) for of, table, _ in _TABLES):
        return False
    of_storages = np.isin(kinds, OF_STORAGES)
    # What happens to one storage, side by side: it begins once, and nothing follows its end.
    order = np.argsort(subjects[of_storages], kind="stable")
    subject, kind = subjects[of_storages][order], kinds[of_storages][order]
    sides = np.concatenate(([-1], subject, [-1]))
    is_first, is_last = subject != sides[:-2], subject != sides[2:]
    begins = np.isin(kind, (EventKind.ALLOC, EventKind.REFUSED))
    ends = np.isin(kind, (EventKind.FREE, EventKind.REFUSED))
    return bool((begins == is_first).all() and (is_last | ~ends).all())


def _are_rows(chosen: npt.NDArray[np.int64], table: Sequence[object]) -> bool:
    return bool(((chosen >= 0) & (chosen < len(table))).all())


def _name_first_broken(trace: Trace) -> None:
    """Go through the events one by one; :class:`TraceError` at the first that breaks a rule."""
    state = [0] * len(trace.storages)  # an index of _STATES
    pools = _PoolStates(len(trace.pools))
    for position, event in enumerate(trace.events()):
        if not 0 <= event.operator < len(trace.operators):
            raise TraceError(f"event {position} names operator {event.operator}, which does not exist")
        for kinds, table, words in _TABLES:
            if event.kind in kinds and not 0 <= event.subject < len(getattr(trace, table)):
                raise TraceError(f"event {position} names {words.format(event.subject)}")
        if event.kind in _OF_POOLS:
            pools.check(position, event)
        elif event.kind in OF_STORAGES:
            before, state[event.subject] = state[event.subject], _after(position, event, state[event.subject])
            if before == 0:
                pools.check_held(position, trace.storages[event.subject].pool, event.kind)


def _after(position: int, event: Event, state: int) -> int:
    """The state of a storage after an event. Raises :class:`TraceError` where it could not happen."""
    if state != (0 if event.kind in (EventKind.ALLOC, EventKind.REFUSED) else 1):
        raise TraceError(f"event {position} ({event.kind.name}): storage {event.subject} {_STATES[state]}")
    return {EventKind.ALLOC: 1, EventKind.FREE: 2, EventKind.REFUSED: 3}.get(event.kind, state)


class _PoolStates:
    """Which pools are held how often, and which are routed to."""

    def __init__(self, count: int) -> None:
        self._holders = [0] * (count + 1)
        self._routed: set[int] = set()

    def check(self, position: int, event: Event) -> None:
        """Complain unless the pool can do that; then note it."""
        number, where = event.subject, f"event {position} ({event.kind.name})"
        if not 1 <= number < len(self._holders):
            raise TraceError(f"{where} names pool {number}, which does not exist")
        if event.kind == EventKind.BEGIN_POOL and number in self._routed:
            raise TraceError(f"{where}: pool {number} is routed to already")
        if event.kind == EventKind.END_POOL and number not in self._routed:
            raise TraceError(f"{where}: pool {number} is not routed to")
        if event.kind == EventKind.RELEASE_POOL and not self._holders[number]:
            raise TraceError(f"{where}: nothing holds pool {number}")
        self._holders[number] += {EventKind.RELEASE_POOL: -1, EventKind.CREATE_POOL: 1, EventKind.BEGIN_POOL: 1}.get(
            event.kind, 0
        )
        if event.kind in (EventKind.BEGIN_POOL, EventKind.END_POOL):
            self._routed ^= {number}

    def check_held(self, position: int, number: int, kind: EventKind) -> None:
        """Complain about an allocation in a pool that nothing holds."""
        if number and not self._holders[number]:
            raise TraceError(f"event {position} ({kind.name}): nothing holds pool {number}")


def to_json(trace: Trace) -> str:
    """The trace as one JSON document (columns of equal length, bytes as integers).

    The schema is ``graphmem.trace/1``, or ``graphmem.trace/2`` where there are private pools: it adds the table of
    pools and a last column to the storages. ``graphmem.trace/3`` adds refused requests and the table of fractions,
    ``graphmem.trace/4`` the table of plans, ``graphmem.trace/5`` that of the allocator's settings.
    """
    document: dict[str, Any] = {
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
    if trace.pools:
        document["schema"] = SCHEMA_WITH_POOLS
        document["pools"] = [[pool.label, pool.use_on_oom, pool.no_split] for pool in trace.pools]
        for row, storage in zip(document["storages"], trace.storages, strict=True):
            row.append(storage.pool)
    if trace.fractions or trace.refused:
        document["schema"] = SCHEMA_WITH_LIMITS
        document["fractions"] = list(trace.fractions)
    if trace.plans:
        document["schema"] = SCHEMA_WITH_PLANS
        document["plans"] = [[list(plans.storages), list(plans.bytes)] for plans in trace.plans]
    if trace.settings:
        document["schema"] = SCHEMA_WITH_SETTINGS
        document["settings"] = list(trace.settings)
    for name in ("predicted_plans", "garbage_bytes"):
        if number := getattr(trace, name):
            document[name] = number
    return json.dumps(document, separators=(",", ":"))


_SCHEMAS = (SCHEMA, SCHEMA_WITH_POOLS, SCHEMA_WITH_LIMITS, SCHEMA_WITH_PLANS, SCHEMA_WITH_SETTINGS)


def from_json(text: str | bytes) -> Trace:
    """Read a text of :func:`to_json`. Raises :class:`TraceError` for anything else."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise TraceError(f"not a graphmem trace: {error}") from None
    if not isinstance(document, dict) or document.get("schema") not in _SCHEMAS:
        raise TraceError(f"not a graphmem trace: the key 'schema' must be one of {', '.join(_SCHEMAS)}")
    try:
        trace = _decode(document)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise TraceError(f"malformed trace: {type(error).__name__}: {error}") from None
    validate(trace)
    return trace


def _decode(document: dict[str, Any]) -> Trace:
    """The trace that a document of JSON holds. A damaged one raises what reading it comes to, as :class:`KeyError`."""
    columns = document["events"]
    arrays = {name: _column(columns[name]) for name in ("kind", "subject", "operator", "stream")}
    if len({len(array) for array in arrays.values()}) != 1:
        raise ValueError("the event columns differ in length")
    for kind in set(arrays["kind"].tolist()):
        EventKind(kind)
    return Trace(
        source=_text(document["source"]),
        phases=tuple(Phase(_whole(iteration), _text(name)) for iteration, name in document["phases"]),
        operators=tuple(Operator(_text(n), _text(m), _whole(p), _text(s)) for n, m, p, s in document["operators"]),
        storages=tuple(_storage(*row) for row in document["storages"]),
        kinds=arrays["kind"],
        subjects=arrays["subject"],
        event_operators=arrays["operator"],
        event_streams=arrays["stream"],
        notes=tuple((key, _text(value)) for key, value in document["notes"].items()),
        pools=tuple(
            MemoryPool(_text(label), bool(oom), bool(whole)) for label, oom, whole in document.get("pools", ())
        ),
        fractions=tuple(_fraction(value) for value in document.get("fractions", ())),
        plans=tuple(
            Plans(tuple(map(_whole, storages)), tuple(map(_whole, sizes)))
            for storages, sizes in document.get("plans", ())
        ),
        settings=tuple(_text(value) for value in document.get("settings", ())),
        predicted_plans=_whole(document.get("predicted_plans", 0)),
        garbage_bytes=_whole(document.get("garbage_bytes", 0)),
    )


def _storage(size: object, category: str, stream: object, place: str, label: object, pool: object = 0) -> Storage:
    return Storage(_whole(size), Category[category], _whole(stream), Place[place], _text(label), _whole(pool))


def _whole(value: object) -> int:
    if type(value) is not int or abs(value) > MAX_STORAGE_BYTES:
        raise ValueError(f"{shown(value)} is no whole number of 64 bits")
    return value


def _fraction(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{shown(value)} is no number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is no text")
    return value


def _column(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    if not all(type(value) is int for value in values):
        raise ValueError("event columns hold integers only")
    return np.array(values, dtype=np.int64)
