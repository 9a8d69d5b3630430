"""Work shared out over a few processes, the results in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """``map``, ``jobs`` at a time; the function and what it takes and gives are pickled. One job runs here."""
    if jobs <= 1 or len(items) <= 1:
        yield from map(function, items)
        return
    # Spawned, not forked: a copy of a process with torch's threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, items)
