"""Makes the events of a trace at a new size: those of a captured one, with other steps where kernels then differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from graphmem.capture.kernels.parts.script import Script, Step
from graphmem.capture.record.calls import NotedCall
from graphmem.errors import GraphmemError
from graphmem.trace import OF_STORAGES, Category, EventKind, Plans, Storage, Trace, validate

Integers = npt.NDArray[np.int64]
#: The steps of a script without its sizes.
Shape = tuple[tuple[str, int], ...]
#: Of several calls.
Shapes = tuple[Shape, ...]


class NoTemplate(GraphmemError):
    """Why captures make no template, or one does not serve a size."""


@dataclass(frozen=True)
class Arrangement:
    """The events of a trace, whatever the sizes of its storages. Storages are named by their index.

    ``coordinates``: those with a curve, the same in all arrangements of a template. ``spans``, ``takes``, ``shapes``:
    of every call, its rows, the buffers that its kernel takes and gives back, in order, and the steps of its script.
    """

    trace: Trace
    coordinates: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    takes: tuple[tuple[int, ...], ...]
    shapes: Shapes


def shape_of(script: Script | None) -> Shape:
    """The steps of a script without its sizes; none of one that takes only outputs."""
    return () if script is None else tuple((step.kind, step.index) for step in script.steps)


class Sizes:
    """The bytes of an arrangement's storages. ``of_call``: of each call, the number of its distinct one."""

    def __init__(self, arrangement: Arrangement, of_call: Sequence[int]) -> None:
        self._trace = arrangement.trace
        self._coordinates = np.array(arrangement.coordinates, dtype=np.int64)
        self._place: dict[int, int] = {}  # of each buffer, in the order of the calls that take them
        taken: dict[int, list[tuple[int, ...]]] = {}
        for number, takes in zip(of_call, arrangement.takes, strict=True):
            if takes:
                taken.setdefault(number, []).append(takes)
                self._place.update((index, len(self._place)) for index in takes)
        #: Of each distinct call, the buffers that its calls take: an array for each of them, in order.
        self._taken = {number: np.array(takes, dtype=np.int64).T.copy() for number, takes in taken.items()}

    def trace(self, scripts: Sequence[Script | None], of_bytes: Integers, predicted_plans: int) -> Trace:
        """The trace with the bytes of each coordinate, and those that the scripts of its distinct calls take."""
        sizes, labels = self._trace.columns.bytes.copy(), dict[int, str]()
        sizes[self._coordinates] = of_bytes
        planned: dict[int, Step] = {}
        for number, buffers in self._taken.items():
            script = scripts[number]
            for step, indices in zip(_given_back(script), buffers, strict=True) if script is not None else ():
                sizes[indices] = step.bytes or 0
                if step.label != self._trace.storages[indices[0]].label:
                    labels |= dict.fromkeys(indices.tolist(), step.label)
                if step.plans:
                    planned |= dict.fromkeys(indices.tolist(), step)
        plans = self._plans(planned)
        return self._trace.resized(sizes, labels, plans=plans, predicted_plans=predicted_plans)

    def _plans(self, planned: Mapping[int, Step]) -> tuple[Plans, ...]:
        """Of the buffers that can be less, those of one shape together, by their steps."""
        found: dict[object, tuple[tuple[int, ...], list[int]]] = {}
        for index in sorted(planned, key=self._place.__getitem__):
            found.setdefault(planned[index].shape, (planned[index].plans, []))[1].append(index)
        return tuple(Plans(tuple(indices), sizes) for sizes, indices in found.values())


def _given_back(script: Script | None) -> list[Step]:
    """The steps that take buffers which the kernel gives back."""
    if script is None:
        return []
    given = {step.index for step in script.steps if step.kind == "give"}
    return [step for step in script.steps if step.kind == "take" and step.index in given]


def laid_out(base: Arrangement, calls: Sequence[NotedCall], scripts: Sequence[Script | None]) -> Arrangement:
    """The events of ``base`` but for calls whose scripts have other steps. Raises :class:`NoTemplate`."""
    return _Layout(base).arrangement(calls, scripts)


