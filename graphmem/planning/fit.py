"""The largest batch, sequence length or other size that fits a card."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphmem.answering import stages
from graphmem.answering.question import Question, check_counts
from graphmem.answering.runs import RunCache, counted, labelled, silent
from graphmem.answering.sized import SIZES, SizedRuns, SizedRunsOfLayers
from graphmem.base.spellings import also_named
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.documents import of_fit
from graphmem.planning.request import Request, option_of
from graphmem.reports import Answer
from graphmem.reports.document import Document

#: Larger sizes are not tried unless asked for.
AT_MOST = 1 << 20
#: How often a capture may teach a template more.
_MOST_ROUNDS = 4


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
        """The size as its option is called."""
        return option_of(self.size)

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


@also_named("device", "gpu")
def fit(
    model: Any,
    example_inputs: Any = None,
    *,
    size: str = "batch",
    multiple_of: int = 1,
    at_most: int = AT_MOST,
    spare_bytes: int | None = None,
    grid: int = 0,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Largest:
    """Search the largest ``size`` (``batch``, ``seq_len``, or ``dim:NAME`` of an ONNX file) that fits ``device``.

    The answer is analysed in full; sizes on the way, and the next one, are written by a template once a capture has
    proven it (:mod:`graphmem.answering.sized`). More of the size is taken to need more memory. ``multiple_of`` and
    ``at_most`` bound what is tried. ``spare_bytes`` asks for as much of the card left over, without the allocator
    giving cached segments back; None takes whatever runs. ``grid``: so many sizes are looked at by template behind the
    search, where one is proven, for a page to choose among (:attr:`Largest.sizes`). ``options`` are those of
    :func:`graphmem.analyze`. Raises :class:`GraphmemError`.
    """
    for name, value in (("multiple_of", multiple_of), ("at_most", at_most)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name} is a whole number of at least 1, not {value!r}")
    check_counts(0, grid=grid)
    if at_most < multiple_of:
        raise UsageError(f"no multiple of {multiple_of} is at most {at_most}")
    request = Request(model, example_inputs, options)
    if size not in ("batch", "seq_len") and not size.startswith("dim:"):
        raise UsageError(
            f"cannot search {size!r}; accepted: batch, seq_len (--find seq-len), dim:NAME; and of what an engine "
            "serves: graphmem serve --find max-model-len, max-num-seqs or tp"
        )
    if options.get(size) is not None:
        raise UsageError(f"{size} is what is searched; do not give it")
    captures = RunCache()  # an ONNX file is read once

    def searched(at_most: int, limit: str) -> Largest:
        def question(value: int) -> Question:
            return request.changed(**{size: value}).question

        bound, told = at_most // multiple_of, say or request.progress
        asked = f"up to {bound} times {multiple_of}"
        with SizedRunsOfLayers(size, question, captures, keeps=asked) as sized:
            search = _Search(request, captures, sized, multiple_of, bound, spare_bytes, told, limit)
            return search.with_grid(search.run(), grid)

    try:
        return searched(at_most, f"at most {at_most // multiple_of * multiple_of} was asked for")
    except _FailsBeyond as beyond:
        if beyond.most < multiple_of:
            raise UsageError(f"no multiple of {multiple_of} is at most {beyond.most}: {beyond}") from None
        return searched(beyond.most, str(beyond))


class _FailsBeyond(Exception):
    """Sizes above ``most`` fail on every card."""

    def __init__(self, remark: Diagnostic, most: int) -> None:
        super().__init__(remark.message)
        self.most = most


class _Search:
    """Brackets the answer between a count of steps that fits and one that does not; lives for one search."""

    def __init__(
        self,
        request: Request,
        captures: RunCache,
        sized: SizedRuns,
        step: int,
        bound: int,
        spare_bytes: int | None,
        say: Callable[[str], None],
        limit: str = "",
    ) -> None:
        self._request, self._captures, self._sized = request, captures, sized
        self._size, self._step, self._bound, self._say = sized.name, step, bound, say
        self._spare_bytes, self._limit = spare_bytes, limit
        self._captured: set[int] = set()  # counts
        self._low, self._high = 0, bound + 1
        self._below: Estimate | None = None
        self._above: Estimate | None = None
        self._stopped_by = ""
        self._smallest_failed: GraphmemError | None = None
        self._tried: list[tuple[int, int]] = []
        self._safe: dict[int, Estimate | None] = {}  # count tried -> the estimate where it fits for sure
        self._sizes: dict[int, Estimate] = {}  # of values, without events

    def run(self) -> Largest:
        """Try sizes until neighbours bracket the answer."""
        self._begin_by_template()
        self._bracket()
        if self._below is not None and self._low not in self._captured:
            self._try(self._low, captured=True)
            if not self._sized.is_proven:  # the capture is not what the template gave
                self._begin_again()
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

    def with_grid(self, found: Largest, count: int) -> Largest:
        """The same with so many sizes from none up to the next one above the largest, as far as a template serves."""
        unit = self._step * self._unit
        last = max(found.value, found.above_value) // unit
        if not count or not self._sized.is_proven or not last:
            return found
        values = sorted({unit * -(-last * number // count) for number in range(1, count + 1)} - found.sizes.keys())
        self._sized.expect(values)
        inner = _ByTemplate(self._request, self._captures, self._sized, 1, self._bound, None, silent)
        for value in values:
            self._say(f"{self._size} {value:,} by template")
            with contextlib.suppress(_NotServed, GraphmemError):
                inner._analysed(value)
        return replace(found, sizes={**inner._sizes, **found.sizes})

    def _begin_again(self) -> None:
        """Search by captures alone."""
        self._low, self._high, self._below, self._above = 0, self._bound + 1, None, None
        self._tried, self._safe, self._sizes = [], {}, {}
        self._bracket()

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
                self._analysed(count)
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
            estimate = self._analysed(count, captured=captured)
        except GraphmemError as error:
            if self._below is None:
                self._begin_above(count, error)
                return
            self._high, self._above = count, None
            self._stopped_by = f"{self._size} {count * self._step} cannot be analysed: {error}"
            return
        if self._fits(estimate):
            self._low, self._below = count, estimate
        else:
            self._high, self._above, self._stopped_by = count, estimate, "memory"

    def _analysed(self, count: int, *, captured: bool = False) -> Estimate:
        """The estimate of so many steps of the size, noted; by template where one is proven. Raises
        :class:`GraphmemError`."""
        value = count * self._step
        say = labelled(self._say, f"{option_of(self._size).removeprefix('dim:')} {value:,}")
        is_written = self._sized.is_proven and not captured and self._sized.by_template(value) is not None
        if not is_written:
            self._sized.capture(value, say)
            self._captured.add(count)
        estimate = self._request.changed(**{self._size: value}).run(self._captures, say)
        _check_step(estimate, self._size, value)
        self._tried.append((value, estimate.device))
        self._sizes[value] = estimate.without_events()
        self._safe[count] = estimate if self._fits(estimate) and self._fits_for_sure(estimate) else None
        return estimate

    # --- by template ---

    @property
    def _unit(self) -> int:
        """Counts that a template serves are multiples of it."""
        return math.lcm(self._sized.block, self._step) // self._step

    def _begin_by_template(self) -> None:
        """Capture two small sizes and then the one where their template expects the answer, which proves it, or teaches
        it more. Where there is no template, nothing but a few sizes is tried."""
        if self._size not in SIZES or 3 * self._unit > self._bound:
            return
        try:
            for count in (2 * self._unit, 3 * self._unit):
                self._try(count, captured=True)
                if self._below is None or self._sized.refused:
                    return
            for _ in range(_MOST_ROUNDS):
                count = self._expected_count()
                if self._sized.is_proven or self._sized.refused or not self._low < count < self._high:
                    return
                self._try(count, captured=True)
        except (_NotServed, GraphmemError):  # the search will say why
            return

    def _expected_count(self) -> int:
        """The count at which the search ends by the template, proven or not."""
        inner = _ByTemplate(
            self._request, self._captures, self._sized, self._step * self._unit, self._bound // self._unit,
            self._spare_bytes, silent,
        )  # fmt: skip
        inner._low, inner._below = self._low // self._unit, self._below
        inner._tried = list(self._tried)
        inner._bracket()
        return inner._low * self._unit

    def _fits(self, estimate: Estimate) -> bool:
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
        is_near = self._bracketed or self._sized.is_proven  # a template is proven where it expects the answer
        least = self._low + 1 if is_near else 2 * self._low
        return min(max(count, least), self._high - 1)


def _check_step(estimate: Estimate, size: str, value: int) -> None:
    """Raises :class:`_FailsBeyond` for a sequence that is longer than any step's may be."""
    for one in estimate.diagnostics if size == "seq_len" else ():
        positions = dict(one.arguments).get("positions") if one.code is Code.STEP_FAILS else None
        if isinstance(positions, int) and positions < value:
            raise _FailsBeyond(one, positions)


class _NotServed(Exception):
    """A template does not serve a size."""


class _ByTemplate(_Search):
    """A search that captures nothing."""

    def _analysed(self, count: int, *, captured: bool = False) -> Estimate:
        value = count * self._step
        if self._sized.by_template(value) is None:
            raise _NotServed
        estimate = stages.estimate_of(
            self._request.changed(**{self._size: value}).question, self._captures, figures_only=True
        )
        self._tried.append((value, estimate.device))
        self._sizes[value] = estimate.without_events()
        return estimate


def _more(estimate: Estimate) -> int:
    """Bytes by which device memory may exceed the estimate, at the margin asked for."""
    assert estimate.fit is not None
    margin = estimate.fit.margin
    return max(0, estimate.doubts.at("device", 1.0 if margin is None else margin))
