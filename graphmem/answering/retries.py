"""When a run is made once more, and how.

A run takes shortcuts (:class:`graphmem.run.RunMode`) that hold for most steps, and notices where one did not. Each
function here is the answer to one of these: it is given how a run was made and how it went, and returns how the next
one is made, or None where it has nothing to mend. :data:`RETRIES` are asked in their order. Each takes away a part of
the mode and nothing gives one back, so there are at most as many further runs as there are functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from graphmem.answering.refusals import is_first_try, went_on
from graphmem.errors import CannotShortenError, CaptureError, ProgramOutOfMemory
from graphmem.run import Run, RunMode

#: How a run went: what it gave, or the error that ended it.
Outcome: TypeAlias = Run | CaptureError


def without_limit(mode: RunMode, outcome: Outcome) -> RunMode | None:
    """A program that ends when the card refuses it memory, or catches the error and gives up: its need is found without
    a limit. One that had done the same before is not run so: searching upwards for what fits, it would not end."""
    if not mode.limited:
        return None
    if isinstance(outcome, ProgramOutOfMemory):
        what = f"which ends the program: {outcome}"
    elif isinstance(outcome, Run) and outcome.refusals and not went_on(outcome.trace) and is_first_try(outcome.trace):
        what = f"which the program catches and gives up: {'; '.join(map(str, outcome.refusals))}"
    else:
        return None
    remark = f"out of memory, {what}; the figures are of a run without a limit"
    return replace(mode, limited=False, remark=remark)


def every_token(mode: RunMode, outcome: Outcome) -> RunMode | None:
    """The mode of the next run, with every token, if a long generation cannot be shortened."""
    return replace(mode, shortens=False) if mode.shortens and isinstance(outcome, CannotShortenError) else None


def every_iteration(mode: RunMode, outcome: Outcome) -> RunMode | None:
    """The mode of the next run if the program uses the results of a loop that was ended early."""
    if not (mode.ends_alike_loops and isinstance(outcome, Run) and outcome.lacks_iterations):
        return None
    return replace(mode, shortens=False, ends_alike_loops=False)


def own_loop(mode: RunMode, outcome: Outcome) -> RunMode | None:
    """The mode of the next run, of one loop, if the trace of the loop asked for does not follow from the other's."""
    if not (mode.covers_both_loops and isinstance(outcome, Run) and outcome.lacks_own_loop):
        return None
    return replace(mode, covers_both_loops=False)


RETRIES: tuple[Callable[[RunMode, Outcome], RunMode | None], ...] = (
    without_limit,
    every_token,
    every_iteration,
    own_loop,
)


def run_until_served(run: Callable[[RunMode], Run], mode: RunMode) -> Run:
    """The first run that no retry has anything to mend of. Raises the error of one that is not mended."""
    while True:
        try:
            outcome = run(mode)
        except CaptureError as error:
            following = _following(mode, error)
            if following is None:
                raise
        else:
            following = _following(mode, outcome)
            if following is None:
                return outcome
        mode = following


def _following(mode: RunMode, outcome: Outcome) -> RunMode | None:
    return next(filter(None, (retry(mode, outcome) for retry in RETRIES)), None)
