"""Values that a program reads and nobody knows: what they are taken to be, and which of them decide something.

A number that is only written into a log is assumed quietly. One that becomes a size, an index, a bound or a branch is
named with the line that reads it, for the top of the report, and the user may say there what it is (``--assume``).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from graphmem.capture.values import callers, reading_lines
from graphmem.diagnostics import Argument, Code, Diagnostic
from graphmem.errors import CaptureError
from graphmem.training import Tried

#: Answers to the same question in one iteration after which the other one is given: a loop waits for it.
_PATIENCE = 256

#: Reads of a value that is only tried, at one line of a capture: more are taken to be a loop that waits for another.
_MOST_TRIED = 4096

#: Lines whose value the user gives: ``("train.py:31", 300)``.
Assumptions = Sequence[tuple[str, "float | int | bool"]]
_T = TypeVar("_T")


class AssumedValues:
    """The assumptions of one capture. ``given``: values of lines, by the user."""

    def __init__(self, given: Assumptions = ()) -> None:
        self._given = tuple(given)
        self.used: set[str] = set()
        self.logged = 0  # numbers that only reach a log
        self.named: Counter[Diagnostic] = Counter()
        self._asked: Counter[tuple[str, int]] = Counter()
        self._tried: Counter[str] = Counter()
        self._reading = ""
        self._judged: dict[tuple[object, ...], Any] = {}
        self.selections = 0  # of which nobody knows how many elements they take
        self.last_selection: tuple[str, int] | None = None  # the line, and of how many elements
        self._last: tuple[str, Code] | None = None  # what was read last to be followed: its line, what is assumed

    def unused(self) -> list[str]:
        """Lines whose value the user gives and where nothing unknown was read."""
        return [line for line, _ in self._given if line not in self.used]

    @contextmanager
    def reading(self, how: str) -> Iterator[None]:
        """Numbers that are read inside are read as ``index``, ``int`` or ``bool``."""
        before, self._reading = self._reading, how
        try:
            yield
        finally:
            self._reading = before

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _given_at(self, place: str) -> float | int | bool | None:
        """The user's value of a line; None where none is given. Raises :class:`CaptureError` where a line has read a
        value that is only tried so often that it may wait for another."""
        for line, value in self._given:
            if place == line or place.endswith("/" + line):
                self.used.add(line)
                if isinstance(value, Tried):
                    self._tried[place] += 1
                    if self._tried[place] > _MOST_TRIED:
                        raise CaptureError(f"{place} read the same value {_MOST_TRIED:,} times")
                return value
        return None

    def is_given(self) -> bool:
        """Whether the user gives a value of the line that runs now."""
        return bool(self._given) and self._given_at(callers.user_place()[0]) is not None

    def answer(self, iteration: int) -> bool:
        """The answer to a question about unknown values."""
        place, file, line = callers.user_place()
        given = self._given_at(place)
        if given is not None:
            return bool(given)
        passing = self._passing(file, line)
        if passing is not None:
            self.logged += 1
            return passing
        key = place, iteration
        self._asked[key] += 1
        answer = self._asked[key] > _PATIENCE and bool(place)
        if self._reading != "" and self._judge(reading_lines.only_logs, file, line, False, self._reading == "bool"):
            self.logged += 1
        else:
            self._name(place, Code.ANSWERED_YES if answer else Code.ANSWERED_NO)
        return answer

    def whole_number(self, possible: int = 1) -> int:
        """A whole number that is read: ``possible`` is one, unless the user gives another."""
        place, _, _ = callers.user_place()
        given = self._given_at(place)
        if given is not None:
            return int(given)
        if self._reading == "" and callers.is_subscript():
            self.logged += 1
            return 0
        frames = callers.reading_frames()
        is_log = (
            self._reading not in ("index", "bool")
            and bool(frames)
            and self._judge(reading_lines.only_logs, frames[0].file, frames[0].line, False, False, frames)
        )
        self._note(place, Code.WHOLE_NUMBER, is_decisive=not is_log)
        return possible

    def number(self) -> float:
        """A floating-point number that is read."""
        place, file, line = callers.user_place()
        given = self._given_at(place)
        if given is not None:
            return float(given)
        is_decisive = self._reading in ("index", "bool")
        if self._reading == "int":
            is_decisive = not self._judge(reading_lines.only_logs, file, line)
        elif self._reading == "" and file:
            is_decisive = not self._judge(reading_lines.only_logs, file, line, True)
        # ``float(loss)`` gives a plain float: what becomes of it is not followed, as with an array of them.
        self._number(place, Code.NUMBER if self._reading else Code.NUMBERS, is_decisive)
        return 1.0

    def _number(self, place: str, code: Code, is_decisive: bool = False) -> None:
        """A floating-point number is read, which records itself what it decides, unless it gets lost on its way."""
        self._last = place, code
        if self._reading == "item" and self._judge(reading_lines.becomes_whole, callers.user_frames()):
            self.decides(place, code, Code.NUMBER_DECIDES_SIZE)
        else:
            self._note(place, code, is_decisive)

    def _note(self, place: str, code: Code, is_decisive: bool) -> None:
        if is_decisive:
            self._name(place, code)
        else:
            self.logged += 1

    def drawn(self, value: _T, is_data: bool = False) -> _T:
        """A random number of the card that is read, or what it decides: ``value`` is a possible one. Integers may stand
        for data (``is_data``): what libraries ask of tokens, whether there is a mask or a pad among them, is answered
        as for any."""
        place, file, line = callers.user_place()
        kind: Callable[[Any], _T] = type(value)
        given = self._given_at(place)
        if given is not None:
            return kind(given)
        is_question = kind is bool or self._reading == "bool"
        if is_data and is_question and callers.is_library(file):
            return value
        if kind is float and self._reading == "item":
            self._number(place, Code.DRAWN)
            return value
        is_float = kind is float and self._reading not in ("int", "index")
        frames = callers.user_frames() if is_float else ()
        is_log = self._judge(reading_lines.only_logs, file, line, is_float, self._reading == "bool", frames)
        is_check = is_question and self._passing(file, line) is not None
        self._note(place, Code.DRAWN, is_decisive=not (is_log or is_check))
        return value

    def _passing(self, file: str, line: int) -> bool | None:
        """The answer that passes a check, where a line asks only to raise an error, or to warn; None elsewhere."""
        passing = self._judge(reading_lines.passes_if, file, line)
        return False if passing is None and self._judge(reading_lines.only_warns, file, line) else passing

    def selected(self, count: int, code: Code = Code.DRAWN, **arguments: Argument) -> int:
        """How many elements are selected: ``count``, which is named as ``code``, unless the user gives another."""
        place, _, _ = callers.user_place()
        given = self._given_at(place)
        if given is not None:
            return max(0, int(given))
        self._name(place, code, **arguments)
        self.selections, self.last_selection = self.selections + 1, (place, count)
        return count

    def array(self, is_floating: bool, is_drawn: bool) -> None:
        """An array of numbers is read that nobody knows, or that were drawn on the card: only its line shows what it
        decides."""
        place, file, line = callers.user_place()
        frames = callers.user_frames() if is_floating else ()
        is_log = self._given_at(place) is not None
        if not (is_log or self._judge(reading_lines.only_logs, file, line, is_floating, False, frames)):
            self._name(place, Code.DRAWN if is_drawn else Code.NUMBERS if is_floating else Code.NUMBER)

    def drawn_list(self, is_floating: bool) -> None:
        """A list of random numbers of the card is read."""
        self._last = None
        place, _, _ = callers.user_place()
        if not is_floating:
            self.array(False, True)
        elif self._given_at(place) is None:
            self._number(place, Code.DRAWN)

    def followed(self, read: Callable[[], object]) -> object:
        """The result of ``read``; an assumed floating-point number as one that records when it decides something."""
        self._last = None
        with self.reading("item"):
            value = read()
        return self.as_last(value)

    def as_last(self, value: object) -> object:
        """A floating-point number, or a list of them, as numbers that record when they decide something, if the last
        one read was to be followed."""
        if self._last is None:
            return value
        if isinstance(value, list):
            return [self.as_last(item) for item in value]
        return AssumedNumber.of(value, self, *self._last) if type(value) is float else value

    def _judge(self, judge: Callable[..., _T], *about: object) -> _T | None:
        """The verdict of a judge of source, made once; None where there is no source."""
        key = judge, *about
        if key not in self._judged:
            self._judged[key] = judge(*about) if about[0] else None
        result: _T | None = self._judged[key]
        return result

    def _name(self, place: str, code: Code, **arguments: Argument) -> None:
        self.named[Diagnostic(code, place=place, arguments=tuple(arguments.items()))] += 1

    def compares_idly(self) -> bool:
        """Whether what the line that runs compares decides only what is written down."""
        return bool(self._judge(reading_lines.compares_idly, callers.user_frames()))

    def decides(self, place: str, code: Code, decision: Code) -> None:
        """A number that was read at ``place``, of which ``code`` is assumed, decides something: ``decision``, if it is
        not one that was drawn."""
        self._name(place, decision if code is Code.NUMBER else code)


#: Numbers beyond whatever a branch compares them with.
_FAR = 1e9
#: What else a line may read than what was assumed: the two ends of what is possible.
_ENDS: dict[Code, tuple[float | bool, ...]] = {
    Code.ANSWERED_YES: (False,),
    Code.ANSWERED_NO: (True,),
    Code.TAKES_ALL: (0,),
    Code.NUMBER_DECIDES_BRANCH: (-_FAR, _FAR),
}


def alternatives(assumed: Iterable[Diagnostic]) -> dict[str, tuple[Tried, ...]]:
    """Line that decides something -> the other values that it may read, as the two ends of what is possible; none where
    no end is known. ``assumed`` is :attr:`AssumedValues.named`."""
    found: dict[str, tuple[Tried, ...]] = {}
    for one in assumed:
        ends = _ENDS.get(one.code, ()) if one.place else ()
        # A line that is read in two ways has the bounds of neither.
        found[one.place] = () if one.place in found else tuple(map(Tried, ends))
    return found


class AssumedNumber(float):
    """A number that was read of unknown data, and what is computed of it: it records when it becomes a whole number or
    decides a branch."""

    _book: AssumedValues
    _place: str
    _code: Code

    @classmethod
    def of(cls, value: float, book: AssumedValues, place: str, code: Code) -> AssumedNumber:
        number = cls(value)
        number._book, number._place, number._code = book, place, code
        return number

    def _decides(self, decision: Code) -> None:
        self._book.decides(self._place, self._code, decision)

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def __bool__(self) -> bool:
        self._decides(Code.NUMBER_DECIDES_BRANCH)
        return float(self) != 0

    __hash__ = float.__hash__

    def __round__(self, digits: Any = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return round(float(self))


def _becoming_whole(name: str) -> Callable[[AssumedNumber], int]:
    original = getattr(float, name)

    def become(self: AssumedNumber) -> int:
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return int(original(self))

    return become


def _computing(name: str) -> Callable[..., object]:
    original = getattr(float, name)

    def compute(self: AssumedNumber, *others: object) -> object:
        result = original(self, *others)
        return AssumedNumber.of(result, self._book, self._place, self._code) if type(result) is float else result

    return compute


def _comparing(name: str) -> Callable[[AssumedNumber, object], object]:
    original = getattr(float, name)

    def compare(self: AssumedNumber, other: object) -> object:
        is_check = other is self or (isinstance(other, float) and other in (float("inf"), float("-inf")))
        if not is_check and not self._book.compares_idly():  # whether it is finite
            self._decides(Code.NUMBER_DECIDES_BRANCH)
        return original(self, other)

    return compare


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _make, _operations in (
    (_becoming_whole, ("int", "trunc", "floor", "ceil")),
    (_computing, (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "neg", "pos", "abs")),
    (_comparing, ("lt", "le", "gt", "ge", "eq", "ne")),
):
    for _operation in _operations:
        setattr(AssumedNumber, f"__{_operation}__", _make(f"__{_operation}__"))


class Selection:
    """How many elements are selected: the user's number for the line, or ``share`` of the candidates (above 0, at most
    1), or with None for the share all of them, which is noted."""

    def __init__(self, share: float | None, values: AssumedValues | None = None) -> None:
        self.share = share
        self._values = values or AssumedValues()
        self.assumed = 0
        self.distinct = 0  # sparse tensors whose indices were taken to be distinct
        self._exact: int | None = None

    def rows(self, candidates: int, what: str = "a selection") -> int:
        """The number selected out of ``candidates``, rounded up."""
        if self._exact is not None:
            return self._exact
        if callers.called_to_drop_empty_inputs():
            return candidates
        if self.share is None or self._values.is_given():
            return self._values.selected(candidates, Code.TAKES_ALL, what=what, candidates=candidates)
        self.assumed += 1
        return math.ceil(self.share * candidates)

    @property
    def exact(self) -> int | None:
        """The number selected, where it is known; nothing is assumed."""
        return self._exact

    @contextlib.contextmanager
    def exactly(self, rows: int | None) -> Iterator[None]:
        """Selections inside are of ``rows``; None changes nothing."""
        self._exact, before = rows, self._exact
        try:
            yield
        finally:
            self._exact = before
