"""The largest batch, sequence length or other size of a model that fits a card."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graphmem.answering import stages
from graphmem.answering.question import Question, check_counts
from graphmem.answering.runs import RunCache, labelled, silent
from graphmem.answering.sized import SIZES, SizedRuns, SizedRunsOfLayers
from graphmem.base.searching import AT_MOST
from graphmem.base.spellings import also_named
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.largest import Bracket, Largest, steps_up_to
from graphmem.planning.request import Request, option_of

#: How often a capture may teach a template more.
_MOST_ROUNDS = 4


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
    bound, limit = steps_up_to(at_most, multiple_of)
    request = Request(model, example_inputs, options)
    if size not in ("batch", "seq_len") and not size.startswith("dim:"):
        raise UsageError(
            f"cannot search {size!r}; accepted: batch, seq_len (--find seq-len), dim:NAME; and of what an engine "
            "serves: graphmem serve --find max-model-len, max-num-seqs or tp"
        )
    if options.get(size) is not None:
        raise UsageError(f"{size} is what is searched; do not give it")
    captures = RunCache()  # an ONNX file is read once

    def searched(bound: int, limit: str) -> Largest:
        def question(value: int) -> Question:
            return request.changed(**{size: value}).question

        told = say or request.progress
        asked = f"up to {bound} times {multiple_of}"
        with SizedRunsOfLayers(size, question, captures, keeps=asked) as sized:
            search = _Search(request, captures, sized, multiple_of, bound, spare_bytes, told, limit)
            return search.with_grid(search.run(), grid)

    try:
        return searched(bound, limit)
    except _FailsBeyond as beyond:
        if beyond.most < multiple_of:
            raise UsageError(f"no multiple of {multiple_of} is at most {beyond.most}: {beyond}") from None
        return searched(beyond.most // multiple_of, str(beyond))


class _FailsBeyond(Exception):
    """Sizes above ``most`` fail on every card."""

    def __init__(self, remark: Diagnostic, most: int) -> None:
        super().__init__(remark.message)
        self.most = most


class _Search(Bracket):
    """By captures, and by a template once one is proven."""

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
        super().__init__(sized.name, step, bound, spare_bytes, say, limit)
        self._request, self._captures, self._sized = request, captures, sized
        self._captured: set[int] = set()  # counts

    def run(self) -> Largest:
        """Try sizes until neighbours bracket the answer."""
        self._begin_by_template()
        self._bracket()
        if self._below is not None and self._low not in self._captured:
            self._try(self._low, captured=True)
            if not self._sized.is_proven:  # the capture is not what the template gave
                self._begin_again()
        return self.found()

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
                inner.analysed(value)
        return replace(found, sizes={**inner._sizes, **found.sizes})

    def _begin_again(self) -> None:
        """Search by captures alone."""
        self._low, self._high, self._below, self._above = 0, self._bound + 1, None, None
        self._tried, self._safe, self._sizes = [], {}, {}
        self._bracket()

    def analysed(self, count: int, *, captured: bool = False) -> Estimate:
        """The estimate of so many steps of the size, noted; by template where one is proven. Raises
        :class:`GraphmemError`."""
        value = count * self._step
        if self._sized.is_proven:
            self._look_ahead(count)
        say = labelled(self._say, f"{option_of(self._size).removeprefix('dim:')} {value:,}")
        is_written = self._sized.is_proven and not captured and self._sized.by_template(value) is not None
        if not is_written:
            self._sized.capture(value, say)
            self._captured.add(count)
        estimate = self._request.changed(**{self._size: value}).run(self._captures, say)
        _check_step(estimate, self._size, value)
        self._note(value, estimate)
        return estimate

    def _look_ahead(self, count: int) -> None:
        """Have the sizes written that may be tried next, with the one of so many steps."""
        if self._sized.is_short:
            ends = sorted({self._low, self._high, *self._safe})
            low = max((one for one in ends if one < count), default=0)
            high = min((one for one in ends if one > count), default=self._bound)
            near = {count + sign * width for sign in (-1, 1) for width in (1, 4, 16)}
            counts = dict.fromkeys(
                [*halvings(low, count, high, _AHEAD), *sorted(one for one in near if low < one < high)]
            )
            self._sized.expect([self._step * one for one in counts])

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

    def _is_sure_of_line(self) -> bool:
        return self._sized.is_proven  # a template is proven where it expects the answer


def _check_step(estimate: Estimate, size: str, value: int) -> None:
    """Raises :class:`_FailsBeyond` for a sequence that is longer than any step's may be."""
    for one in estimate.diagnostics if size == "seq_len" else ():
        positions = dict(one.arguments).get("positions") if one.code is Code.STEP_FAILS else None
        if isinstance(positions, int) and positions < value:
            raise _FailsBeyond(one, positions)


class _NotServed(Exception):
    """A template does not serve a size."""


#: Halvings of the interval that are written with a size: to open the card that is pretended takes as long as a dozen.
_AHEAD = 3


def halvings(low: int, count: int, high: int, times: int) -> list[int]:
    """``count``, and the counts that a search may try next: the middles on both sides, and theirs."""
    found, sides = [count], [(low, count), (count, high)]
    for _ in range(times):
        middles = [(start, (start + end) // 2, end) for start, end in sides if end - start > 1]
        found += [middle for _, middle, _ in middles]
        sides = [side for start, middle, end in middles for side in ((start, middle), (middle, end))]
    return found


class _ByTemplate(_Search):
    """A search that captures nothing."""

    def analysed(self, count: int, *, captured: bool = False) -> Estimate:
        value = count * self._step
        self._look_ahead(count)
        if self._sized.by_template(value) is None:
            raise _NotServed
        estimate = stages.estimate_of(
            self._request.changed(**{self._size: value}).question, self._captures, figures_only=True
        )
        self._tried.append((value, estimate.device))
        self._sizes[value] = estimate.without_events()
        return estimate
