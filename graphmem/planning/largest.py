"""A search of the largest size that fits a card, whatever analyses a size; and its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphmem.answering.runs import counted
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.documents import of_fit
from graphmem.planning.request import option_of
from graphmem.reports import Answer
from graphmem.reports.document import Document


@dataclass(frozen=True)
class Largest(Answer):
    """The largest size that fits, which was analysed, and the next one, which does not. ``safe_value`` is the largest
    size whose verdict is ``yes``: at the margin asked for, else whatever is known to be possible; 0 where none
    is, or where something that nothing bounds may decide.

    ``value`` is 0 with no ``estimate`` where not even the smallest size that can be analysed fits. ``above`` is None
    where the search ended at the bound it was given, or where the next size could not be analysed, for the reason in
    ``stopped_by``. ``sizes``: the estimates, without their events, of all that were tried, and where a ``grid`` was
    asked for of sizes between and around them, by template.
    """

    size: str
    value: int
    estimate: Estimate | None
    above_value: int
    above: Estimate | None
    stopped_by: str
    tried: tuple[tuple[int, int], ...]
    safe_value: int = 0
    safe: Estimate | None = None
    sizes: Mapping[int, Estimate] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The size as its option is called; a program's own are called as it calls them."""
        return option_of(self.size) if self.size == "seq_len" else self.size

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem fit``."""
        return of_fit(self)

    def __repr__(self) -> str:
        return f"<Largest {self.name}: {self.value:,}>"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.fit/1``; memory in bytes)."""
        return {
            "schema": "graphmem.fit/1",
            "size": self.size,
            "largest": self.value,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "safe": {"value": self.safe_value, "estimate": self.safe.to_dict() if self.safe else None},
            "above": {"value": self.above_value, "estimate": self.above.to_dict() if self.above else None},
            "stopped_by": self.stopped_by,
            "tried": [{"value": value, "device_bytes": count} for value, count in self.tried],
        }


def steps_up_to(at_most: int, multiple_of: int) -> tuple[int, str]:
    """The most steps of a search that looks at multiples, and why there are no more. Raises :class:`UsageError`."""
    steps = at_most // multiple_of
    if not steps:
        raise UsageError(f"no multiple of {multiple_of} is at most {at_most}")
    return steps, f"at most {steps * multiple_of} was asked for"


