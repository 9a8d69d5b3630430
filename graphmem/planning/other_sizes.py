"""The same step at other batches or lengths of sequences, by template, for a page to choose among.

A template is learnt from captures at three sizes. It has to give what was analysed too, or nothing is offered: then
there is no figure of a page that a capture has not been held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphmem.answering import stages
from graphmem.answering.runs import Progress, RunCache, labelled, silent
from graphmem.answering.sized import SIZES, SizedRuns, SizedRunsOfLayers
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.request import Request, option_of

#: Sizes to choose among, and how many times the size that was asked for the largest is.
_GRID, _TIMES = 24, 4
#: The first captures, in blocks of the size.
_SMALL = (2, 3)
#: Events of a step, above which more captures (of 20,000 events, three to six seconds each) take too long for a page.
_MOST_EVENTS = 30_000


def other_sizes(
    model: Any, options: Mapping[str, Any], estimate: Estimate, say: Progress = silent
) -> dict[str, dict[int, Estimate]]:
    """Estimates, without events, by the option of each size that was given (``batch``, ``seq-len``) and its value, the
    ``estimate`` of the question among them; a size of which there is no template is left out. ``options`` are those of
    :func:`graphmem.analyze`."""
    request = Request(model, None, {name: value for name, value in options.items() if name != "ranks"})
    if (
        options.get("ranks") is not None
        or not isinstance(model, str)
        or request.question.is_onnx
        or request.question.is_compiled
        or not _is_short(estimate)
    ):
        return {}
    return {
        option_of(size): found
        for size in SIZES
        if (value := options.get(size)) and len(found := _at_sizes(request, size, value, estimate, say)) > 1
    }


def _is_short(estimate: Estimate) -> bool:
    """Whether it is a step that was captured, and not a long one."""
    several = estimate.details.keys() & {"ranks", "followed", "runs"}
    return estimate.trace is not None and len(estimate.trace) <= _MOST_EVENTS and not several


def too_long(estimate: Estimate) -> str:
    """Why there is nothing to choose for a step that is longer than a page waits for; empty for any other."""
    if estimate.trace is None or len(estimate.trace) <= _MOST_EVENTS:
        return ""
    return (
        "No slider of sizes here: it takes captures of others, too long a wait for a step of "
        f"{len(estimate.trace):,} events. graphmem sweep MODEL --vary batch=1,2,4 -o sweep.html makes them."
    )


def _at_sizes(request: Request, size: str, value: int, estimate: Estimate, say: Progress) -> dict[int, Estimate]:
    """Estimates by the size around the ``value`` that was asked for; none where there is no proven template."""
    if value < _SMALL[0]:  # the smallest that a template gives, as one row often goes another way
        return {}
    captures = RunCache()
    asked = f"page of {value}"
    with SizedRunsOfLayers(size, lambda one: request.changed(**{size: one}).question, captures, keeps=asked) as sized:
        try:
            last = _learn(request, sized, value, captures, say)
            step = -(-last // _GRID // sized.block) * sized.block or sized.block
            values = [one for one in range(step, last + 1, step) if one != value]
            again = _written(request, sized, captures, value, [value, *values])
            if value % sized.block == 0 and (again is None or again.peak != estimate.peak):
                return {}
            written = ((one, _written(request, sized, captures, one)) for one in values)
            found = {one: made for one, made in written if made is not None}
        except GraphmemError:
            return {}
    return {**found, value: estimate.without_events()} if found else {}


def _learn(request: Request, sized: SizedRuns, value: int, captures: RunCache, say: Progress) -> int:
    """Capture small sizes and a large one, up to which the template serves; the large one. Raises
    :class:`GraphmemError`."""
    large = max(_TIMES * value // sized.block, _SMALL[-1] + 1) * sized.block
    for one in (*(blocks * sized.block for blocks in _SMALL), *_large(sized, large, value)):
        sized.capture(one, labelled(say, f"{option_of(sized.name)} {one:,}, for the page"))
        if sized.refused:
            raise GraphmemError(sized.refused)
        made = stages.estimate_of(request.changed(**{sized.name: one}).question, captures, figures_only=True)
        if sized.is_proven and not made.failure:
            return one
    raise GraphmemError("no template is proven")


def _large(sized: SizedRuns, large: int, value: int) -> Iterator[int]:
    """The largest size first; then, where that fails or proves nothing, the one that was asked for."""
    yield large
    if value % sized.block == 0 and value > _SMALL[-1] * sized.block:
        yield value


def _written(
    request: Request, sized: SizedRuns, captures: RunCache, value: int, expected: list[int] | None = None
) -> Estimate | None:
    """The estimate of a size by template; None where it does not serve."""
    if expected is not None:
        sized.expect(expected)
    if sized.by_template(value) is None:
        return None
    question = request.changed(**{sized.name: value}).question
    return stages.estimate_of(question, captures, figures_only=True).without_events()
