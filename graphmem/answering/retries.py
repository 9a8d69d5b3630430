"""When a run is made once more, and how.

A run takes shortcuts (:class:`graphmem.run.RunMode`) that hold for most steps, and notices where one did not. Each
function here is the answer to one of these: it is given how a run was made and how it went, and returns how the next
one is made, or None where it has nothing to mend. :data:`RETRIES` are asked in their order. Each takes away a part of
the mode and nothing gives one back, so there are at most as many further runs as there are functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from graphmem.answering.refusals import is_first_try, went_on
from graphmem.errors import CannotShortenError, CaptureError, GraphmemError, ProgramOutOfMemory
from graphmem.run import Run, RunMode
from graphmem.training.program import OPTIMIZER_STEPS, LibraryFunction

#: How a run went: what it gave, or the error that ended it.
Outcome: TypeAlias = Run | CaptureError


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
    every_token,
    every_iteration,
    own_loop,
)


#: Times the memory of the card at which who was refused some is run once more: the first where the refused work had
#: not been done before. Who fills whatever memory there is, or searches upwards, does the same again and again.
_ROOMS = 1024, 16


def run_until_served(run: Callable[[RunMode], Run], mode: RunMode) -> Run:
    """The first run that no retry has anything to mend of; one that was refused memory is made once more with room for
    all that it asks for, and that is the run of who gave up. Raises the error of one that is not mended."""
    outcome, mode = _until_served(run, mode)
    if isinstance(outcome, Run) and (opens := _loops_undone(outcome)):
        outcome, mode = _with_loops_of_libraries(run, replace(mode, opens=opens), outcome, mode)
    refused = isinstance(outcome, ProgramOutOfMemory) or (isinstance(outcome, Run) and bool(outcome.refusals))
    if refused and mode.room:
        outcome = _with_room(run, mode, outcome)
    if isinstance(outcome, CaptureError):
        raise outcome
    return outcome


def _until_served(run: Callable[[RunMode], Run], mode: RunMode) -> tuple[Outcome, RunMode]:
    while True:
        try:
            outcome: Outcome = run(mode)
        except CaptureError as error:
            outcome = error
        following = _following(mode, outcome)
        if following is None:
            return outcome, mode
        mode = following


def is_left(run: Run) -> bool:
    """Whether a program was left, and what it does later was not seen."""
    return run.ending is not None and run.ending.how == "left"


def has_raised(run: Run) -> bool:
    """Whether a program ended with an error of its own: a library may have found an epoch without batches."""
    return run.ending is not None and run.ending.how == "raised"


def _loops_undone(run: Run) -> tuple[LibraryFunction, ...]:
    """The functions of libraries whose loops were left in the middle, and what they do behind them was not seen: a
    program that is over, or that went on behind them."""
    is_over = is_left(run) or has_raised(run)
    return tuple(dict.fromkeys((*run.gone_on_in, *(run.left_in if is_over else ()))))


def _with_loops_of_libraries(
    run: Callable[[RunMode], Run], opened: RunMode, first: Run, mode: RunMode
) -> tuple[Outcome, RunMode]:
    """The run in which loops of libraries end as the program's own do, and its mode; the ``first`` one and its mode if
    that one is left as well, or fails for what a library finds undone. Where both fail it is the one that came further.
    """
    with contextlib.suppress(GraphmemError):
        again, further = _until_served(run, opened)
        if isinstance(again, Run) and not is_left(again) and _comes_further(again, first):
            return again, further
    return first, mode


def _comes_further(again: Run, first: Run) -> bool:
    """Whether a run did not fail and trained as far as the first one should, or came further where that one failed."""
    if again.ending is None or first.ending is None:
        return False
    if again.ending.failed:
        return first.ending.failed and again.ending.steps > first.ending.steps
    return again.ending.steps >= min(first.ending.steps, OPTIMIZER_STEPS)


def _with_room(run: Callable[[RunMode], Run], mode: RunMode, first: Outcome) -> Outcome:
    """The run that is served, of a program that gave up; else the ``first`` one, with it where there is one."""
    goes_on = isinstance(first, Run) and went_on(first.trace)
    is_first = not isinstance(first, Run) or is_first_try(first.trace)
    remark = ""
    if not goes_on:
        what = str(first) if isinstance(first, CaptureError) else "; ".join(map(str, first.refusals))
        remark = f"out of memory, which ends the program: {what}; the figures are of a run with room for all of it"
    with contextlib.suppress(GraphmemError):
        served, _ = _until_served(run, replace(mode, room=_ROOMS[0 if is_first else 1], remark=remark))
        if isinstance(served, Run) and not served.refusals:
            return replace(first, with_room=served) if goes_on and isinstance(first, Run) else served
    return first


def _following(mode: RunMode, outcome: Outcome) -> RunMode | None:
    return next(filter(None, (retry(mode, outcome) for retry in RETRIES)), None)
