"""Private pools: heaps apart from the default one, for CUDA graphs and ``torch.cuda.MemPool``.

``struct PrivatePool``, ``graph_pools``, ``graph_pools_freeable``, ``captures_underway``, ``deferred_blocks`` and
``use_on_oom_pools`` of ``c10/cuda/CUDACachingAllocator.cpp``. A pool is named by a number from 1 on, where PyTorch has
a pair of numbers. Which pool serves a request is the caller's business: upstream asks a filter for it (the thread, or
the stream that captures).
"""

from __future__ import annotations

from collections.abc import Iterator

from graphmem.allocators.pytorch_caching.blocks import Block, Pool
from graphmem.base import versions
from graphmem.errors import UsageError


class PrivatePool:
    """The small and the large pool of one private pool, and how many hold it."""

    __slots__ = ("large", "reserved_bytes", "small", "use_count")

    def __init__(self, number: int) -> None:
        self.use_count = 1
        self.reserved_bytes = 0
        self.small = Pool(is_small=True, private_pool=number)
        self.large = Pool(is_small=False, private_pool=number)

    def free_bytes(self) -> int:
        """Bytes of its free blocks."""
        pools = (self.small, self.large)
        return sum(block.size for pool in pools for free_set in pool.by_stream.values() for block in free_set.blocks)


class PrivatePools:
    """All private pools of a device, the routes to them, and the frees that wait for the end of a capture."""

    def __init__(self, torch_version: tuple[int, int]) -> None:
        self._captures_apart = versions.CAPTURES_APART.holds(torch_version)
        self.by_number: dict[int, PrivatePool] = {}
        self.freeable: dict[int, PrivatePool] = {}
        self.routes: list[int] = []  # captures_underway upstream
        self.deferred: list[Block] = []
        self.stream_uses_in_capture: dict[Block, set[int]] = {}
        self.capture_context = False
        self._use_on_oom: list[int] = []
        self._no_split: set[int] = set()

    @property
    def in_capture(self) -> bool:
        """Whether events must not be queried, nor memory be given back."""
        return self.capture_context if self._captures_apart else bool(self.routes)

    def declare(self, number: int, *, use_on_oom: bool, no_split: bool) -> None:
        """``setUseOnOOM`` and ``setNoSplit``."""
        if use_on_oom:
            self._use_on_oom.append(number)
        if no_split:
            self._no_split.add(number)

    def splits(self, number: int) -> bool:
        """Whether blocks of the pool may be split; those of the default pools (0) may."""
        return number not in self._no_split

    def incref(self, number: int) -> None:
        """``create_or_incref_pool``. (For a pool that was let go and still holds memory PyTorch fails an assertion.)"""
        pool = self.by_number.get(number)
        if pool is None:
            self.by_number[number] = PrivatePool(number)
        else:
            self.freeable.pop(number, None)
            pool.use_count += 1

    def begin_route(self, number: int) -> None:
        """``beginAllocateToPool``. Raises :class:`UsageError` where the pool is routed to already."""
        if number in self.routes:
            raise UsageError(f"memory pool {number} is entered twice (beginAllocateToPool: already recording to it)")
        self.incref(number)
        self.routes.append(number)

    def end_route(self, number: int) -> None:
        """``endAllocateToPool``. Raises :class:`UsageError` where the pool is not routed to."""
        if number not in self.routes:
            raise UsageError(f"memory pool {number} is left but was not entered (endAllocateToPool)")
        self.routes.remove(number)

    def release(self, number: int) -> None:
        """``releasePool``: one holder less; of a pool that has none left, free segments may go back."""
        pool = self.by_number[number]
        pool.use_count -= 1
        if pool.use_count == 0:
            self.freeable[number] = pool
            if number in self._use_on_oom:
                self._use_on_oom.remove(number)

    def overflow(self) -> list[int]:
        """Pools that serve requests from outside when memory runs out. (With several, upstream's order is a hash's.)"""
        return [number for number in self._use_on_oom if number in self.by_number]

    def forget_empty(self, number: int) -> None:
        """Drop a freeable pool whose last segment was given back."""
        if self.by_number[number].reserved_bytes == 0:
            del self.by_number[number], self.freeable[number]

    def reserved_bytes(self) -> dict[int, int]:
        """Bytes of the segments of each."""
        return {number: pool.reserved_bytes for number, pool in self.by_number.items()}

    def pools(self) -> Iterator[Pool]:
        """The small and the large pool of each."""
        for private in self.by_number.values():
            yield private.small
            yield private.large

    def free_bytes(self) -> int:
        """Bytes of free blocks in all of them."""
        return sum(pool.free_bytes() for pool in self.by_number.values())

    def take_deferred(self, stream_uses: dict[Block, set[int]]) -> Iterator[tuple[Block, set[int]]]:
        """The blocks whose freeing waited for a capture, each with the streams that used it outside the capture."""
        deferred, self.deferred = self.deferred, []
        for block in deferred:
            yield block, stream_uses.pop(block) - self.stream_uses_in_capture.pop(block, set())


class PoolInterface:
    """The calls about pools that an allocator answers without touching its blocks (names as upstream)."""

    def __init__(self, torch_version: tuple[int, int]) -> None:
        self.private_pools = PrivatePools(torch_version)
        #: Bytes of every private pool's segments when reserved bytes were at their peak.
        self.private_reserved_at_peak: dict[int, int] = {}

    def declare_pool(self, pool: int, *, use_on_oom: bool = False, no_split: bool = False) -> None:
        """Set the options of ``torch.cuda.MemPool`` before the pool is used."""
        self.private_pools.declare(pool, use_on_oom=use_on_oom, no_split=no_split)

    def create_or_incref_pool(self, pool: int) -> None:
        """``torch.cuda.MemPool()``: make a private pool, or hold it once more."""
        self.private_pools.incref(pool)

    def begin_allocate_to_pool(self, pool: int) -> None:
        """Hold a pool once more, and note that requests are routed to it."""
        self.private_pools.begin_route(pool)

    def end_allocate_to_pool(self, pool: int) -> None:
        """End the route; the pool stays held until :meth:`release_pool`."""
        self.private_pools.end_route(pool)

    def release_pool(self, pool: int) -> None:
        """Hold a pool once less. When nobody holds it, the next :meth:`empty_cache` gives its free segments back."""
        self.private_pools.release(pool)

    def enter_capture(self) -> None:
        """From now on the current stream is being captured: no event is queried and no cache is given back."""
        self.private_pools.capture_context = True

    def leave_capture(self) -> None:
        """From now on it is not, or another stream is current."""
        self.private_pools.capture_context = False
