"""How often Python looks for cycles that are garbage (``graphmem.base.garbage``)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from graphmem.base import garbage


@pytest.fixture(autouse=True)
def nobody_looks() -> Iterator[None]:
    """Python looks only where a test asks it to, and nothing is put aside (``conftest.py`` does)."""
    gc.disable()
    gc.unfreeze()
    yield
    gc.freeze()
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_was_there_before_is_looked_through_when_everything_is() -> None:
    before, old = gc.get_threshold(), weakref.ref(Cycle())
    with garbage.as_usual():
        assert gc.get_threshold()[0] == garbage.USUAL
        new = weakref.ref(Cycle())
        gc.collect(1)
        assert old() is not None
        assert new() is None
        gc.collect()
        assert old() is None
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_objects_that_others_put_aside_stay_there() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with garbage.as_usual():
            gc.collect()
        assert abs(gc.get_freeze_count() - count) < count / 2
    finally:
        gc.unfreeze()
