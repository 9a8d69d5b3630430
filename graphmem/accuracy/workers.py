"""Work shared out over a few processes, the results in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Imported once, in the process that workers are forked from.
_PRELOADED = ("torch", "graphmem.analyze", "graphmem.capture.session.run", "graphmem.capture.loop.step")


def side_by_side(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    cost: Callable[[Item], float] | None = None,
) -> Iterator[Result]:
    """``map``, ``jobs`` at a time; the function and what it takes and gives are pickled. One job runs here.

    The items of the highest ``cost`` are begun first, so that none of them is left alone at the end.
    """
    if jobs <= 1 or len(items) <= 1:
        yield from map(function, items)
        return
    # Not forked from here: a copy of a process with torch's threads may hang. A server that has only imported has none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    order = sorted(range(len(items)), key=lambda at: -cost(items[at]) if cost else 0.0)
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {at: pool.submit(function, items[at]) for at in order}
        for at in range(len(items)):
            yield futures[at].result()
