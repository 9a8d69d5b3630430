"""How often Python looks for cycles that are garbage."""

from __future__ import annotations

import gc

#: Python's own, as it starts.
_USUAL = gc.get_threshold()
#: New objects from which on it looks, in a short command: its imports make hundreds of thousands and no garbage, and
#: looking after every 700 takes a tenth of its time.
_MANY = 100_000


def look_rarely() -> None:
    """For a command of its own process."""
    gc.set_threshold(_MANY)


def look_as_usual() -> None:
    """While a program runs whose tensors die with the cycles that hold them."""
    gc.set_threshold(*_USUAL)
