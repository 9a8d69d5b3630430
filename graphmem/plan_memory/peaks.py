"""The peak of a graph or a trace as one number, for those who ask many times.

All figures are bytes on the device. ``live``: requested bytes that are alive together, the least that any allocator
could do with. Of an allocator: the most that it reserves, on a card of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.base import Allocator
from graphmem.allocators.onnxruntime_arena import BFCArena
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.fast_forward import PlainRuns
from graphmem.allocators.tensorflow_bfc import BFCOptions, TensorFlowBFC
from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.plan_memory.compiled import IS_COMPILED, events_of
from graphmem.plan_memory.graphs import Graph
from graphmem.plan_memory.tables import Numbers, Tables, as_order, live_bytes
from graphmem.replay import most_requested, replay
from graphmem.trace import Trace

#: The limit of an allocator that must have one, where no card is named: none that a graph could reach.
_NO_LIMIT = 1 << 62
_ALLOCATORS: dict[str, Callable[[str], Allocator]] = {
    "pytorch": lambda conf: PyTorchCachingAllocator(None, parse_alloc_conf(conf)),
    "tensorflow": lambda _: TensorFlowBFC(_NO_LIMIT, BFCOptions(allow_growth=True)),
    "onnxruntime": lambda _: BFCArena(),
}


@public_value(frozen=True, slots=True)
class Peaks:
    """Three figures of one order, in bytes: what is ``live`` together at most, what the ``planned`` addresses of
    :func:`graphmem.plan_memory.offsets` need, and what the allocator has ``reserved``."""

    live: int
    planned: int
    reserved: int


def peak(
    trace_or_graph: Trace | Graph,
    allocator: str | Callable[[], Allocator] = "pytorch",
    order: Iterable[int] | Numbers | None = None,
    *,
    alloc_conf: str = "",
) -> int:
    """The peak in bytes of a trace, or of a graph whose nodes run in ``order`` (indices; None: as they stand).

    ``allocator``: ``live`` (requested bytes, the lower bound), ``pytorch``, ``tensorflow`` or ``onnxruntime`` (bytes
    reserved), or a function that makes a new allocator. ``alloc_conf`` are PyTorch's settings as
    ``PYTORCH_ALLOC_CONF`` takes them. Raises :class:`graphmem.errors.GraphmemError` for another allocator and for an
    order that is none of this graph, and :class:`graphmem.errors.DeviceOutOfMemory` where an allocator refuses.
    """
    if isinstance(trace_or_graph, Graph):
        if allocator == "live":
            return int(live_bytes(Tables.of(trace_or_graph), as_order(trace_or_graph, order)).max())
        return replays_of(trace_or_graph, allocator, alloc_conf).reserved(as_order(trace_or_graph, order))
    if not isinstance(trace_or_graph, Trace):
        raise UsageError(f"peak takes a Trace or a Graph, not {type(trace_or_graph).__name__}")
    if order is not None:
        raise UsageError("a trace has one order; give a Graph to ask for another")
    if allocator == "live":
        return most_requested(trace_or_graph)
    return _reserved(trace_or_graph, maker_of_allocators(allocator, alloc_conf))


def maker_of_allocators(allocator: str | Callable[[], Allocator], alloc_conf: str = "") -> Callable[[], Allocator]:
    """What makes the allocator of a name. Raises :class:`UsageError` for a name that is none."""
    if alloc_conf and allocator != "pytorch":
        raise UsageError(f"alloc_conf are settings of the allocator 'pytorch', not of {shown(allocator)}")
    if callable(allocator):
        made = allocator()
        if not hasattr(made, "malloc"):
            raise UsageError(f"the allocator's function makes {shown(made)}; accepted: one of graphmem.allocators")
        return allocator
    make = _ALLOCATORS.get(allocator)
    if make is None:
        raise UsageError(f"unknown allocator {shown(allocator)}; accepted: {', '.join(('live', *_ALLOCATORS))}")
    return lambda: make(alloc_conf)


def _reserved(trace: Trace, make: Callable[[], Allocator]) -> int:
    played = replay(trace, make())
    if played.out_of_memory is not None:
        raise played.out_of_memory.error
    return played.peak_reserved_bytes


def replays_of(graph: Graph, allocator: str | Callable[[], Allocator], alloc_conf: str) -> Replays:
    """The replays of a graph under an allocator; the graph keeps those of a name for the next order."""
    kept: dict[tuple[str, str], Replays] = vars(graph).setdefault("_replays", {})
    if isinstance(allocator, str) and (allocator, alloc_conf) in kept:
        return kept[allocator, alloc_conf]
    make = maker_of_allocators(allocator, alloc_conf)
    made = Replays(Tables.of(graph), make, lambda order: graph.trace(order.tolist()))
    if isinstance(allocator, str):
        kept[allocator, alloc_conf] = made
    return made


class Replays:
    """Orders of one graph, each played by a new allocator; PyTorch's by compiled code where numba is there."""

    def __init__(self, tables: Tables, make: Callable[[], Allocator], trace: Callable[[Numbers], Trace]) -> None:
        self._tables, self._make, self._trace = tables, make, trace
        self._sizes = np.concatenate([tables.sizes, tables.scratch])
        self._runs: PlainRuns | None = None
        first = make()
        if IS_COMPILED and isinstance(first, PyTorchCachingAllocator):
            most = 2 * len(self._sizes)
            self._runs = PlainRuns(first, len(self._sizes), most)
            self._kinds, self._subjects = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
            self._left = np.bincount(tables.uses.values, minlength=len(tables.sizes))

    def reserved(self, order: Numbers) -> int:
        """The most bytes reserved while the nodes run in this order."""
        if self._runs is not None:
            tables = self._tables
            count = events_of(
                order, tables.makers, tables.stays, tables.scratch, *tables.makes, *tables.uses,
                self._left.copy(), self._kinds, self._subjects,
            )  # fmt: skip
            found = self._runs.most_reserved(self._kinds[:count], self._subjects[:count], self._sizes)
            if found is not None:
                return found
        return _reserved(self._trace(order), self._make)
