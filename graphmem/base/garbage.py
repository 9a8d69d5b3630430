"""How often Python looks for cycles that are garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: New objects after which Python looks, as it starts: so it does while a program runs whose tensors die with the cycles
#: that hold them.
USUAL = gc.get_threshold()[0]
#: Where hundreds of thousands of objects are made and hardly any is garbage, as by imports and by templates: looking
#: after every 700 takes a tenth to a third of the time.
MANY = 100_000


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
