"""Tensors that die when Python looks for cycles of garbage.

It looks after so many new objects (``gc.get_threshold``), and a capture makes more of them than a card's run: what the
trace keeps of every operator counts, and a fake tensor is two objects or more. So it looks more often, and a card's run
may wait until as many objects are garbage as make Python look. Where the program itself asks for it (``gc.collect()``),
they die as there.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from graphmem.capture.record.storages import Storages
from graphmem.trace import EventKind, Place

#: Objects of a capture in the place of one of a card's run: a fake tensor has a dictionary.
_OBJECTS = 2


class Garbage:
    """``most_bytes``: of the card, the most that one look of a card's run may give back, requested bytes."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._first_row = 0
        self.most_bytes = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note every look until the end. What is garbage then may be so since the program returned."""
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._first_row = len(self._storages.builder.rows)
        elif about["collected"] and not _is_asked():
            self.most_bytes = max(self.most_bytes, int(self._freed() * _looks_in_one(about["collected"])))

    def _freed(self) -> int:
        builder = self._storages.builder
        freed = [row[1] for row in builder.rows[self._first_row :] if row[0] == EventKind.FREE]
        return sum(builder.storage_bytes[index] for index in freed if builder.places[index] is Place.DEVICE)


def _looks_in_one(collected: int) -> float:
    """How many looks that find so many objects may be one in a card's run, where fewer are made in the same time: as
    many as find all the objects that make Python look, of which half are there for a capture alone."""
    return max(1.0, gc.get_threshold()[0] / max(1.0, collected / _OBJECTS))


def _is_asked() -> bool:
    """Whether the function that runs calls ``gc.collect``."""
    return "collect" in sys._getframe(2).f_code.co_names
