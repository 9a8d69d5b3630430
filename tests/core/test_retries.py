"""When a run is made once more: every retry takes away a part of the mode, and the first run that serves is the one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.answering.retries import RETRIES, Outcome, run_until_served
from graphmem.errors import CannotShortenError, CaptureError, ProgramOutOfMemory
from graphmem.run import Run, RunMode
from graphmem.trace import TraceBuilder

TRACE = TraceBuilder("nothing").build()
SERVES = Run(TRACE)
_SHORTCUTS = [field.name for field in fields(RunMode) if field.name not in ("room", "remark")]

OUTCOMES = st.sampled_from(
    [
        SERVES,
        Run(TRACE, lacks_iterations=True),
        Run(TRACE, lacks_own_loop=True),
        CannotShortenError("not regular"),
        ProgramOutOfMemory("out of memory"),
        CaptureError("the step raised"),
    ]
)
MODES = st.builds(RunMode, **{name: st.booleans() for name in _SHORTCUTS})


def of(outcomes: list[Outcome], made: list[RunMode]) -> Callable[[RunMode], Run]:
    """A step whose runs go so, one after the other; the modes of them are added to ``made``."""

    def run(mode: RunMode) -> Run:
        made.append(mode)
        outcome = outcomes[len(made) - 1]
        if isinstance(outcome, CaptureError):
            raise outcome
        return outcome

    return run


@given(MODES, st.lists(OUTCOMES, min_size=len(RETRIES) + 1, max_size=len(RETRIES) + 1))
def test_every_further_run_has_less_of_the_mode(mode: RunMode, outcomes: list[Outcome]) -> None:
    made: list[RunMode] = []
    try:
        found: Outcome = run_until_served(of(outcomes, made), mode)
    except CaptureError as error:
        found = error
    assert found is outcomes[len(made) - 1]
    assert made[0] == mode
    for before, after in itertools.pairwise(made):
        taken = {name for name in _SHORTCUTS if getattr(before, name) and not getattr(after, name)}
        assert taken
        assert not any(getattr(after, name) and not getattr(before, name) for name in _SHORTCUTS)
    assert all(retry(made[-1], found) is None for retry in RETRIES)


def test_a_run_that_serves_is_the_only_one() -> None:
    made: list[RunMode] = []
    assert run_until_served(of([SERVES], made), RunMode(room=1, shortens=True)) is SERVES
    assert len(made) == 1


def test_what_was_out_of_memory_is_run_with_more_room_and_says_so() -> None:
    made: list[RunMode] = []
    outcomes: list[Outcome] = [CannotShortenError("no"), ProgramOutOfMemory("train.py:3: 2 GiB"), SERVES]
    assert run_until_served(of(outcomes, made), RunMode(room=1, shortens=True)) is SERVES
    assert [(mode.room, mode.shortens) for mode in made] == [(1, True), (1, False), (1024, False)]
    assert "train.py:3: 2 GiB" in made[-1].remark
    assert not made[1].remark


def test_an_error_that_no_retry_mends_is_raised() -> None:
    made: list[RunMode] = []
    with pytest.raises(ProgramOutOfMemory, match="once"):
        run_until_served(of([ProgramOutOfMemory("once"), ProgramOutOfMemory("twice")], made), RunMode(room=1))
    assert len(made) == 2