class _Layout:
    """An arrangement while it is made."""

    def __init__(self, base: Arrangement) -> None:
        self._base = base
        self._old = base.trace.rows()
        self._rows: list[tuple[int, int, int, int]] = []
        self._storages: list[Storage] = []
        self._new: dict[int, int] = {}  # storage of the base -> its index here

    def arrangement(self, calls: Sequence[NotedCall], scripts: Sequence[Script | None]) -> Arrangement:
        base, position = self._base, 0
        spans, takes = [], []
        shapes = tuple(shape_of(script) for script in scripts)
        for call, script, shape, old_shape, span, old_takes in zip(
            calls, scripts, shapes, base.shapes, base.spans, base.takes, strict=True
        ):
            self._copy(position, span[0])
            first, position = len(self._rows), span[1]
            if shape == old_shape:
                self._copy(*span)
                takes.append(tuple(self._new[one] for one in old_takes))
            else:
                takes.append(self._follow(call, span, old_takes, script))
            spans.append((first, len(self._rows)))
        self._copy(position, len(self._old))
        coordinates = tuple(self._new[one] for one in base.coordinates)
        return Arrangement(self._trace(), coordinates, tuple(spans), tuple(takes), shapes)

    def _trace(self) -> Trace:
        kinds, subjects, operators, streams = np.array(self._rows, dtype=np.int64).reshape(-1, 4).T.copy()
        made = replace(
            self._base.trace,
            storages=tuple(self._storages),
            plans=(),
            kinds=kinds,
            subjects=subjects,
            event_operators=operators,
            event_streams=streams,
        )
        validate(made)
        return made

    def _copy(self, first: int, end: int) -> None:
        """The events of the base from ``first`` on and before ``end``."""
        for kind, subject, operator, stream in self._old[first:end]:
            if kind in _BIRTHS:
                self._birth(subject)
            self._rows.append((kind, self._new[subject] if kind in OF_STORAGES else subject, operator, stream))

    def _birth(self, storage: int) -> None:
        self._new[storage] = len(self._storages)
        self._storages.append(self._base.trace.storages[storage])

    def _follow(
        self, call: NotedCall, span: tuple[int, int], old_takes: tuple[int, ...], script: Script | None
    ) -> tuple[int, ...]:
        """The events of a call by its script, whose steps are not those of the base; the buffers that it gives back."""
        rows, inside, outputs = self._old[slice(*span)], set(old_takes), dict(call.born)
        are_known = all(kind == EventKind.ALLOC or subject in inside for kind, subject, _, _ in rows)
        born = {subject for kind, subject, _, _ in rows if kind == EventKind.ALLOC} - inside
        steps = [] if script is None else script.steps
        if not are_known or born != set(outputs.values()) or {step.kind for step in steps} - _FOLLOWED:
            raise NoTemplate(f"{call.operator} takes other buffers at another size, beside what is not followed")
        stream, pool = call.place
        taken: dict[int, int] = {}
        for step in steps:
            if step.kind == "output":
                self._output(outputs.pop(step.index, None), call.index)
            elif step.kind == "take":
                taken[step.index] = len(self._storages)
                buffer = Storage(step.bytes or 0, Category.TEMPORARY, stream, label=step.label, pool=pool)
                self._storages.append(buffer)
                self._rows.append((int(EventKind.ALLOC), taken[step.index], call.index, 0))
            else:
                self._rows.append((int(EventKind.FREE), taken[step.index], call.index, 0))
        for number in sorted(outputs):
            self._output(outputs[number], call.index)
        if len(taken) != len(_given_back(script)):
            raise NoTemplate(f"{call.operator} keeps other buffers at another size")
        return tuple(taken.values())

    def _output(self, storage: int | None, operator: int) -> None:
        """An output of a call is born, unless its storage was there before."""
        if storage is None:
            return
        self._birth(storage)
        self._rows.append((int(EventKind.ALLOC), self._new[storage], operator, 0))


_BIRTHS = (EventKind.ALLOC, EventKind.REFUSED)

#: Steps of a script that are followed where a sample has others.
_FOLLOWED = {"output", "take", "give"}
