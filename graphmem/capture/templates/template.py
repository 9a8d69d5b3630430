"""A template: the trace of a step as a function of one of its sizes, such as the batch or the length of sequences.

Captures of a step at a few sizes have the same events in the same order, but for those inside of kernels: these take
other buffers at other sizes. So events are matched outside of the calls of rules; the bytes of each storage and the
numbers in each call are curves over the size; and for another size every distinct call asks its rule again.

    template = Template.learn([Sample(2, trace, log), Sample(3, trace, log), Sample(5, trace, log)])
    for trace in template.traces([64, 65], card): ...

A template is *proven* where more samples agree with it than were needed to make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphmem.capture.kernels.parts.script import Card, Script
from graphmem.capture.record.calls import Asked, Asker, CallLog, NotedCall, flags_now
from graphmem.capture.session.session import Session, capture
from graphmem.capture.templates.curves import Curves
from graphmem.capture.templates.layout import Arrangement, Integers, NoTemplate, Shapes, Sizes, laid_out, shape_of
from graphmem.trace import OF_STORAGES, Category, EventKind, Storage, Trace, same


@dataclass(frozen=True)
class Sample:
    """A capture at one size, with the calls that its kernels' rules were asked about."""

    size: int
    trace: Trace
    log: CallLog


@dataclass(frozen=True)
class Template:
    """A trace as a function of one size. ``is_proven``: whether a sample more than were needed agrees with it."""

    samples: tuple[Sample, ...]
    is_proven: bool
    _curves: Curves
    _bytes: Integers  # the curve of each coordinate of an arrangement
    _distinct: tuple[tuple[NotedCall, tuple[int, ...]], ...]  # calls with other numbers, and the curves of these
    _call: tuple[int, ...]  # of each call, the number of its distinct one
    _base: Arrangement  # of the last sample
    _sizes: dict[Shapes, Sizes] = field(default_factory=dict, compare=False)  # by the steps of distinct calls

    @staticmethod
    def learn(samples: Sequence[Sample]) -> Template:
        """The template of two samples or more. Raises :class:`NoTemplate`."""
        samples = tuple(sorted(samples, key=lambda sample: sample.size))
        refused = next((sample.log.refused for sample in samples if sample.log.refused), "")
        if refused:
            raise NoTemplate(refused)
        outlines = [_Outline(sample) for sample in samples]
        for sample, outline in zip(samples[1:], outlines[1:], strict=True):
            _compare(samples[0], outlines[0], sample, outline)
        curves = Curves([sample.size for sample in samples])
        columns = zip(*(outline.bytes for outline in outlines), strict=True)
        of_bytes = np.array([curves.through(values) for values in columns], dtype=np.int64)
        distinct: dict[object, int] = {}  # calls -> their place in ``first``
        first: list[int] = []
        of_call: list[int] = []
        for number, calls in enumerate(zip(*(sample.log.calls for sample in samples), strict=True)):
            one = calls[0]
            key = (one.rule, one.form, one.state, *((call.numbers, call.floats) for call in calls))
            if key not in distinct:
                distinct[key] = len(first)
                first.append(number)
            of_call.append(distinct[key])
        found = []
        for number in first:
            calls = tuple(sample.log.calls[number] for sample in samples)
            numbers = zip(*(call.numbers for call in calls), strict=True)
            found.append((calls[-1], tuple(curves.through(values) for values in numbers)))
        made = Template(
            samples, curves.most_needed < len(samples), curves, of_bytes, tuple(found), tuple(of_call),
            outlines[-1].arrangement,
        )  # fmt: skip
        for sample, outline in zip(samples, outlines, strict=True):
            shapes = tuple(shape_of(sample.log.calls[number].script) for number in first)
            made._sizes[shapes] = Sizes(outline.arrangement, of_call)
        return made

    def agrees(self, card: Card) -> bool:
        """Whether the template gives every sample's trace: no rule looks at more than was noted."""
        traces = self.traces([sample.size for sample in self.samples], card)
        return all(same(trace, sample.trace) for trace, sample in zip(traces, self.samples, strict=True))

    def on_other_card(self, sample: Sample, card: Card) -> Template:
        """The template for ``card``, on which ``sample`` was captured: workspaces that no size changes have the bytes
        that they have there, and all else is as the rules say of that card. Raises :class:`NoTemplate` where the
        template does not give that capture."""
        known, outline = self.samples[-1], _Outline(sample)
        _compare(known, _Outline(known), sample, outline)
        of_bytes = self._bytes.copy()
        for place, (index, size) in enumerate(zip(outline.arrangement.coordinates, outline.bytes, strict=True)):
            curve = self._curves[of_bytes[place]]
            if curve.at(sample.size) != size and curve.is_constant and _is_workspace(sample.trace.storages[index]):
                of_bytes[place] = self._curves.through([size] * len(self.samples))
        made = replace(self, _bytes=of_bytes)
        [trace] = made.traces([sample.size], card)
        if not same(trace, sample.trace):
            raise NoTemplate("kernels choose otherwise on another card")
        return made

    def traces(self, sizes: Sequence[int], card: Card) -> list[Trace]:
        """The traces at these sizes on ``card``, as captures would give them. Raises :class:`NoTemplate`."""
        made: list[Trace] = []

        def evaluate(_: Session) -> None:
            if any(sample.log.flags - {flags_now()} for sample in self.samples):
                raise NoTemplate("the step sets switches of PyTorch that its kernels look at")
            asker, constant = Asker(card), dict[int, Asked]()
            made.extend(self._at(size, asker, constant) for size in sizes)

        capture(evaluate, source="template", device=card.device, torch_version=card.torch_version, cudnn=card.cudnn)
        return made

    def _at(self, size: int, asker: Asker, constant: dict[int, Asked]) -> Trace:
        """The trace; what is asked that no size changes is kept in ``constant``, by the number of the call."""
        value = self._curves.values_at(size)
        left = [number for number in range(len(self._distinct)) if number not in constant]
        calls = [(call, [value[curve] for curve in curves]) for call, curves in map(self._distinct.__getitem__, left)]
        asked = constant | dict(zip(left, asker.ask(calls), strict=True))
        constant.update((n, asked[n]) for n in left if self._is_constant(n))
        scripts = [asked[number].script for number in range(len(self._distinct))]
        predicted = set().union(*(one.predicted for one in asked.values()))
        return self._of_shape(scripts).trace(scripts, np.array(value, dtype=np.int64)[self._bytes], len(predicted))

    def _is_constant(self, number: int) -> bool:
        """Whether no size changes a distinct call."""
        return all(self._curves[curve].is_constant for curve in self._distinct[number][1])

    def _of_shape(self, scripts: Sequence[Script | None]) -> Sizes:
        """The sizes of the arrangement of distinct calls with these scripts."""
        shapes = tuple(shape_of(script) for script in scripts)
        if shapes not in self._sizes:
            of_calls = [scripts[number] for number in self._call]
            made = laid_out(self._base, self.samples[-1].log.calls, of_calls)
            self._sizes[shapes] = Sizes(made, self._call)
        return self._sizes[shapes]


