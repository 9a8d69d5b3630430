"""Random numbers that a program draws on the host, from the generators that everybody shares."""

from __future__ import annotations

import random
import sys
from typing import Any


def count() -> tuple[Any, ...]:
    """Where the generators of ``random`` and of numpy stand: another value after numbers were drawn from them."""
    words, normal = random.getstate()[1:]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return words[-1], words[0], normal
    state = numpy.random.get_state(legacy=False)
    return words[-1], words[0], normal, state["state"]["pos"], state["state"]["key"][0], state["gauss"]
