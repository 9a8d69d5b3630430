"""MXNet's pooled storage: every device allocation keeps its rounded size, and serves that size again when it is free.

Source: ``src/storage/pooled_storage_manager.h`` and ``storage.cc`` of apache/mxnet at b84609d (January 2023, the last
state of the project); names follow them. Nothing is split and nothing is merged: a free block helps only a request that
rounds to the same size. When the card runs short, everything free is given back at once.

Not checked against a running MXNet. Not modelled: what ``cudaMalloc`` rounds up inside the driver.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.allocators.base import Allocator, BlockView, SegmentView
from graphmem.base.numbers import round_up
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.units import MIB

POOL_TYPES = ("Naive", "Round", "Unpooled")
SMALLEST_PAGE_BYTES = 32  # RoundHelper::NDEV
SMALLEST_CUTOFF, LOG2_MAX_MEM = 20, 34  # RoundPower2
FIRST_ADDRESS = 1 << 40  # addresses are only names here


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The environment variables ``MXNET_GPU_...`` by the rest of their names; sizes in bytes, the reserve in percent.

    ``mem_large_alloc_round_size`` is of the pool ``Naive`` only, ``mem_pool_round_linear_cutoff`` of ``Round`` only.
    """

    mem_pool_type: str = "Naive"
    pool_page_size: int = 4096
    mem_large_alloc_round_size: int = 2 * MIB
    mem_pool_round_linear_cutoff: int = 24
    mem_pool_reserve: int = 5

    def __post_init__(self) -> None:
        """Refuse what MXNet refuses (``InitRoundHelper``), and percentages that are none."""
        page, cutoff = self.pool_page_size, self.mem_pool_round_linear_cutoff
        if self.mem_pool_type not in POOL_TYPES:
            raise UsageError(f"MXNET_GPU_MEM_POOL_TYPE is {self.mem_pool_type!r}; accepted: {', '.join(POOL_TYPES)}")
        if page < SMALLEST_PAGE_BYTES:
            raise UsageError(f"MXNET_GPU_POOL_PAGE_SIZE is {page}; accepted: {SMALLEST_PAGE_BYTES} or more")
        if self.mem_large_alloc_round_size < 1:
            raise UsageError(
                f"MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE is {self.mem_large_alloc_round_size}; accepted: 1 up"
            )
        if not 0 <= self.mem_pool_reserve <= 100:
            raise UsageError(f"MXNET_GPU_MEM_POOL_RESERVE is {self.mem_pool_reserve}; accepted: 0 to 100 (percent)")
        if self.mem_pool_type != "Round":
            return
        if page != 1 << _ilog2(page - 1):
            raise UsageError(f"MXNET_GPU_POOL_PAGE_SIZE is {page}; the pool 'Round' accepts powers of two")
        least = max(SMALLEST_CUTOFF, _ilog2(page - 1))
        if not least <= cutoff <= LOG2_MAX_MEM:
            raise UsageError(
                f"MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF is {cutoff}; accepted: {least} to {LOG2_MAX_MEM} (log2)"
            )


def _ilog2(value: int) -> int:
    """``common::ilog2ul``: the number of bits of ``value``, at least 1."""
    return max(1, value.bit_length())


def round_alloc_size(size: int, config: PoolConfig) -> int:
    """``RoundAllocSize``: the bytes asked of the device for ``size``; it is also the key under which they are kept."""
    if config.mem_pool_type == "Unpooled":
        return size
    if config.mem_pool_type == "Naive":
        size = round_up(size, config.pool_page_size)
        large = config.mem_large_alloc_round_size
        return round_up(size, large) if size > large else size
    cutoff = config.mem_pool_round_linear_cutoff
    log_size = _ilog2(size - 1)
    if log_size > cutoff:
        return round_up(size, 1 << cutoff)
    return 1 << max(log_size, _ilog2(config.pool_page_size - 1))


@dataclass(slots=True, eq=False)
class Block:
    """One device allocation."""

    address: int
    size: int
    requested: int = 0