class Bracket(ABC):
    """Brackets the answer between a count of steps that fits and one that does not; lives for one search.

    ``name``: what the size is called; ``step``: it is a multiple of it; ``bound``: the most steps that are tried, for
    the reason ``limit``; ``spare_bytes``: see :func:`graphmem.fit`.
    """

    def __init__(
        self, name: str, step: int, bound: int, spare_bytes: int | None, say: Callable[[str], None], limit: str
    ) -> None:
        self._size, self._step, self._bound, self._say = name, step, bound, say
        self._spare_bytes, self._limit = spare_bytes, limit
        self._low, self._high = 0, bound + 1
        self._below: Estimate | None = None
        self._above: Estimate | None = None
        self._stopped_by = ""
        self._smallest_failed: GraphmemError | None = None
        self._tried: list[tuple[int, int]] = []
        self._safe: dict[int, Estimate | None] = {}  # count tried -> the estimate where it fits for sure
        self._sizes: dict[int, Estimate] = {}  # of values, without events

    @abstractmethod
    def analysed(self, count: int, *, captured: bool = False) -> Estimate:
        """The estimate of so many steps of the size, noted; by no template where it is to be ``captured``. Raises
        :class:`GraphmemError`."""

    def found(self) -> Largest:
        """The answer, once neighbours bracket it."""
        at_bound = not self._bracketed
        safe = self._largest_safe()
        return Largest(
            size=self._size,
            value=self._low * self._step if self._below else 0,
            estimate=self._below,
            above_value=0 if at_bound else self._high * self._step,
            above=self._above,
            stopped_by=self._limit if at_bound else self._stopped_by,
            tried=tuple(sorted(self._tried)),
            safe_value=safe * self._step,
            safe=self._safe.get(safe),
            sizes=dict(self._sizes),
        )

    def _note(self, value: int, estimate: Estimate) -> None:
        count = value // self._step
        self._tried.append((value, estimate.device))
        self._sizes[value] = estimate.without_events()
        self._safe[count] = estimate if self.fits(estimate) and self._fits_for_sure(estimate) else None

    def _bracket(self) -> None:
        """Narrow until neighbours fit and do not fit."""
        count, widths = self._guess(), list[int]()
        while self._high - self._low > 1:
            self._try(count)
            widths.append(self._high - self._low)
            # After a guess that narrowed little comes the middle: memory may grow in steps, as arenas do.
            guessed_badly = self._bracketed and len(widths) >= 2 and widths[-1] * 2 > widths[-2]
            count = (self._low + self._high) // 2 if guessed_badly else self._guess()

    def _largest_safe(self) -> int:
        """The largest count that fits for sure, 0 for none; sought first where a straight line expects it."""
        low = max((count for count, safe in self._safe.items() if safe is not None), default=0)
        if not low and self._below is not None and self._below.doubts.most("device") is None:
            return 0
        high = min((count for count in self._safe if count > low), default=0)
        expected, width = self._expected_safe(), 1
        while high - low > 1 and self._below is not None:
            count = expected if low < expected < high else (low + high) // 2
            try:
                self.analysed(count)
            except GraphmemError:  # a size that is too small for the model
                return low
            low, high = (count, high) if self._safe[count] is not None else (low, count)
            expected += width if low == count else -width  # next to it, then ever further away
            width *= 4
        return low

    def _expected_safe(self) -> int:
        """Where a straight line through the sizes tried last reaches what the card has for sure."""
        known = sorted(self._tried)[-2:]
        if self._below is None or len(known) < 2 or known[1][1] <= known[0][1]:
            return 0
        (x0, y0), (x1, y1) = known
        room = self._room(self._below) - _more(self._below)
        return (x0 + (room - y0) * (x1 - x0) // (y1 - y0)) // self._step

    def _room(self, estimate: Estimate) -> int:
        assert estimate.fit is not None
        return estimate.fit.capacity_bytes - estimate.fit.others_bytes - (self._spare_bytes or 0)

    @property
    def _bracketed(self) -> bool:
        return self._high <= self._bound

    def _try(self, count: int, *, captured: bool = False) -> None:
        self._narrow(count, captured)
        if self._bracketed:  # how often what is left can be halved
            done = len(self._tried)
            counted(self._say, done, done + (self._high - self._low).bit_length() - 1)

    def _narrow(self, count: int, captured: bool) -> None:
        try:
            estimate = self.analysed(count, captured=captured)
        except GraphmemError as error:
            if self._below is None:
                self._begin_above(count, error)
                return
            self._high, self._above = count, None
            self._stopped_by = f"{self._size} {count * self._step} cannot be analysed: {error}"
            return
        if self.fits(estimate):
            self._low, self._below = count, estimate
        else:
            self._high, self._above, self._stopped_by = count, estimate, "memory"

    def fits(self, estimate: Estimate) -> bool:
        fit, least = estimate.fit, self._spare_bytes
        assert fit is not None
        return fit.fits and (least is None or (fit.margin_bytes >= least and not fit.needs_cache_flush))

    def _fits_for_sure(self, estimate: Estimate) -> bool:
        """Whether it does, and leaves what is asked for, as far as the figures may be off, too."""
        fit = estimate.fit
        assert fit is not None
        if fit.verdict != "yes":
            return False
        return self._spare_bytes is None or fit.margin_bytes - _more(estimate) >= self._spare_bytes

    def _begin_above(self, count: int, error: GraphmemError) -> None:
        """One sample may be too few for a model (batch norm in training), so twice the smallest size is tried too."""
        if count > 1 or self._bound < 2:
            raise self._smallest_failed or error
        self._low, self._smallest_failed = count, error

    def _guess(self) -> int:
        """Where a straight line through the two highest sizes tried below and above reaches the card's capacity."""
        known = sorted(self._tried)[-2:]
        count = self._low * 2 or 1
        if len(known) == 2 and known[1][1] > known[0][1]:
            (x0, y0), (x1, y1) = known
            estimate = self._below or self._above
            assert estimate is not None
            count = (x0 + (self._room(estimate) - y0) * (x1 - x0) // (y1 - y0)) // self._step
        least = self._low + 1 if self._bracketed or self._is_sure_of_line() else 2 * self._low
        return min(max(count, least), self._high - 1)

    def _is_sure_of_line(self) -> bool:
        """Whether a guess by a straight line is tried as it is while nothing has been found that does not fit."""
        return False


def _more(estimate: Estimate) -> int:
    """Bytes by which device memory may exceed the estimate, at the margin asked for."""
    assert estimate.fit is not None
    margin = estimate.fit.margin
    return max(0, estimate.doubts.at("device", 1.0 if margin is None else margin))
