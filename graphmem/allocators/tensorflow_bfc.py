"""TensorFlow's BFC allocator, byte for byte.

Source: ``xla/tsl/framework/bfc_allocator.{h,cc}`` as shipped in TensorFlow 2.21 (headers in its wheel; the routines
read in openxla/xla), and ``tensorflow/core/common_runtime/gpu/gpu_bfc_allocator.{h,cc}`` for the options of a GPU. The
class of the 2.21 wheel was run over a pretended device and recorded; routine names follow upstream. Chunks are those
of :mod:`graphmem.allocators.bfc`.

Not modelled: timestamped chunks (``GPUOptions.experimental.timestamped_allocator``, off by default) and the spatial
partitioning of newer XLA (off by default). A failed request is an error at once: upstream waits 10 seconds for another
thread to free something, and a replay has no other thread.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from graphmem.allocators.base import SegmentView
from graphmem.allocators.bfc import MIN_ALLOCATION_BYTES, BumpDriver, Chunk, ChunkHeap, rounded_bytes
from graphmem.errors import DeviceOutOfMemory, UsageError

INITIAL_REGION_BYTES = 2 << 20  # the constructor of BFCAllocator; 1 MiB in TensorFlow 1.x
MAX_INTERNAL_FRAGMENTATION_BYTES = 128 << 20  # the constructor, when no fragmentation_fraction is given
BACKPEDAL_FACTOR = np.float32(0.9)  # kBackpedalFactor, BFCAllocator::Extend: a float, and so is the product


@dataclass(frozen=True, slots=True)
class BFCOptions:
    """``GPUBFCAllocator::Options`` under their native names, with a GPU's defaults.

    ``coalesce_regions`` is what the device allocator answers to ``SupportsCoalescing()``: false on GPUs in 2.21.
    """

    allow_growth: bool = False
    garbage_collection: bool = True
    fragmentation_fraction: float = 0.0
    coalesce_regions: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be a share of the limit."""
        if not 0.0 <= self.fragmentation_fraction <= 1.0:
            raise UsageError(f"fragmentation_fraction is {self.fragmentation_fraction}; accepted: 0 to 1")


@dataclass(slots=True, eq=False)
class _Region:
    first: Chunk
    size: int

    @property
    def end(self) -> int:
        return self.first.address + self.size


