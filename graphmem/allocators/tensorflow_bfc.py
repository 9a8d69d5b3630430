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

from dataclasses import dataclass, replace

from graphmem.allocators.base import Allocator, SegmentView
from graphmem.allocators.bfc import BFC, MIN_ALLOCATION_BYTES, Chunk, ChunkHeap, DriverAlloc, DriverFree, Region
from graphmem.errors import DeviceOutOfMemory, UsageError

INITIAL_REGION_BYTES = 2 << 20  # the constructor of BFCAllocator; 1 MiB in TensorFlow 1.x
MAX_INTERNAL_FRAGMENTATION_BYTES = 128 << 20  # the constructor, when no fragmentation_fraction is given


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


class TensorFlowBFC(BFC):
    """One ``BFCAllocator`` of ``memory_limit`` bytes. It computes on one stream, and gives regions back only when a
    request would fail: where TensorFlow raises ``ResourceExhaustedError``."""

    name = "tensorflow-bfc"

    def __init__(
        self,
        memory_limit: int,
        options: BFCOptions | None = None,
        *,
        driver_alloc: DriverAlloc | None = None,
        driver_free: DriverFree | None = None,
    ) -> None:
        if memory_limit < 0:
            raise UsageError(f"the memory limit is {memory_limit} bytes; accepted: 0 or more")
        self.options = options or BFCOptions()
        self.memory_limit = memory_limit
        first = min(memory_limit, INITIAL_REGION_BYTES) if self.options.allow_growth else memory_limit
        fraction = self.options.fragmentation_fraction
        most_waste = int(fraction * memory_limit) if fraction > 0 else MAX_INTERNAL_FRAGMENTATION_BYTES
        super().__init__(ChunkHeap(most_waste), first, driver_alloc, driver_free)
        self.num_alloc_retries = 0  # how often DeallocateFreeRegions gave regions back; ours

    def stats(self) -> dict[str, int]:
        """``AllocatorStats`` under upstream's names, in bytes and counts."""
        return {
            "num_allocs": self.num_allocs,
            "bytes_in_use": self.allocated_bytes,
            "peak_bytes_in_use": self.peak_allocated_bytes,
            "largest_alloc_size": self.largest_alloc_bytes,
            "bytes_limit": self.memory_limit,
            "pool_bytes": self.reserved_bytes,
            "peak_pool_bytes": self.peak_reserved_bytes,
        }

    def _take_after_growing(self, rounded: int, size: int) -> Chunk:
        chunk = self._heap.take(rounded, size) if self._extend(rounded) else None
        if chunk is None and self._deallocate_free_regions(rounded) and self._extend(rounded):
            chunk = self._heap.take(rounded, size)
        if chunk is None:
            raise self._out_of_memory(size, rounded)
        return chunk

    def _extend(self, rounded: int) -> bool:
        """``Extend``: one more region that can hold ``rounded`` bytes; false if the limit or the device forbid it."""
        available = (self.memory_limit - self.reserved_bytes) // MIN_ALLOCATION_BYTES * MIN_ALLOCATION_BYTES
        if rounded > available:
            return False
        increased = self._doubles_for(rounded)
        found = self._device_region(min(self._curr_region_bytes, available), rounded)
        if found is None:
            return False
        if not increased:
            self._curr_region_bytes *= 2
        self._count_reserved(found[1])
        self._add_or_extend_region(*found)
        return True

    def _add_or_extend_region(self, address: int, size: int) -> None:
        """``AddOrExtendAllocationRegion``: a region that begins where another ends continues it, if that is allowed."""
        before = next((region for region in self._regions.values() if region.end == address), None)
        if self.options.coalesce_regions and before is not None:
            *_, last = before.first.and_after()
            before.size += size
            self._heap.add_region(address, size, after=last)
        else:
            self._regions[address] = Region(self._heap.add_region(address, size), size)

    def _deallocate_free_regions(self, rounded: int) -> bool:
        """``DeallocateFreeRegions``: give back every region without a chunk in use, if that could make enough room."""
        if not self.options.garbage_collection:
            return False
        free = {address: region.size for address, region in self._regions.items() if region.is_free}
        total = sum(free.values())
        if total == 0 or rounded > self.memory_limit - self.reserved_bytes + total:
            return False
        for address in free:
            self._drop(address)
        self.num_alloc_retries += 1
        return True

    def _out_of_memory(self, size: int, rounded: int) -> DeviceOutOfMemory:
        free = self.memory_limit - self.allocated_bytes
        message = (
            f"Allocator (GPU_0_bfc) ran out of memory trying to allocate {size} bytes (rounded to {rounded}): "
            f"{self.allocated_bytes} bytes in use, {self.reserved_bytes} in regions, limit {self.memory_limit}"
        )
        return DeviceOutOfMemory(message, requested_bytes=size, free_bytes=free)


#: More than any card has; the address space of a region as large as it needs to be.
_ENDLESS = 1 << 56


class OneRegion(Allocator):
    """The allocator without growth, over a region that is as large as this run needs it to be.

    ``reserved_bytes`` is the end of the highest chunk used so far. A limit of its peak plus ``most_waste`` gives the
    same chunks: the untouched rest of the region is then always large enough to be split.
    """

    name = "tensorflow-bfc, one region"

    def __init__(self, options: BFCOptions) -> None:
        self._inner = TensorFlowBFC(_ENDLESS, replace(options, allow_growth=False, fragmentation_fraction=0.0))
        self._base: int | None = None
        self.allocated_bytes = 0
        self.reserved_bytes = 0

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """A chunk; never fails."""
        address = self._inner.malloc(size, stream)
        if address is not None:
            self._base = address if self._base is None else self._base
            end = address - self._base + self._inner.allocated_bytes - self.allocated_bytes
            self.allocated_bytes = self._inner.allocated_bytes
            self.reserved_bytes = max(self.reserved_bytes, end)
        return address

    def free(self, handle: int | None) -> None:
        """Free a chunk."""
        self._inner.free(handle)
        self.allocated_bytes = self._inner.allocated_bytes

    def segments(self) -> tuple[SegmentView, ...]:
        """The region, up to its highest chunk."""
        whole = self._inner.segments()
        if not whole:
            return ()
        blocks = [block for block in whole[0].blocks if block.address < whole[0].address + self.reserved_bytes]
        last = blocks[-1]
        blocks[-1] = replace(last, size=whole[0].address + self.reserved_bytes - last.address)
        return (replace(whole[0], total_size=self.reserved_bytes, blocks=tuple(blocks)),)
