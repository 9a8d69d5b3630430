"""Orders that differ from process to process: ONNX Runtime goes through maps by address, and addresses are random.

Initializers: ``SaveInitializedTensors`` (``core/framework/session_state_utils.cc``) goes through a hash map. On the CPU
every initializer is reserved by itself, so nothing follows; on CUDA they come from regions, chunks of which are handed
out whole where the rest would be small. So what is in use after loading, and sometimes the regions, differ from process
to process: ``tests/golden/onnxruntime/cuda`` has three processes of every session. Some orders are drawn, and each is
replayed.

Layout conversions: ``NchwcTransformerImpl::Finalize`` (``core/optimizer/nchwc_transformer.cc``) walks a map by address,
so each process numbers the conversions back to rows of channels otherwise; of two producers the one with the higher
number goes first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from graphmem.allocators.base import Allocator
from graphmem.base.figures import MEASURED, TRACE_LEVELS, Cause, Spread, seen
from graphmem.graph.model import Graph, Node
from graphmem.graph.order import execution_order
from graphmem.replay import Replay, replay
from graphmem.trace import Category, EventKind, Place, Trace

# --- initializers -----------------------------------------------------------------------------------------------------

#: Orders that are drawn, as many as are for traces of many events, and at most, of those that differ.
DRAWS, FEWER_DRAWS, MOST_DRAWS = 15, 5, 60
_MANY_EVENTS = 6000
_NAME = "order of initializers"
_WHY = "a hash map of random order in every process"


def drawn(trace: Trace) -> Iterator[Trace]:
    """``trace`` with its initializers in some orders, each as likely as the others; itself where there is one only."""
    allocations = np.flatnonzero(trace.kinds == EventKind.ALLOC)
    by_session: dict[int, list[int]] = {}
    for event in allocations.tolist():
        storage = trace.storages[int(trace.subjects[event])]
        if storage.category == Category.PARAMETER and storage.place == Place.DEVICE:
            by_session.setdefault(storage.stream, []).append(event)
    if not any(len(events) > 1 for events in by_session.values()):
        yield trace
        return
    least = DRAWS if len(trace) <= _MANY_EVENTS else FEWER_DRAWS
    for seed in range(max(least, min(MOST_DRAWS, _MANY_EVENTS // len(trace)))):
        subjects = trace.subjects.copy()
        for events in by_session.values():
            order = random.Random(seed).sample(events, len(events))
            subjects[events] = trace.subjects[order]
        yield replace(trace, subjects=subjects)


def typical(trace: Trace, make: Callable[[], Allocator]) -> tuple[Trace, list[Replay]]:
    """The order whose total is in the middle, and the runs of all; ``make`` gives a fresh arena without a limit."""
    traces, runs = [], []
    for one in drawn(trace):
        traces.append(one)
        runs.append(replay(one, make()))
        if len(runs) == DRAWS and len(set(map(_peaks, runs))) == 1:
            break
    ranked = sorted(range(len(runs)), key=lambda i: _peaks(runs[i]))
    return traces[ranked[len(ranked) // 2]], runs


def _peaks(run: Replay) -> tuple[int, int]:
    return run.peak_reserved_bytes, run.peak_allocated_bytes


def cause(main: Replay, runs: Sequence[Replay], name: str = _NAME, why: str = _WHY) -> Cause | None:
    """How far other orders are off; None where none is."""
    spreads: dict[str, Spread] = {}
    for level in TRACE_LEVELS:
        peak = f"peak_{'reserved' if level == 'device' else level}_bytes"
        spread = seen(getattr(run, peak) - getattr(main, peak) for run in runs)
        if spread.points[0][1] or spread.points[-1][1]:
            spreads[level] = spread
    if not spreads:
        return None
    count = len(runs)
    source = f"{why}; {count} orders were drawn and replayed"
    return Cause(name, MEASURED, source, spreads, inside=round((count - 1) / (count + 1), 4), count=count)


# --- layout conversions -----------------------------------------------------------------------------------------------

Sessions = Sequence[Sequence[Graph]]
LAYOUT_NAME = "order of layout conversions"
LAYOUT_SOURCE = "the layout optimizer of ONNX Runtime numbers its conversions by their addresses"
_CONVERSION = "com.microsoft.nchwc.ReorderOutput"
#: Orders beside the first two that are tried: it and its reverse.
LAYOUT_DRAWS = 4


def orders_of(sessions: Sessions) -> list[Sessions]:
    """``sessions`` with their nodes in some of the possible orders, each once; the first is the same in all processes
    that optimize the same file."""
    found: dict[tuple[tuple[str, ...], ...], Sessions] = {}
    for draw in range(LAYOUT_DRAWS + 2):
        changed = [_ordered(graphs, draw) for graphs in sessions]
        key = tuple(tuple(node.key for node in graphs[0].nodes) for graphs in changed)
        found.setdefault(key, changed)
    return list(found.values())


def _ordered(graphs: Sequence[Graph], draw: int) -> Sequence[Graph]:
    nodes = graphs[0].nodes
    places = [i for i, node in enumerate(nodes) if node.operator == _CONVERSION]
    if len(places) < 2 or not graphs[0].is_ordered:
        return graphs
    order = list(_order(nodes, places, draw))
    changed = tuple(nodes[index] for index in order)
    return [replace(graph, nodes=changed) for graph in graphs]


def _order(nodes: Sequence[Node], places: Sequence[int], draw: int) -> Iterator[int]:
    """The nodes as they stand tell the numbers of all but the conversions: the later, the lower."""
    named = sorted(places, key=lambda index: nodes[index].key)
    if draw == 1:
        named.reverse()
    elif draw:
        random.Random(draw).shuffle(named)
    ranks = [-index for index in range(len(nodes))]
    for index, place in zip(named, sorted(places), strict=True):
        ranks[index] = -place
    yield from execution_order(nodes, ranks)