def _is_workspace(storage: Storage) -> bool:
    return storage.category is Category.WORKSPACE


class _Outline:
    """A sample's events. ``steps``: the rows outside of calls, and each call with the storages that it leaves.
    ``bytes``: of each coordinate, a storage that every sample has."""

    def __init__(self, sample: Sample) -> None:
        trace = self._trace = sample.trace
        self.steps: list[tuple[object, ...]] = []
        self._numbers: dict[int, int] = {}  # storage -> its place among the coordinates
        self._rows = trace.rows()
        takes, position = [], 0
        for call in sample.log.calls:
            self._outside(position, call.rows[0])
            takes.append(self._inside(call))
            position = call.rows[1]
        self._outside(position, len(self._rows))
        spans = tuple(call.rows for call in sample.log.calls)
        scripts = tuple(shape_of(call.script) for call in sample.log.calls)
        self.arrangement = Arrangement(trace, tuple(self._numbers), spans, tuple(takes), scripts)

    @property
    def bytes(self) -> list[int]:
        return [self._trace.storages[index].bytes for index in self._numbers]

    def _number(self, storage: int) -> int:
        return self._numbers.setdefault(storage, len(self._numbers))

    def _outside(self, first: int, end: int) -> None:
        for kind, subject, operator, stream in self._rows[first:end]:
            number = self._number(subject) if kind in OF_STORAGES else subject
            self.steps.append((kind, number, operator, stream))

    def _inside(self, call: NotedCall) -> tuple[int, ...]:
        """The buffers that the call takes and gives back, in order; cuBLAS's workspaces are the same at every size."""
        rows, storages = self._rows[slice(*call.rows)], self._trace.storages
        freed = {subject for kind, subject, _, _ in rows if kind == EventKind.FREE}
        born = [subject for kind, subject, _, _ in rows if kind == EventKind.ALLOC]
        takes = [one for one in born if one in freed and not _is_workspace(storages[one])]
        inside = set(takes)
        others = [(kind, self._number(subject)) for kind, subject, _, _ in rows
                  if kind in OF_STORAGES and subject not in inside]  # fmt: skip
        self.steps.append((call.operator, call.form, *others))
        return tuple(takes)


#: Tables of a trace that no size changes.
_SAME = ("phases", "operators", "pools", "fractions", "settings")


def _compare(sample: Sample, outline: _Outline, other: Sample, other_outline: _Outline) -> None:
    """Raises :class:`NoTemplate` where two samples differ in more than sizes."""
    where = f"at {sample.size} and {other.size}"
    differ = next((name for name in _SAME if getattr(sample.trace, name) != getattr(other.trace, name)), "")
    if differ:
        raise NoTemplate(f"{where} the {differ} differ")
    if outline.steps != other_outline.steps:
        pairs = zip(outline.steps, other_outline.steps, strict=False)
        place, _ = next(((number, a) for number, (a, b) in enumerate(pairs) if a != b), (-1, None))
        raise NoTemplate(f"{where} the events differ: {outline.steps[place]} and {other_outline.steps[place]}")
    coordinates = (outline.arrangement.coordinates, other_outline.arrangement.coordinates)
    for one, two in zip(*coordinates, strict=True):
        if replace(sample.trace.storages[one], bytes=0) != replace(other.trace.storages[two], bytes=0):
            raise NoTemplate(f"{where} storages are for other purposes")
