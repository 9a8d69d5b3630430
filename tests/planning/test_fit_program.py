"""The largest number that a whole program can be given: the search, by programs that are traces of one tensor."""

from __future__ import annotations

import pytest

from graphmem import Estimate, replay_trace
from graphmem.errors import GraphmemError, SourceError
from graphmem.planning.fit_program import fit_program
from graphmem.planning.largest import Largest
from graphmem.trace import Category, TraceBuilder

_CARD = 15 << 30
_SAMPLE = 600 << 20


def attempt(samples: int) -> Estimate:
    builder = TraceBuilder("a program")
    operator = builder.operator("step", phase=builder.phase(1, "forward"))
    builder.alloc(samples * _SAMPLE, operator, Category.ACTIVATION)
    return replay_trace(builder.build(), device="T4")


def search(run=attempt, multiple_of: int = 1, at_most: int = 1 << 20) -> Largest:  # type: ignore[no-untyped-def]
    return fit_program("bs", run, multiple_of=multiple_of, at_most=at_most, spare_bytes=None, say=lambda _: None)


def _fits(estimate: Estimate | None) -> bool:
    assert estimate is not None
    assert estimate.fit is not None
    return estimate.fit.fits


def test_neighbours_bracket_the_answer() -> None:
    found = search()
    assert (_fits(found.estimate), _fits(found.above)) == (True, False)
    assert (found.above_value, found.name) == (found.value + 1, "bs")
    assert found.value * _SAMPLE < _CARD < (found.value + 2) * _SAMPLE
    assert "The largest bs that fits is" in str(found)


def test_multiples_and_limits() -> None:
    assert (search(multiple_of=8).value, search(multiple_of=8).above_value) == (24, 32)
    limited = search(at_most=10)
    assert (limited.value, limited.above) == (10, None)
    assert "at most 10" in limited.stopped_by


def test_data_that_end_before_the_card() -> None:
    found = search(lambda samples: attempt(min(samples, 5)))
    assert (found.value, found.safe_value, found.above) == (5, 5, None)
    assert "its data may have no more" in found.stopped_by


def test_data_that_end_where_the_program_fails_with_some_numbers() -> None:
    def picky(samples: int) -> Estimate:
        if samples == 5:
            raise SourceError("batches of five are none")
        return attempt(min(samples, 6))

    found = search(picky)
    assert (found.value, found.above) == (6, None)
    assert "its data may have no more" in found.stopped_by


def test_a_number_with_which_the_program_fails() -> None:
    def failing(samples: int) -> Estimate:
        if samples > 7:
            raise SourceError("batch of 8 for 7 rows")
        return attempt(samples)

    found = search(failing)
    assert (found.value, found.above) == (7, None)
    assert "batch of 8" in found.stopped_by


def test_a_program_that_always_fails() -> None:
    def failing(samples: int) -> Estimate:
        raise SourceError(f"no file data-{samples}")

    with pytest.raises(GraphmemError, match="no file data-1"):
        search(failing)


def test_not_even_the_smallest() -> None:
    found = search(lambda samples: attempt(samples * 100))
    assert (found.value, found.estimate, found.above_value) == (0, None, 1)
