"""Random numbers that a program draws on the host: from the generators that everybody shares, and from its own."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Sequence
from typing import Any


def count(own: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Where the generators of ``random`` and of numpy stand, and those in ``own``: another value after numbers were
    drawn from them."""
    numpy = sys.modules.get("numpy")
    shared = None if numpy is None else _of_numpy(numpy.random.get_state(legacy=False))
    return _of_python(random.getstate()), shared, *map(_of, own)


def own_generators() -> list[Any]:
    """The generators of numpy's that the program has made, wherever it keeps them: all that there are. A few ms.
    Python's are left out, as libraries have their own, for the names of files and symbols."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return [one for one in gc.get_objects() if type(one) in kinds]


def _of(generator: Any) -> tuple[Any, ...]:
    kept = getattr(generator, "bit_generator", None)
    return _of_numpy(generator.get_state(legacy=False) if kept is None else kept.state)


def _of_python(state: tuple[Any, ...]) -> tuple[Any, ...]:
    words, normal = state[1:]
    return words[-1], words[0], normal


def _of_numpy(state: dict[str, Any]) -> tuple[Any, ...]:
    """The same of numpy's, which may be of any kind."""
    own = dict(state["state"])
    words = own.pop("key", (0,))
    return int(words[0]), *map(str, own.values()), *(state.get(name) for name in ("gauss", "has_uint32", "uinteger"))
