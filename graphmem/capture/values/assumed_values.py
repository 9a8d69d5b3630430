"""Values that a program reads and nobody knows: what they are taken to be, and which of them decide something.

A number that is only written into a log is assumed quietly. One that becomes a size, an index, a bound or a branch is
named with the line that reads it, for the top of the report, and the user may say there what it is (``--assume``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from graphmem.capture.values import callers, reading_lines
from graphmem.diagnostics import Argument, Code, Diagnostic
from graphmem.errors import CaptureError
from graphmem.training import Tried

#: Answers to the same question in one iteration after which the other one is given: a loop waits for it.
_PATIENCE = 256

#: Reads of a value that is only tried, at one line of a capture: more are taken to be a loop that waits for another.
_MOST_TRIED = 4096

Told = Sequence[tuple[str, "float | int | bool"]]


class AssumedValues:
    """The assumptions of one capture. ``told``: ``("train.py:31", 300)`` for lines whose value the user names."""

    def __init__(self, told: Told = ()) -> None:
        self._told = tuple(told)
        self.used: set[str] = set()
        self.logged = 0  # numbers that only reach a log
        self.named: Counter[Diagnostic] = Counter()
        self._asked: Counter[tuple[str, int]] = Counter()
        self._tried: Counter[str] = Counter()
        self._reading = ""
        self._judged: dict[Any, Any] = {}
        self._last: tuple[str, Code] | None = None  # what was read last to be followed: its line, what is assumed

    def unused(self) -> list[str]:
        """Lines that the user names and where nothing unknown was read."""
        return [line for line, _ in self._told if line not in self.used]

    @contextmanager
    def reading(self, how: str) -> Iterator[None]:
        """Numbers that are read inside are read as ``index``, ``int`` or ``bool``."""
        before, self._reading = self._reading, how
        try:
            yield
        finally:
            self._reading = before

    # --- numbers ------------------------------------------------------------------------------------------------------

    def told(self, place: str) -> Any:
        """What the user says of a line; None for nothing."""
        for line, value in self._told:
            if place == line or place.endswith("/" + line):
                self.used.add(line)
                if isinstance(value, Tried):
                    self._count(place)
                return value
        return None

    def _count(self, place: str) -> None:
        """Raises :class:`CaptureError` where a line has read the same value so often that it may wait for another."""
        self._tried[place] += 1
        if self._tried[place] > _MOST_TRIED:
            raise CaptureError(f"{place} read the same value {_MOST_TRIED:,} times")

    def is_told(self) -> bool:
        """Whether the user says something of the line that runs now."""
        return bool(self._told) and self.told(callers.user_place()[0]) is not None

    def answer(self, iteration: int) -> bool:
        """The answer to a question about unknown values."""
        place, file, line = callers.user_place()
        told = self.told(place)
        if told is not None:
            return bool(told)
        passing = self._judge(reading_lines.passes_if, file, line)
        if passing is not None:
            self.logged += 1
            return bool(passing)
        if self._judge(reading_lines.only_warns, file, line):
            self.logged += 1
            return False
        key = place, iteration
        self._asked[key] += 1
        answer = self._asked[key] > _PATIENCE and bool(place)
        if self._reading and self._judge(reading_lines.only_logs, file, line, False, self._reading == "bool"):
            self.logged += 1
        else:
            self._name(place, Code.ANSWERED_YES if answer else Code.ANSWERED_NO)
        return answer

    def whole_number(self) -> int:
        """A whole number that is read."""
        place, file, line = callers.user_place()
        told = self.told(place)
        if told is not None:
            return int(told)
        if self._reading not in ("index", "bool") and self._judge(reading_lines.only_logs, file, line):
            self.logged += 1
        else:
            self._name(place, Code.WHOLE_NUMBER)
        return 1

    def number(self) -> float:
        """A floating-point number that is read."""
        place, file, line = callers.user_place()
        told = self.told(place)
        if told is not None:
            return float(told)
        is_decisive = self._reading in ("index", "bool")
        if self._reading == "int":
            is_decisive = not self._judge(reading_lines.only_logs, file, line)
        elif self._reading == "" and file:
            is_decisive = not self._judge(reading_lines.only_logs, file, line, True)
        self._number(place, file, line, is_decisive, Code.NUMBER)
        return 1.0

    def _number(self, place: str, file: str, line: int, is_decisive: bool, code: Code) -> None:
        """A floating-point number is read, which tells itself what it decides, unless it gets lost on its way there."""
        self._last = place, code
        if self._reading == "item" and self._judge(reading_lines.becomes_whole, callers.user_frames()):
            self.decides(place, code, Code.NUMBER_DECIDES_SIZE)
        elif is_decisive:
            self._name(place, code)
        else:
            self.logged += 1

    def drawn(self, value: Any, is_data: bool = False) -> Any:
        """A random number of the card that is read, or what it decides: ``value`` is a possible one. Integers may stand
        for data (``is_data``): what libraries ask of tokens, whether there is a mask or a pad among them, is answered
        as for any."""
        place, file, line = callers.user_place()
        told = self.told(place)
        if told is not None:
            return type(value)(told)
        is_question = type(value) is bool or self._reading == "bool"
        if is_data and is_question and callers.is_library(file):
            return value
        is_float = type(value) is float and self._reading not in ("int", "index")
        frames = callers.user_frames() if is_float else ()
        is_log = self._judge(reading_lines.only_logs, file, line, is_float, self._reading == "bool", frames)
        if type(value) is float and self._reading == "item":
            self._number(place, file, line, False, Code.DRAWN)
        elif is_log or (is_question and self._is_check(file, line)):
            self.logged += 1
        else:
            self._name(place, Code.DRAWN)
        return value

    def _is_check(self, file: str, line: int) -> bool:
        """Whether a line asks only to raise an error, or to warn."""
        return bool(
            self._judge(reading_lines.passes_if, file, line) is not None
            or self._judge(reading_lines.only_warns, file, line)
        )

    def drawn_selection(self, rows: int) -> int:
        """How many elements random numbers of the card select: ``rows`` is a possible answer."""
        place, _, _ = callers.user_place()
        told = self.told(place)
        if told is not None:
            return max(0, int(told))
        self._name(place, Code.DRAWN)
        return rows

    def array(self, is_floating: bool, is_drawn: bool) -> None:
        """An array of numbers is read that nobody knows, or that were drawn on the card: only its line shows what it
        decides."""
        place, file, line = callers.user_place()
        frames = callers.user_frames() if is_floating else ()
        if self.told(place) is None and not self._judge(
            reading_lines.only_logs, file, line, is_floating, False, frames
        ):
            self._name(place, Code.DRAWN if is_drawn else Code.NUMBERS if is_floating else Code.NUMBER)

    def drawn_list(self, is_floating: bool) -> None:
        """A list of random numbers of the card is read."""
        self._last = None
        if not is_floating:
            self.array(False, True)
            return
        place, file, line = callers.user_place()
        if self.told(place) is None:
            self._number(place, file, line, False, Code.DRAWN)

    def followed(self, read: Callable[[], Any]) -> Any:
        """What ``read`` returns; an assumed floating-point number as one that tells when it decides something."""
        self._last = None
        with self.reading("item"):
            value = read()
        return self.as_last(value)

    def as_last(self, value: Any) -> Any:
        """A floating-point number as one that tells when it decides something, if the last one read was to be followed;
        numbers in lists too."""
        if self._last is None:
            return value
        if isinstance(value, list):
            return [self.as_last(item) for item in value]
        return AssumedNumber.of(value, self, *self._last) if type(value) is float else value

    def _judge(self, judge: Callable[..., Any], *about: Any) -> Any:
        key = judge, *about
        if key not in self._judged:
            self._judged[key] = judge(*about) if about[0] else None
        return self._judged[key]

    def selected(self, candidates: int, what: str) -> int:
        """How many of some candidates are selected: all, unless the user says otherwise."""
        place, _, _ = callers.user_place()
        told = self.told(place)
        if told is not None:
            return max(0, int(told))
        self._name(place, Code.TAKES_ALL, what=what, candidates=candidates)
        return candidates

    def _name(self, place: str, code: Code, **arguments: Argument) -> None:
        self.named[Diagnostic(code, place=place, arguments=tuple(arguments.items()))] += 1

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
    """What else a line that decides something may read, as the two ends of what is possible: line -> values, none where
    nothing says how far they go. ``assumed`` is :attr:`AssumedValues.named`."""
    found: dict[str, tuple[Tried, ...]] = {}
    for one in assumed:
        ends = _ENDS.get(one.code, ()) if one.place else ()
        # A line that is read in two ways has the bounds of neither.
        found[one.place] = () if one.place in found else tuple(map(Tried, ends))
    return found


class AssumedNumber(float):
    """A number that was read of unknown data, and what is computed of it: it tells when it becomes a whole number or
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

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __bool__(self) -> bool:
        self._decides(Code.NUMBER_DECIDES_BRANCH)
        return float(self) != 0

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __int__(self) -> int:
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return int(float(self))

    __trunc__ = __int__

    def __floor__(self) -> int:
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return float(self).__floor__()

    def __ceil__(self) -> int:
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return float(self).__ceil__()

    def __round__(self, digits: Any = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        self._decides(Code.NUMBER_DECIDES_SIZE)
        return round(float(self))


def _computing(name: str) -> Any:
    original = getattr(float, name)

    def compute(self: AssumedNumber, *others: Any) -> Any:
        result = original(self, *others)
        return AssumedNumber.of(result, self._book, self._place, self._code) if type(result) is float else result

    return compute


def _comparing(name: str) -> Any:
    original = getattr(float, name)

    def compare(self: AssumedNumber, other: Any) -> Any:
        is_check = other is self or (isinstance(other, float) and other in (float("inf"), float("-inf")))
        if not is_check:  # whether it is finite
            self._decides(Code.NUMBER_DECIDES_BRANCH)
        return original(self, other)

    return compare


for _operation in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("", "r"):
        setattr(AssumedNumber, f"__{_side}{_operation}__", _computing(f"__{_side}{_operation}__"))
for _operation in ("neg", "pos", "abs"):
    setattr(AssumedNumber, f"__{_operation}__", _computing(f"__{_operation}__"))
for _operation in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(AssumedNumber, f"__{_operation}__", _comparing(f"__{_operation}__"))
