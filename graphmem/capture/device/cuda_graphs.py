"""CUDA graphs and memory pools as a script finds them: ``torch.cuda.CUDAGraph``, ``torch.cuda.MemPool``.

PyTorch's own ``torch.cuda.graph``, ``make_graphed_callables`` and ``use_mem_pool`` run above the two.

The effects of a graph on memory (seen with the CUDA build of 2.13.0 on the stub driver;
``tests/recorded/cases/parallel/graphs.py``):

- its capture first takes the seed and the offset of the random generator, two int64 on the default stream, and routes
  the captured streams' allocations to its pool (``CUDAGraph::capture_begin``, ATen/cuda/CUDAGraph.cpp);
- replays allocate nothing;
- its end (``reset``, or the last reference) gives the two back, then every cuBLAS workspace of the stream it was
  captured on, wherever that lies, and holds its pool no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphmem.capture.device.pretend_device import CUDA_MODULES
from graphmem.capture.patches import Patches, constant
from graphmem.errors import CaptureError

if TYPE_CHECKING:
    from graphmem.capture.record.memory_pools import MemoryPools, PoolId
    from graphmem.capture.record.recorder import Recorder
    from graphmem.capture.record.streams import Streams

#: Seed and offset of a generator, int64 each (``CUDAGeneratorState``, ATen/cuda/CUDAGeneratorImpl.h), of every capture;
#: since 2.14 of those that draw a random number (``get_capture_state``), which is not followed.
_GENERATOR_STATE = (("seed of a CUDA graph's random numbers", 8), ("offset of a CUDA graph's random numbers", 8))
_DRAWN_LATE = (2, 14)


class CUDAGraph:
    """Stands for a CUDA graph: the captured work cannot be seen, but its memory stays. A capture makes a subclass that
    knows its books."""

    streams: ClassVar[Streams]
    pools: ClassVar[MemoryPools]
    workspaces: ClassVar[Recorder]

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: PoolId | None = None
        self._generator_state: list[int] = []
        self._stream = 0
        self._is_capturing = self._has_graph = False

    def capture_begin(self, pool: PoolId | None = None, *_: object, **__: object) -> None:
        stream = self.streams.current
        if self._has_graph or self._is_capturing:
            raise RuntimeError("This CUDAGraph instance already owns a captured graph.")
        if stream == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if self.workspaces.card.torch_version < _DRAWN_LATE:
            self._generator_state = [self.pools.take(size, label) for label, size in _GENERATOR_STATE]
        chosen = self.pools.new_id(is_user_created=False) if pool is None else pool
        self.pools.begin(chosen, "pool of CUDA graphs", streams={stream})
        self._pool = chosen
        self._stream, self._is_capturing = stream, True

    def capture_end(self) -> None:
        if not self._is_capturing or self._pool is None:
            raise RuntimeError("CUDAGraph::capture_end was called without capture_begin")
        if self.streams.current != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        self.pools.end(self._pool)
        self._is_capturing, self._has_graph = False, True

    def instantiate(self) -> None: ...

    def replay(self) -> None:
        if not self._has_graph:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        if not self._has_graph or self._pool is None:
            return
        self._has_graph = False
        for index in reversed(self._generator_state):
            self.pools.give(index)
        self.workspaces.clear_workspaces(self._stream)
        self.pools.release(self._pool)
        self._pool = None

    def pool(self) -> PoolId:
        if self._pool is None or not self._has_graph:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None: ...

    def debug_dump(self, debug_path: str) -> None: ...

    def raw_cuda_graph(self) -> int:
        raise CaptureError("a CUDA graph's handle is asked for, and an analysis has no driver behind it")

    raw_cuda_graph_exec = raw_cuda_graph

    def __del__(self) -> None:
        self.reset()


class MemPool:
    """Stands for a pool of memory: its identity, and that it is held. A capture makes a subclass that knows its
    books."""

    pools: ClassVar[MemoryPools]

    def __init__(self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        self._id: PoolId | None = None
        if allocator is not None:
            raise CaptureError(
                "torch.cuda.MemPool(allocator) takes its memory from an allocator of its own, which is not "
                "modelled; analyse the step with torch.cuda.MemPool()"
            )
        self._id = self.pools.new_id()
        self.pools.create(self._id, "torch.cuda.MemPool", use_on_oom=use_on_oom, no_split=no_split)

    @property
    def id(self) -> PoolId:
        assert self._id is not None
        return self._id

    def use_count(self) -> int:
        return self.pools.holders(self.id)

    def snapshot(self, *_: object, **__: object) -> list[Any]:
        return []

    def give_back_free(self) -> None:
        """Beyond PyTorch, as the next three: of allocators that unmap the memory of a pool (:class:`MemoryPools`)."""
        self.pools.give_back_free(self.id)

    def sleep(self) -> None:
        self.pools.sleep(self.id)

    def wake(self) -> None:
        self.pools.wake(self.id)

    def live_bytes(self) -> int:
        return self.pools.live_bytes(self.id)

    def __del__(self) -> None:
        if self._id is not None:
            self.pools.release(self._id)
            self.pools.empty(self._id)


def patch_cuda_graphs(patches: Patches, streams: Streams, pools: MemoryPools, workspaces: Recorder) -> None:
    """Make graphs and pools act on these books."""
    books = {"streams": streams, "pools": pools, "workspaces": workspaces}

    def begin(pool: PoolId, *, any_thread: bool) -> None:
        pools.begin(pool, "a pool of allocations", streams=None, any_thread=any_thread)

    names = {
        "CUDAGraph": type("CUDAGraph", (CUDAGraph,), books),
        "MemPool": type("MemPool", (MemPool,), {"pools": pools}),
        "graph_pool_handle": lambda: pools.new_id(),
        "is_current_stream_capturing": lambda: pools.captured(streams.current) is not None,
    }
    patches.where_found(CUDA_MODULES, names)
    functions = {
        "_cuda_beginAllocateCurrentThreadToPool": lambda _, pool: begin(pool, any_thread=False),
        "_cuda_beginAllocateToPool": lambda _, pool: begin(pool, any_thread=True),
        "_cuda_endAllocateToPool": lambda _, pool: pools.end(pool),
        "_cuda_releasePool": lambda _, pool: pools.release(pool),
    }
    for owner in (torch._C, torch.cuda.memory):
        patches.table(owner, functions)
    patches.set(torch._C, "_host_emptyCache", constant(None))
    patches.set(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear_workspaces)
    _patch_capture_stream(patches)


def _patch_capture_stream(patches: Patches) -> None:
    """``torch.cuda.graph`` keeps the stream that it captures on in an attribute of the class."""

    @functools.cache
    def capture_stream() -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def init(
        original: Callable[..., None], self: torch.cuda.graph, cuda_graph: CUDAGraph, pool: PoolId | None = None,
        stream: torch.cuda.Stream | None = None, *args: object, **kwargs: object,
    ) -> None:  # fmt: skip
        original(self, cuda_graph, pool, capture_stream() if stream is None else stream, *args, **kwargs)

    patches.around(torch.cuda.graph, {"__init__": init})
