"""Private memory pools of a step: which pool an allocation goes to, and its events for the allocator.

PyTorch routes a request to a pool by a filter: ``torch.cuda.use_mem_pool`` takes those of the calling thread, whatever
the stream (the backward pass runs on another thread, so its allocations stay outside); the capture of a CUDA graph
takes those of the captured streams, whatever the thread. The route that was begun last is asked first (``get_pool``,
c10/cuda/CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmem.capture.torch_internals import on_engine_thread
from graphmem.errors import CaptureError
from graphmem.trace import Category, EventKind

if TYPE_CHECKING:
    from graphmem.capture.record.storages import Storages


#: What PyTorch calls a pool: {0, n} made by the user (MemPool, graph_pool_handle), {n, 0} by a graph for itself
#: (``MemPool::graph_pool_handle``, ATen/cuda/MemPool.h).
PoolId = tuple[int, int]


@dataclass(eq=False)
class Route:
    """A way into a pool. ``streams``: those that are captured; None: any stream of the thread that began it, the
    autograd engine's or the program's."""

    pool: PoolId
    streams: set[int] | None
    any_thread: bool = False
    on_engine: bool = False

    def takes(self, stream: int) -> bool:
        """True if an allocation on ``stream``, now, goes this way."""
        if self.streams is not None:
            return stream in self.streams
        return self.any_thread or on_engine_thread() == self.on_engine


class MemoryPools:
    """The pools of one capture, and the routes to them."""

    def __init__(self, book: Storages) -> None:
        self._book = book
        self._routes: list[Route] = []
        self._numbers: dict[PoolId, int] = {}
        self._holders: dict[PoolId, int] = {}
        self._ids = {True: 0, False: 0}
        #: Whether the current stream is captured.
        self.in_capture = False

    def new_id(self, *, is_user_created: bool = True) -> PoolId:
        """A name for a pool that does not exist yet."""
        self._ids[is_user_created] += 1
        number = self._ids[is_user_created]
        return (0, number) if is_user_created else (number, 0)

    def number_now(self, stream: int) -> int:
        """The pool that an allocation on ``stream`` goes to; 0: the default one."""
        for route in reversed(self._routes):
            if route.takes(stream):
                return self._numbers[route.pool]
        return 0

    def holders(self, pool: PoolId) -> int:
        """The number of holders of the pool."""
        return self._holders.get(pool, 0)

    # --- events for the allocator ---------------------------------------------------------------------------------

    def create(self, pool: PoolId, label: str, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """``createOrIncrefPool``: hold a pool once more."""
        self._hold(pool, label, use_on_oom=use_on_oom, no_split=no_split)
        self._event(EventKind.CREATE_POOL, pool)

    def begin(self, pool: PoolId, label: str, *, streams: set[int] | None, any_thread: bool = False) -> None:
        """``beginAllocateToPool``: hold the pool once more, and send there all that a :class:`Route` of these takes."""
        if any(other.pool == pool for other in self._routes):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._hold(pool, label)
        self._event(EventKind.BEGIN_POOL, pool)
        self._routes.append(Route(pool, streams, any_thread, on_engine_thread()))
        self.stream_changed()

    def end(self, pool: PoolId) -> None:
        """``endAllocateToPool``: the pool stays held."""
        if not any(route.pool == pool for route in self._routes):
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self._routes = [route for route in self._routes if route.pool != pool]
        self._event(EventKind.END_POOL, pool)
        self.stream_changed()

    def release(self, pool: PoolId) -> None:
        """``releasePool``: hold the pool once less."""
        self._holders[pool] -= 1
        self._event(EventKind.RELEASE_POOL, pool)

    def empty(self, pool: PoolId) -> None:
        """``emptyCache(id)``: the free segments of a pool that nobody holds go back to the driver."""
        if self.in_capture:
            raise CaptureError(
                "a torch.cuda.MemPool is deleted while a CUDA graph is captured, which ends PyTorch's process; keep it "
                "until the capture has ended"
            )
        self._event(EventKind.EMPTY_POOL, pool)

    def give_back_free(self, pool: PoolId) -> None:
        """The free segments of a pool go back to the driver although it is held, behind PyTorch's back."""
        holders = self._holders[pool]
        for _ in range(holders):
            self._event(EventKind.RELEASE_POOL, pool)
        self._event(EventKind.EMPTY_POOL, pool)
        for _ in range(holders):
            self._event(EventKind.CREATE_POOL, pool)

    def sleep(self, pool: PoolId) -> None:
        """The memory of the pool goes back to the driver; its storages stay, without any, until :meth:`wake`."""
        if pool in self._numbers:
            self._book.sleep(self._numbers[pool])
            self.give_back_free(pool)

    def wake(self, pool: PoolId) -> None:
        """Storages of the pool that sleep get memory again, in the order of their births."""
        if pool in self._numbers:
            self._book.wake(self._numbers[pool])

    def live_bytes(self, pool: PoolId) -> int:
        """Bytes of the pool's storages that live and do not sleep."""
        return self._book.bytes_in_pool(self._numbers[pool]) if pool in self._numbers else 0

    # --- captures -------------------------------------------------------------------------------------------------

    def captured(self, stream: int) -> Route | None:
        """The capture that ``stream`` takes part in."""
        return next((route for route in self._routes if route.streams and stream in route.streams), None)

    def join(self, stream: int, capture: Route | None) -> None:
        """``stream`` waits for work of a capture, and so takes part in it until it ends."""
        if capture is not None and capture in self._routes and capture.streams is not None:
            capture.streams.add(stream)
            self.stream_changed()

    def stream_changed(self) -> None:
        """Record for the allocator whether the current stream is captured, when that changes."""
        streams = self._book.streams
        streams.on_change = self.stream_changed if self._routes else None
        in_capture = self.captured(streams.current) is not None
        if in_capture != self.in_capture:
            kind = EventKind.ENTER_CAPTURE if in_capture else EventKind.LEAVE_CAPTURE
            self._book.builder.event(kind, self._book.operator)
            self.in_capture = in_capture

    # --- one storage by its number ----------------------------------------------------------------------------------

    def take(self, size: int, label: str) -> int:
        """A buffer that PyTorch keeps for itself; its storage index."""
        return self._book.alloc(size, Category.WORKSPACE, label, stream=0)

    def give(self, index: int) -> None:
        """Such a buffer is given back."""
        self._book.builder.free(index, self._book.operator)

    def _hold(self, pool: PoolId, label: str, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        if pool not in self._numbers:
            self._numbers[pool] = self._book.builder.pool(label, use_on_oom=use_on_oom, no_split=no_split)
        self._holders[pool] = self._holders.get(pool, 0) + 1

    def _event(self, kind: EventKind, pool: PoolId) -> None:
        self._book.builder.event(kind, self._book.operator, self._numbers[pool])
