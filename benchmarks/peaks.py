"""How many peaks a second Python is told: python benchmarks/peaks.py [nodes ...]

Of layered graphs (100, 1,000 and 10,000 nodes) with orders that differ by a change each: asked anew for a whole order
(``graphmem.peak``), and after a change (``graphmem.Peak``: neighbours swapped, a node moved, a buffer computed again
and undone). Prints asks a second of processor time, and each row's ratio to an Estimate of each order's own trace.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import graphmem
from graphmem.errors import GraphError
from graphmem.plan_memory import Graph
from tests.plan_memory.graphs import layered

#: Seconds of processor time that a row is measured for.
SECONDS = 1.0


def a_second(ask: Callable[[], object]) -> float:
    """How often a second ``ask`` answers, after once that is not counted."""
    ask()
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        ask()
        count += 1
    return count / spent


def estimated(graph: Graph) -> int:
    """What an ask cost before: the order written as a trace, and all that is known of its replay."""
    return graphmem.replay_trace(graph.trace()).reserved


def changes(graph: Graph, draw: random.Random) -> dict[str, Callable[[], object]]:
    """What is asked, by name."""
    count = len(graph.nodes)
    order = np.array(graph.order)
    now = graphmem.Peak(graph)

    def swapped() -> int:
        while True:
            try:
                now.swap(draw.randrange(count - 1))
                return now.live
            except GraphError:
                continue

    def moved() -> int:
        while True:
            place = draw.randrange(count)
            try:
                now.move(place, min(count - 1, max(0, place + draw.randint(-8, 8))))
                return now.live
            except GraphError:
                continue

    def again() -> int:
        while True:
            buffer = draw.randrange(1, count)
            try:
                now.recompute(buffer, graph.users_of[buffer][-1])
                break
            except (GraphError, IndexError):
                continue
        live = now.live
        now.undo()
        return live

    def reserved() -> int:
        swapped()
        return now.reserved()

    return {
        "peak(graph, 'live', order)": lambda: graphmem.peak(graph, "live", order),
        "peak(graph, 'pytorch', order)": lambda: graphmem.peak(graph, "pytorch", order),
        "Peak: swap, live": swapped,
        "Peak: move, live": moved,
        "Peak: recompute, live, undo": again,
        "Peak: swap, reserved()": reserved,
    }


def main(sizes: list[int]) -> None:
    """Measure and print."""
    for nodes in sizes:
        graph = layered(nodes)
        whole = a_second(partial(estimated, graph))
        print(f"{nodes} nodes: an Estimate of a trace of its own {whole:,.1f} a second")
        for name, ask in changes(graph, random.Random(0)).items():
            found = a_second(ask)
            print(f"  {name:32} {found:>9,.0f} a second, {found / whole:,.0f} times an Estimate")


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [100, 1_000, 10_000])
