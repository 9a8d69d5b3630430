"""A number that the body of a loop counts on itself, ``step += 1``, while the program runs.

The increment asks by how much (:meth:`Counter.by`): once the loop's steps are alike, it comes to numbers at which the
body tests something else (``if step % 500 == 0``) without the steps between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from graphmem.capture.program import ahead
from graphmem.capture.program.ahead import Key, computed

#: Iterations that may pass until a number is counted on, as where gradients of so many batches are added up.
_MOST_WAITING = 64


class Counter:
    """``keys``: what the body computes from the number, the first so many (``early``) before it counts it on; ``ends``:
    tests that are true where its loop, or one around it, ends; ``around``: of how many loops around that one each goes
    on counting."""

    def __init__(self, keys: Sequence[Key], early: int, ends: Sequence[Key], around: int) -> None:
        self._keys, self._early, self._ends, self.around = keys, early, ends, around
        self._first: tuple[object, ...] | None = None  # what was computed before the number was counted on at all
        self._seen: deque[int] = deque(maxlen=ahead.MOST_TESTED)
        self._step = self._waited = 0
        self.times = 0  # that it was counted on
        self.jumped = 0  # numbers of other sizes that are followed
        self._ahead: list[int] | None = None  # the numbers to come to, once that is decided

    def by(self, value: object, step: object) -> object:
        """By how much the number is counted on that is ``value``; ``step`` is what the program says."""
        if type(value) is not int or type(step) is not int or step < 1:
            return step
        following = value + step
        if self._ahead and self._ahead[0] > value:
            following = self._ahead.pop(0)
        if self._first is None:
            self._first = computed(self._keys[: self._early], value)
        self._seen.append(following)
        self._step, self._waited = step, 0
        self.times += 1
        return following - value

    def go_to_tested(self, left: int | None) -> bool:
        """Whether numbers follow at which the body tests something that it has not found before; ``left``: how often
        the loop would count it on, None where nobody knows."""
        return self._goes_on(ahead.unlike(self._known(), self._rest(left), self._values) if self._is_new else None)

    def go_to_sized(self, left: int | None) -> bool:
        """Whether numbers follow of which the body computes other sizes."""
        found = ahead.sized(self._known(), self._rest(left), self._values) if self._is_new else None
        self.jumped += len(found or ())
        return self._goes_on(found)

    @property
    def count(self) -> int:
        """How many numbers it comes to yet."""
        return len(self._ahead or ())

    @property
    def _is_new(self) -> bool:
        return self._ahead is None and bool(self._seen)

    def _goes_on(self, found: list[int] | None) -> bool:
        if found is not None:
            self._ahead = found or None
            self._waited = 0
        self._waited += 1
        return bool(self._ahead) and self._waited <= _MOST_WAITING

    def _known(self) -> list[tuple[object, ...]]:
        """What was computed of the numbers until now."""
        return [*([self._first] if self._first else ()), *map(self._values, self._seen)]

    def _rest(self, left: int | None) -> range:
        """The numbers that follow, to that at which a loop ends."""
        first, step = self._seen[-1] + self._step, self._step
        rest = range(first, first + step * (ahead.MOST_TESTED if left is None else left), step)[: ahead.MOST_TESTED]
        end = next((at for at, one in enumerate(rest) if any(key(one) is True for key in self._ends)), None)
        return rest if end is None else rest[: end + 1]

    def _values(self, number: int, places: Collection[int] | None = None) -> tuple[object, ...]:
        return computed(self._keys, number, places)
