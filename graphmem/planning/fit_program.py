"""The largest number that a whole program can be given on a card. The program is run for every number tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.largest import Bracket, Largest, steps_up_to

#: Until a number is found that does not fit, the next one is at most so many times the last: memory of a few samples
#: says little of thousands, and data for each number tried are loaded.
_MOST_TIMES = 8


def fit_program(
    name: str,
    attempt: Callable[[int], Estimate],
    *,
    multiple_of: int,
    at_most: int,
    spare_bytes: int | None,
    say: Callable[[str], None],
) -> Largest:
    """Search the largest number ``name`` with which the program fits the card, as :func:`graphmem.fit` does for models.

    ``attempt`` runs the program with a number. One that it fails with, for another reason than memory, ends the search
    as one that does not fit does. Raises :class:`GraphmemError` where it fails with the two smallest,
    or none may be tried.
    """
    bound, limit = steps_up_to(at_most, multiple_of)
    return _Search(attempt, name, multiple_of, bound, spare_bytes, say, limit).run()


class _NeedsNoMore(Exception):
    """A larger number takes as much memory."""


class _Search(Bracket):
    def __init__(self, attempt: Callable[[int], Estimate], *bracket: Any) -> None:
        super().__init__(*bracket)
        self._attempt = attempt

    def run(self) -> Largest:
        """Try numbers until neighbours bracket the answer, or memory grows no more."""
        try:
            self._bracket()
        except _NeedsNoMore as more:
            self._begin_of_most()
            self._bound, self._high, self._limit = self._low, self._low + 1, str(more)
        return self.found()

    def _begin_of_most(self) -> None:
        """Go down to the least number that needs as much as any larger one: that of its data, mostly."""
        most = self._sizes[self._low * self._step].requested
        less = max((value // self._step for value, one in self._sizes.items() if one.requested < most), default=0)
        while self._low - less > 1:
            count = (less + self._low) // 2
            try:
                estimate = self.analysed(count)
            except GraphmemError:  # a number that the program does not take
                less = count
                continue
            if estimate.requested < most:
                less = count
            else:
                self._low, self._below = count, estimate
        self._safe = {count: one for count, one in self._safe.items() if count <= self._low}

    def analysed(self, count: int, *, captured: bool = False) -> Estimate:
        value = count * self._step
        self._say(f"{self._size} {value:,}")
        estimate = self._attempt(value)
        self._check_that_it_grows(count, estimate)
        self._note(value, estimate)
        return estimate

    def _check_that_it_grows(self, count: int, estimate: Estimate) -> None:
        """A data set of 500 rows has no batch of 1,000. Raises :class:`_NeedsNoMore`."""
        below = self._sizes.get(self._low * self._step)
        if below is not None and count > self._low and below.requested == estimate.requested:
            raise _NeedsNoMore(
                f"no larger one needs more memory ({count * self._step:,} does not); its data may have no more"
            )

    def _guess(self) -> int:
        count = super()._guess()
        return count if self._bracketed else min(count, _MOST_TIMES * max(1, self._low))
