"""Settings of Python's garbage collector: after how many new objects it runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: New objects after which Python looks, as it starts: so it does while a program runs whose tensors die with the cycles
#: that hold them.
USUAL = gc.get_threshold()[0]
#: Where hundreds of thousands of objects are made and hardly any is garbage, as by imports and by templates: looking
#: after every 700 takes a tenth to a third of the time.
MANY = 1_000_000


def look_after(objects: int) -> None:
    """Look for garbage after so many new objects."""
    gc.set_threshold(objects, *gc.get_threshold()[1:])


@contextlib.contextmanager
def looking_after(objects: int) -> Iterator[None]:
    """Look for garbage after so many new objects, and in the end as before."""
    before = gc.get_threshold()[0]
    look_after(objects)
    try:
        yield
    finally:
        look_after(before)


@contextlib.contextmanager
def as_usual() -> Iterator[None]:
    """Look as Python does while a program runs. What was there before, such as libraries with half a million objects,
    is looked through when everything is and not before."""

    def all_of_it(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            gc.unfreeze()

    with contextlib.ExitStack() as stack:
        if gc.get_freeze_count() == 0:  # nobody else has put objects aside
            gc.freeze()
            gc.callbacks.append(all_of_it)
            stack.callback(gc.unfreeze)
            stack.callback(gc.callbacks.remove, all_of_it)
        stack.enter_context(looking_after(USUAL))
        yield