class MXNetPooledStorage(Allocator):
    """``PooledStorageManager`` of one card of ``capacity_bytes``, None for no limit; ``other_bytes`` of it are taken by
    the context, libraries and other processes. A block that others still use is handed out; its new owner waits for
    them.
    """

    name = "mxnet-pooled"

    def __init__(
        self, config: PoolConfig | None = None, *, capacity_bytes: int | None = None, other_bytes: int = 0
    ) -> None:
        self.config = config or PoolConfig()
        self.capacity_bytes = capacity_bytes
        self.other_bytes = other_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0  # used_memory_
        self.num_alloc_retries = 0  # how often ReleaseAll gave something back; ours
        self._pool: dict[int, list[Block]] = {}
        self._live: dict[Block, None] = {}
        self._next_address = FIRST_ADDRESS

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """``Alloc``: the block of that rounded size that was freed last, or a new one; ``None`` for 0 bytes.

        Raises :class:`graphmem.errors.DeviceOutOfMemory` where MXNet stops with "Memory allocation failed".
        """
        if size == 0:
            return None
        rounded = round_alloc_size(size, self.config)
        waiting = self._pool.get(rounded)
        block = waiting.pop() if waiting else self._new_block(rounded)
        block.requested = size
        self._live[block] = None
        self.allocated_bytes += rounded
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, handle: Block | None) -> None:
        """``Free``: the block waits for a request of its rounded size; unpooled it goes back to the device."""
        if handle is None:
            return
        if handle not in self._live:
            raise ValueError("freed a block that is not allocated")
        del self._live[handle]
        handle.requested = 0
        self.allocated_bytes -= handle.size
        if self.config.mem_pool_type == "Unpooled":
            self.reserved_bytes -= handle.size
        else:
            self._pool.setdefault(handle.size, []).append(handle)

    def empty_cache(self) -> None:
        """``ReleaseAll``: give back everything that waits (``Context.empty_cache``)."""
        released = sum(block.size for blocks in self._pool.values() for block in blocks)
        self._pool.clear()
        self.reserved_bytes -= released
        self.num_alloc_retries += released > 0

    def segments(self) -> tuple[SegmentView, ...]:
        """One segment per device allocation, by address."""
        waiting = [block for blocks in self._pool.values() for block in blocks]
        views = [_view(block, "allocated") for block in self._live] + [_view(block, "free") for block in waiting]
        return tuple(sorted(views, key=lambda view: view.address))

    def _new_block(self, rounded: int) -> Block:
        if not self._memory_is_available(rounded):
            self.empty_cache()
        if not self._device_has(rounded):  # Malloc fails: "retry in case of fragmentation"
            self.empty_cache()
            if not self._device_has(rounded):
                free = max(0, self._free_bytes())
                message = f"Memory allocation failed out of memory: {rounded} bytes asked for, {free} bytes free"
                raise DeviceOutOfMemory(message, requested_bytes=rounded, free_bytes=free)
        block = Block(self._next_address, rounded)
        self._next_address += rounded
        self.reserved_bytes += rounded
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _free_bytes(self) -> int:
        assert self.capacity_bytes is not None
        return self.capacity_bytes - self.other_bytes - self.reserved_bytes

    def _memory_is_available(self, rounded: int) -> bool:
        """``MemoryIsAvailable``: the reserve of the card's total stays free."""
        if self.capacity_bytes is None or self.config.mem_pool_type == "Unpooled":
            return True
        free, kept = self._free_bytes(), self.capacity_bytes * self.config.mem_pool_reserve // 100
        return free > rounded and kept <= free - rounded

    def _device_has(self, size: int) -> bool:
        return self.capacity_bytes is None or size <= self._free_bytes()


def _view(block: Block, state: str) -> SegmentView:
    inside = BlockView(block.address, block.size, block.requested, state)
    return SegmentView(block.address, block.size, 0, "pooled", False, (inside,))
