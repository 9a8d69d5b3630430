"""Random numbers that a program draws on the host, from the generators that everybody shares."""

from __future__ import annotations

import random
import sys
from typing import Any


def count() -> tuple[Any, ...]:
    """Where the generators of ``random`` and of numpy stand: another value after numbers were drawn from them."""
    words, normal = random.getstate()[1:]
    numpy = sys.modules.get("numpy")
    return words[-1], words[0], normal, None if numpy is None else _of_numpy(numpy)


def _of_numpy(numpy: Any) -> tuple[Any, ...]:
    """The same of numpy's, which may be of another kind than the usual one."""
    state = numpy.random.get_state(legacy=False)
    own = dict(state["state"])
    words = own.pop("key", (0,))
    return int(words[0]), *map(str, own.values()), state.get("gauss"), state.get("has_uint32")