class TensorFlowBFC:
    """One ``BFCAllocator`` of ``memory_limit`` bytes. A handle is the block's address (``None`` for 0 bytes)."""

    name = "tensorflow-bfc"

    def __init__(
        self,
        memory_limit: int,
        options: BFCOptions | None = None,
        *,
        driver_alloc: Callable[[int], int | None] | None = None,
        driver_free: Callable[[int], None] | None = None,
    ) -> None:
        """``driver_alloc`` takes bytes and returns an address or ``None``; without it a :class:`BumpDriver` serves."""
        if memory_limit < 0:
            raise UsageError(f"the memory limit is {memory_limit} bytes; accepted: 0 or more")
        self.options = options or BFCOptions()
        self.memory_limit = memory_limit
        if driver_alloc is None:
            driver = BumpDriver()
            driver_alloc, driver_free = driver.alloc, driver.free
        self._driver_alloc = driver_alloc
        self._driver_free = driver_free or (lambda address: None)
        first = min(memory_limit, INITIAL_REGION_BYTES) if self.options.allow_growth else memory_limit
        self._curr_region_allocation_bytes = rounded_bytes(first)
        fraction = self.options.fragmentation_fraction
        self._heap = ChunkHeap(int(fraction * memory_limit) if fraction > 0 else MAX_INTERNAL_FRAGMENTATION_BYTES)
        self._regions: list[_Region] = []  # by address
        self.allocated_bytes = 0  # bytes_in_use
        self.peak_allocated_bytes = 0  # peak_bytes_in_use
        self.reserved_bytes = 0  # pool_bytes
        self.peak_reserved_bytes = 0  # peak_pool_bytes
        self.num_alloc_retries = 0  # how often DeallocateFreeRegions gave regions back; ours
        self._num_allocs = 0
        self._largest_alloc_size = 0

    # -- the allocator protocol ---------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """``AllocateRaw``: a chunk of at least ``size`` bytes, or ``None`` for 0.

        Raises :class:`graphmem.errors.DeviceOutOfMemory` where TensorFlow raises ``ResourceExhaustedError``.
        """
        if size == 0:
            return None
        rounded = rounded_bytes(size)
        chunk = self._heap.take(rounded, size)
        if chunk is None and self._extend(rounded):
            chunk = self._heap.take(rounded, size)
        if chunk is None and self._deallocate_free_regions(rounded) and self._extend(rounded):
            chunk = self._heap.take(rounded, size)
        if chunk is None:
            raise self._out_of_memory(size, rounded)
        self.allocated_bytes += chunk.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._num_allocs += 1
        self._largest_alloc_size = max(self._largest_alloc_size, chunk.size)
        return chunk.address

    def free(self, handle: int | None) -> None:
        """``DeallocateRaw``: the chunk merges with its free neighbours and stays in its region."""
        if handle is not None:
            self.allocated_bytes -= self._heap.give(handle)[0]

    def record_stream(self, handle: int | None, stream: int) -> None:
        """Nothing: TensorFlow computes on one stream, and its allocator knows none."""

    def synchronize(self) -> None:
        """Nothing: a freed chunk is free at once."""

    def empty_cache(self) -> None:
        """Nothing: TensorFlow gives regions back only when a request would fail."""

    def segments(self) -> tuple[SegmentView, ...]:
        """The regions, by address."""
        return tuple(
            SegmentView(
                region.first.address, region.size, 0, "region", False, tuple(c.view() for c in region.first.and_after())
            )
            for region in self._regions
        )

    def stats(self) -> dict[str, int]:
        """``AllocatorStats`` under upstream's names, in bytes and counts."""
        return {
            "num_allocs": self._num_allocs,
            "bytes_in_use": self.allocated_bytes,
            "peak_bytes_in_use": self.peak_allocated_bytes,
            "largest_alloc_size": self._largest_alloc_size,
            "bytes_limit": self.memory_limit,
            "pool_bytes": self.reserved_bytes,
            "peak_pool_bytes": self.peak_reserved_bytes,
        }

    # -- growing ------------------------------------------------------------------------------------------------------

    def _extend(self, rounded: int) -> bool:
        """``Extend``: one more region that can hold ``rounded`` bytes; false if the limit or the device forbid it."""
        available = (self.memory_limit - self.reserved_bytes) // MIN_ALLOCATION_BYTES * MIN_ALLOCATION_BYTES
        if rounded > available:
            return False
        increased = False
        while rounded > self._curr_region_allocation_bytes:
            self._curr_region_allocation_bytes *= 2
            increased = True
        size = min(self._curr_region_allocation_bytes, available)
        address = self._driver_alloc(size)
        while address is None:
            size = _backpedal(size)
            if size < rounded:
                return False
            address = self._driver_alloc(size)
        if not increased:
            self._curr_region_allocation_bytes *= 2
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._add_or_extend_region(address, size)
        return True

    def _add_or_extend_region(self, address: int, size: int) -> None:
        """``AddOrExtendAllocationRegion``: a region that begins where another ends continues it, if that is allowed."""
        position = bisect_right(self._regions, address, key=lambda region: region.end)
        before = self._regions[position - 1] if position else None
        if self.options.coalesce_regions and before is not None and before.end == address:
            *_, last = before.first.and_after()
            before.size += size
            self._heap.add_region(address, size, after=last)
        else:
            self._regions.insert(position, _Region(self._heap.add_region(address, size), size))

    def _deallocate_free_regions(self, rounded: int) -> bool:
        """``DeallocateFreeRegions``: give back every region without a chunk in use, if that could make enough room."""
        if not self.options.garbage_collection:
            return False
        free = [region for region in self._regions if not any(chunk.in_use for chunk in region.first.and_after())]
        total = sum(region.size for region in free)
        if total == 0 or rounded > self.memory_limit - self.reserved_bytes + total:
            return False
        for region in free:
            self._heap.drop_region(region.first)
            self._driver_free(region.first.address)
        self._regions = [region for region in self._regions if region not in free]
        self.reserved_bytes -= total
        self.num_alloc_retries += 1
        return True

    def _out_of_memory(self, size: int, rounded: int) -> DeviceOutOfMemory:
        free = self.memory_limit - self.allocated_bytes
        message = (
            f"Allocator (GPU_0_bfc) ran out of memory trying to allocate {size} bytes (rounded to {rounded}): "
            f"{self.allocated_bytes} bytes in use, {self.reserved_bytes} in regions, limit {self.memory_limit}"
        )
        return DeviceOutOfMemory(message, requested_bytes=size, free_bytes=free)


def _backpedal(size: int) -> int:
    """The next smaller size to ask of the device after a refusal (in ``Extend``).

    Up to 10 x 256 bytes the product rounds up to ``size`` again, where 2.21 asks for ever; newer XLA steps down by 256
    bytes, and so does this.
    """
    smaller = rounded_bytes(math.floor(np.float32(size) * BACKPEDAL_FACTOR))
    return smaller if smaller < size else size - MIN_ALLOCATION_BYTES
