"""Traces as functions of the number of layers: two captures whose models differ by one layer say what a layer adds.

Both traces are read as sequences of elements: each call of an operator, and each event. Where the deeper one goes on
with what it just did, and the other one does not, a layer's elements repeat: a *site*. A deeper trace has more copies
at every site. What an element refers to (the operator of an event, the storage that it frees) and the numbers that it
carries (bytes, layers' numbers in names) are linear in the number of its copy and in that of all copies; the first and
the last copies of a site, which have other neighbours, have functions of the number of all copies alone.

    template = DepthTemplate.learn((4, trace), (5, deeper_trace))
    same(template.at(6), capture_of_6)  # who asks for a proof has a third capture
    template.at(80)

It is proven by nothing but a third capture.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmem.capture.templates.layout import NoTemplate
from graphmem.trace import OF_STORAGES, EventKind, Operator, Plans, Storage, Trace, validate

Integers = npt.NDArray[np.int64]
#: The kind of an element that is a call.
_CALL = -1
#: Kinds of events that begin a storage.
_BIRTHS = (int(EventKind.ALLOC), int(EventKind.REFUSED))
#: So many elements after a layer's are looked at, which should be those that the other trace goes on with.
_RESUMES = 256
#: So many copies at either end have rules of their own; more, where fewer do not do.
_EDGES = (1, 2)
#: Texts that are remembered, more than a deep model has names of modules and tensors.
_TEXTS = 1 << 16
#: Tables of a trace that no layer changes.
_SAME = ("phases", "pools", "fractions", "settings", "predicted_plans", "garbage_bytes")


@dataclass(frozen=True, slots=True)
class Element:
    """A call (of the kind -1), or an event. ``what`` it is of, but for ``numbers``, the first of which is its bytes;
    ``refers``: the elements that it refers to, its call and the birth of its storage."""

    kind: int
    what: Any
    numbers: tuple[int, ...] = (0,)
    refers: tuple[int, ...] = ()
    stream: int = 0
    subject: int = 0  # of an event that is of no storage

    @property
    def key(self) -> Hashable:
        """Equal for elements that are alike, but for numbers."""
        return self.kind, self.what, self.stream, self.subject


@dataclass(frozen=True, slots=True)
class Site:
    """Where a layer repeats in the trace with fewer layers: ``copies`` of ``period`` elements before ``end``."""

    end: int
    period: int
    copies: int

    @property
    def begin(self) -> int:
        """Its first element."""
        return self.end - self.copies * self.period


#: A linear function: its constant, and what each copy before, and each further layer, adds.
Linear = tuple[int, int, int]


@dataclass(frozen=True)
class DepthTemplate:
    """The trace of a model by its number of layers, of which the base had ``layers``."""

    layers: int
    _base: Trace
    _elements: list[Element]
    _sites: list[Site]
    _edge: int
    _rules: dict[tuple[int, int], _Rule]  # by element of the base and part

    @staticmethod
    def learn(fewer: tuple[int, Trace], more: tuple[int, Trace]) -> DepthTemplate:
        """The template of two captures of which the second has one layer more. Raises :class:`NoTemplate`."""
        (layers, base), (others, deeper) = fewer, more
        if others != layers + 1:
            raise NoTemplate(f"captures of {layers} and {others} layers, which differ by more than one")
        _check_tables(base, deeper)
        elements = [list(_elements(trace)) for trace in (base, deeper)]
        *edges, last = _EDGES
        for edge in edges:
            with contextlib.suppress(NoTemplate):
                return _learned(layers, base, elements, edge)
        return _learned(layers, base, elements, last)

    def at(self, layers: int) -> Trace:
        """The trace of so many layers. Raises :class:`NoTemplate`."""
        places = _Places(self._sites, len(self._elements), layers - self.layers, self._edge)
        return _Writer(self._base, self._elements, self._rules, places).trace()


def _learned(layers: int, base: Trace, elements: Sequence[list[Element]], edge: int) -> DepthTemplate:
    own, deeper = elements
    sites = list(_sites(own, deeper, layers, 2 * edge + 1))
    places = [_Places(sites, len(own), extra, edge) for extra in (0, 1)]
    return DepthTemplate(layers, base, own, sites, edge, _rules(elements, places))


def _check_tables(base: Trace, deeper: Trace) -> None:
    differ = next((name for name in _SAME if getattr(base, name) != getattr(deeper, name)), "")
    if differ:
        raise NoTemplate(f"with another layer the {differ} differ")
    if base.pools or [plans.bytes for plans in base.plans] != [plans.bytes for plans in deeper.plans]:
        raise NoTemplate("private pools, and convolutions in layers, are not followed")


# --- elements ---------------------------------------------------------------------------------------------------------

_DIGITS = re.compile("[0-9]+")


#: Where a number was left out of a text: no name holds it.
_LEFT_OUT = "\0"


@lru_cache(maxsize=_TEXTS)
def _text(text: str) -> tuple[str, tuple[int, ...]]:
    """A text without its numbers, and these."""
    return _DIGITS.sub(_LEFT_OUT, text), tuple(int(one) for one in _DIGITS.findall(text))


@lru_cache(maxsize=_TEXTS)
def _filled(text: str, numbers: tuple[int, ...]) -> str:
    """The text with these numbers in it."""
    first, *rest = text.split(_LEFT_OUT)
    return first + "".join(f"{number}{part}" for number, part in zip(numbers, rest, strict=True))


def _elements(trace: Trace) -> Iterator[Element]:
    """The calls and events of a trace; calls without events come before the next event of a later one."""
    born: dict[int, tuple[int, Storage, tuple[int, ...]]] = {}
    calls: list[int] = []  # the element of each operator
    position = 0
    for kind, subject, operator, stream in [*trace.rows(), (_CALL, 0, len(trace.operators) - 1, 0)]:
        while len(calls) <= operator:
            one = trace.operators[len(calls)]
            module, numbers = _text(one.module)
            calls.append(position)
            yield Element(_CALL, (one.name, module, one.phase, one.source), (0, *numbers))
            position += 1
        if kind in _BIRTHS:
            storage = trace.storages[subject]
            label, numbers = _text(storage.label)
            like = replace(storage, bytes=0, label=label)
            born[subject] = position, like, (storage.bytes, *numbers)
            yield Element(kind, like, born[subject][2], (calls[operator],), stream)
        elif kind in OF_STORAGES:
            birth, like, of_storage = born[subject]
            yield Element(kind, like, of_storage, (calls[operator], birth), stream)
        elif kind != _CALL:
            yield Element(kind, None, (0,), (calls[operator],), stream, subject)
        position += 1


# --- where layers repeat ----------------------------------------------------------------------------------------------


def _sites(base: Sequence[Element], deeper: Sequence[Element], layers: int, least: int) -> Iterator[Site]:
    """The sites in order, each of ``least`` copies or more. Raises :class:`NoTemplate`."""
    ids: dict[Hashable, int] = {}
    one, two = (_numbered(elements, ids, with_bytes=True) for elements in (base, deeper))
    plain_one, plain_two = (_numbered(elements, ids, with_bytes=False) for elements in (base, deeper))
    at, there, last = 0, 0, 0
    while True:
        alike = _alike(one[at:], two[there:])
        at, there = at + alike, there + alike
        if at == len(one) and there == len(two):
            return
        period = _period(one[at : at + _RESUMES], two, there)
        if period:
            copies = _copies(one[last:at], two[there : there + period], layers)
            if copies < least:
                raise NoTemplate(f"{deeper[there].what} repeats with another layer and not with those before")
            yield Site(at, period, copies)
            there, last = there + period, at
        elif at < len(one) and there < len(two) and plain_one[at] == plain_two[there]:
            at, there = at + 1, there + 1  # of another size with another layer
        else:
            raise NoTemplate(f"nothing repeats with another layer at {deeper[min(there, len(deeper) - 1)].what}")


def _copies(before: Integers, added: Integers, layers: int) -> int:
    """How often what was ``added`` stands at the end of what comes ``before``: once a layer at the most."""
    for copies in range(layers):
        end = len(before) - copies * len(added)
        if end < len(added) or not np.array_equal(before[end - len(added) : end], added):
            return copies
    return layers


def _numbered(elements: Sequence[Element], ids: dict[Hashable, int], *, with_bytes: bool) -> Integers:
    """A number for each kind of element."""
    keys = ((one.key, one.numbers[0] if with_bytes else None) for one in elements)
    return np.array([ids.setdefault(key, len(ids)) for key in keys], dtype=np.int64)


def _alike(one: Integers, two: Integers) -> int:
    """How many of the first elements are alike."""
    shorter = min(len(one), len(two))
    differ = one[:shorter] != two[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def _period(following: Integers, deeper: Integers, at: int) -> int:
    """How many elements from ``at`` on are those just before once more, so that as many as can be of those
    ``following`` come after them; 0: none."""
    if not at:
        return 0
    before, after, found, longest = deeper[:at], deeper[at:], 0, 0
    shorter = min(len(before), len(after))
    for period in (np.flatnonzero(after[:shorter] == before[-1]) + 1).tolist():
        resumed = _alike(after[period : period + len(following)], following)
        if (resumed > longest or not len(following)) and np.array_equal(after[:period], before[-period:]):
            found, longest = period, resumed
    return found


class _Places:
    """Where the elements of the base, and their copies, are in a trace with ``extra`` layers more.

    Columns, one value for each element of that trace: ``origin``, its element of the base, the first copy's; ``copy``,
    its number; ``part``, 1, 2, … of the first ``edge`` copies, -1, -2, … of the last ones from the end on, 0 between.
    By element of the base: ``start``, where its first copy is, and ``step``, how far on the next.
    """

    def __init__(self, sites: Sequence[Site], elements: int, extra: int, edge: int) -> None:
        self.extra = extra
        self.start, self.step = np.zeros(elements, dtype=np.int64), np.zeros(elements, dtype=np.int64)
        origins, copies, parts = [], [], []
        done = written = 0
        for site in [*sites, Site(elements, 0, 0)]:
            single, first = np.arange(done, site.begin), np.arange(site.begin, site.begin + site.period)
            self.start[single], self.start[first] = written + np.arange(len(single)), written + len(single)
            self.start[first] += np.arange(site.period)
            self.step[first] = site.period
            repeats = site.copies + extra if site.period else 0
            if site.period and repeats < 2 * edge:
                raise NoTemplate("the layers are too few")
            copy = np.repeat(np.arange(repeats), site.period)
            origins += [single, np.tile(first, repeats)]
            copies += [np.zeros(len(single), dtype=np.int64), copy]
            of_copies = np.where(copy < edge, copy + 1, np.where(copy >= repeats - edge, copy - repeats, _BETWEEN))
            parts += [np.ones(len(single), dtype=np.int64), of_copies]
            written, done = written + len(single) + len(copy), site.end
        self.origin, self.copy, self.part = (np.concatenate(column) for column in (origins, copies, parts))

    @property
    def counted(self) -> Integers:
        """The number of the copy where rules look at it."""
        return np.where(self.part == _BETWEEN, self.copy, 0)


#: The part of copies that are neither among the first nor among the last.
_BETWEEN = 0


# --- rules ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """The numbers of an element; the elements of the base that it refers to, and the number of the copy of each."""

    numbers: tuple[Linear, ...]
    refers: tuple[int, ...]
    copies: tuple[Linear, ...]


def _rules(traces: Sequence[Sequence[Element]], places: Sequence[_Places]) -> dict[tuple[int, int], _Rule]:
    """The rule of each element of the base, by the part of its copies."""
    seen: dict[tuple[int, int], dict[tuple[int, int], Element]] = {}
    known = [(where.origin.tolist(), where.copy.tolist()) for where in places]
    for extra, (elements, where, (origins, _)) in enumerate(zip(traces, places, known, strict=True)):
        columns = (origins, where.part.tolist(), where.counted.tolist())
        for element, origin, part, copy in zip(elements, *columns, strict=True):
            seen.setdefault((origin, part), {})[copy, extra] = element
    return {key: _rule(cases, known) for key, cases in seen.items()}


def _rule(cases: dict[tuple[int, int], Element], known: Sequence[tuple[list[int], list[int]]]) -> _Rule:
    """The rule of copies by (number, layers more); ``known``: origin and copy of all elements, by layers more."""
    first = next(iter(cases.values()))
    if any(one.key != first.key or len(one.numbers) != len(first.numbers) for one in cases.values()):
        raise NoTemplate(f"with another layer there is another {first.what}")
    rows = zip(*(one.numbers for one in cases.values()), strict=True)
    numbers = tuple(_linear(dict(zip(cases, row, strict=True))) for row in rows)
    refers, copies = [], []
    for row in zip(*(one.refers for one in cases.values()), strict=True):
        origins = {known[extra][0][target] for (_, extra), target in zip(cases, row, strict=True)}
        if len(origins) > 1:
            raise NoTemplate(f"with another layer {first.what} is of other elements")
        refers.append(origins.pop())
        targets = {case: known[case[1]][1][target] for case, target in zip(cases, row, strict=True)}
        copies.append(_linear(targets))
    return _Rule(numbers, tuple(refers), tuple(copies))


def _linear(values: dict[tuple[int, int], int]) -> Linear:
    """The linear function through all values of (copy, layers more). Raises :class:`NoTemplate`."""
    copy, extra = next(iter(values))
    by_copy = next((value - values[c - 1, e] for (c, e), value in values.items() if (c - 1, e) in values), 0)
    by_extra = next((values[c, 1] - value for (c, e), value in values.items() if e == 0 and (c, 1) in values), None)
    if by_extra is None:
        raise NoTemplate("a layer repeats too seldom")
    constant = values[copy, extra] - by_copy * copy - by_extra * extra
    if any(constant + by_copy * c + by_extra * e != value for (c, e), value in values.items()):
        raise NoTemplate("something grows otherwise than with the layers")
    return constant, by_copy, by_extra


# --- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the trace of places."""

    def __init__(
        self, base: Trace, elements: Sequence[Element], rules: dict[tuple[int, int], _Rule], places: _Places
    ) -> None:
        self._base, self._elements, self._places = base, elements, places
        self._number = {key: number for number, key in enumerate(rules)}
        self._rules = list(rules.values())

    def trace(self) -> Trace:
        """The trace. Raises :class:`NoTemplate`."""
        places, number = self._places, self._number
        pairs = zip(places.origin.tolist(), places.part.tolist(), strict=True)
        of = np.array([number[pair] for pair in pairs], dtype=np.int64)  # each element's rule
        columns = np.array([(one.kind, one.stream, one.subject) for one in self._elements], dtype=np.int64)
        kinds, streams, others = columns[places.origin].T
        is_call, begins = kinds == _CALL, np.isin(kinds, _BIRTHS)
        calls, births = np.cumsum(is_call) - 1, np.cumsum(begins) - 1
        referred = self._referred(of, 0)
        subjects = np.where(np.isin(kinds, OF_STORAGES), births[self._referred(of, 1)], others)
        events = ~is_call
        made = replace(
            self._base,
            operators=tuple(self._operators(of, is_call)),
            storages=tuple(self._storages(of, begins)),
            kinds=kinds[events],
            subjects=subjects[events],
            event_operators=calls[referred][events],
            event_streams=streams[events],
            plans=tuple(self._plans(births)),
        )
        validate(made)
        return made

    def _plans(self, births: Integers) -> Iterator[Plans]:
        """The calls that can do with less, which are none of a layer's."""
        born = [number for number, one in enumerate(self._elements) if one.kind in _BIRTHS]
        for plans in self._base.plans:
            at = [born[storage] for storage in plans.storages]
            if self._places.step[at].any():
                raise NoTemplate("convolutions in layers are not followed")
            yield Plans(tuple(births[self._places.start[at]].tolist()), plans.bytes)

    def _referred(self, of: Integers, place: int) -> Integers:
        """The element that each element refers to first, or second; itself where it refers to none."""
        targets = [rule.refers[place] if len(rule.refers) > place else -1 for rule in self._rules]
        linear = [rule.copies[place] if len(rule.refers) > place else (0, 0, 0) for rule in self._rules]
        places, target = self._places, np.array(targets)[of]
        constant, by_copy, by_extra = np.array(linear).T
        copy = constant[of] + by_copy[of] * places.counted + by_extra[of] * places.extra
        return np.where(target < 0, np.arange(len(of)), places.start[target] + copy * places.step[target])

    def _numbers(self, of: Integers, chosen: npt.NDArray[np.bool_]) -> Iterator[tuple[Element, tuple[int, ...]]]:
        """The chosen elements with the numbers that they carry here."""
        places, extra = self._places, self._places.extra
        at = np.flatnonzero(chosen)
        columns = (places.origin[at], of[at], places.counted[at])
        for origin, rule, copy in zip(*(column.tolist() for column in columns), strict=True):
            linear = self._rules[rule].numbers
            yield (
                self._elements[origin],
                tuple(c + by_copy * copy + by_extra * extra for c, by_copy, by_extra in linear),
            )

    def _operators(self, of: Integers, chosen: npt.NDArray[np.bool_]) -> Iterator[Operator]:
        for element, (_, *numbers) in self._numbers(of, chosen):
            name, module, phase, source = element.what
            yield Operator(name, _filled(module, tuple(numbers)), phase, source)

    def _storages(self, of: Integers, chosen: npt.NDArray[np.bool_]) -> Iterator[Storage]:
        for element, (size, *numbers) in self._numbers(of, chosen):
            like = element.what
            label = _filled(like.label, tuple(numbers))
            yield Storage(size, like.category, like.stream, like.place, label, like.pool)
