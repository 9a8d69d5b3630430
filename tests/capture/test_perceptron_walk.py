"""A plain analysis of a perceptron stays in the rooms that it needs; layers that it does not need are not installed."""

from __future__ import annotations

import pytest

from tests import places
from tests.support.perceptron_walk import Walk, walks_of

#: What is not a plain step's: several processes, the compiler, whole programs.
_OF_OTHERS = {f"capture/{room}" for room in ("compile", "distributed", "program")}


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    """Of the first and of the second analysis of a process."""
    return walks_of(places.ROOT)


def test_a_perceptron_enters_few_files_and_no_room_of_other_programs(walks: list[Walk]) -> None:
    assert not walks[0].rooms & _OF_OTHERS
    assert not walks[1].rooms & _OF_OTHERS
    assert len(walks[0].files) <= 140
    assert len(walks[1].files) <= 116


def test_the_walk_seldom_comes_back_to_a_room(walks: list[Walk]) -> None:
    assert walks[0].entered_again <= 60
    assert walks[1].entered_again <= 54
