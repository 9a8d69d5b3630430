"""Best fit with coalescing (BFC): the common part of TensorFlow's and ONNX Runtime's arenas.

Source: ``xla/tsl/framework/bfc_allocator.{h,cc}``; ONNX Runtime's ``core/framework/bfc_arena.{h,cc}`` began as a copy
of it and still decides these things alike. A *region* is one device allocation; it is cut into *chunks*, which are
split when handed out and merged when freed. All sizes are bytes, those of chunks and regions multiples of 256. When to
grow, and the limit, are each arena's own.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from graphmem.allocators.base import Allocator, BlockView, SegmentView
from graphmem.base.records import dataclass

MIN_ALLOCATION_BYTES = 256  # kMinAllocationSize, bfc_allocator.h
DRIVER_ALIGNMENT_BYTES = 512  # a guess; cudaMalloc promises 256 or more, and only the order of addresses matters here
BACKPEDAL_FACTOR = np.float32(0.9)  # kBackpedalFactor, Extend: a float, and so is the product

DriverAlloc = Callable[[int], int | None]
DriverFree = Callable[[int], None]


class BumpDriver:
    """A device allocator with ever-growing addresses and an optional ``capacity`` in bytes.

    Only the order of addresses matters (equal chunks are handed out lowest address first); a real driver's is unknown.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._next = 1 << 40
        self._sizes: dict[int, int] = {}
        self._held = 0

    def alloc(self, size: int) -> int | None:
        """Address of a new range of ``size`` bytes, or ``None`` when the device is full."""
        if self.capacity is not None and self._held + size > self.capacity:
            return None
        address = self._next
        self._next += -(-size // DRIVER_ALIGNMENT_BYTES) * DRIVER_ALIGNMENT_BYTES
        self._sizes[address] = size
        self._held += size
        return address

    def free(self, address: int) -> None:
        """Give a range back."""
        self._held -= self._sizes.pop(address)


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a region, wholly free or wholly in use; ``previous`` and ``next`` are its neighbours there."""

    address: int
    size: int
    requested: int = 0
    in_use: bool = False
    previous: Chunk | None = None
    next: Chunk | None = None

    def and_after(self) -> Iterator[Chunk]:
        """This chunk and those after it in its region."""
        chunk: Chunk | None = self
        while chunk is not None:
            yield chunk
            chunk = chunk.next

    def view(self) -> BlockView:
        """The chunk as a block of a snapshot."""
        return BlockView(self.address, self.size, self.requested, "allocated" if self.in_use else "free")


def rounded_bytes(size: int) -> int:
    """``size`` rounded up to a multiple of 256 bytes (``RoundedBytes``)."""
    return -(-size // MIN_ALLOCATION_BYTES) * MIN_ALLOCATION_BYTES


class FreeChunks:
    """Free chunks by size, then by address (``ChunkComparator``).

    Upstream keeps them in bins, which are ranges of sizes, and searches the bins upwards: the same order. Thousands of
    equal chunks are common (the outputs of one ``Split``), so each size has a heap of addresses.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []  # ascending, each once
        self._addresses: dict[int, tuple[set[int], list[int]]] = {}  # of a size: those free; a heap of them and others

    def first(self, least: int) -> tuple[int, int] | None:
        """Size and address of the smallest chunk of ``least`` bytes or more, the lowest among equals."""
        position = bisect_left(self._sizes, least)
        if position == len(self._sizes):
            return None
        size = self._sizes[position]
        free, heap = self._addresses[size]
        while heap[0] not in free:
            heappop(heap)
        return size, heap[0]

    def add(self, size: int, address: int) -> None:
        """A chunk becomes free."""
        if size not in self._addresses:
            insort(self._sizes, size)
            self._addresses[size] = (set(), [])
        free, heap = self._addresses[size]
        free.add(address)
        heappush(heap, address)

    def remove(self, size: int, address: int) -> None:
        """A chunk is free no more. Its entry in the heap stays until it comes first or such entries are the most."""
        free, heap = self._addresses[size]
        free.remove(address)
        if not free:
            del self._addresses[size], self._sizes[bisect_left(self._sizes, size)]
        elif len(heap) > 2 * len(free) + 8:
            heap[:] = free
            heapify(heap)


class ChunkHeap:
    """The chunks of all regions.

    A chunk that exceeds a request by ``most_waste`` bytes or more, or is twice as large, is split.
    """

    def __init__(self, most_waste: int) -> None:
        self.most_waste = most_waste
        self._chunks: dict[int, Chunk] = {}
        self._free = FreeChunks()

    def __getitem__(self, address: int) -> Chunk:
        return self._chunks[address]

    def add_region(self, address: int, size: int, after: Chunk | None = None) -> Chunk:
        """A new region as one free chunk, or a continuation of the region that ends with ``after``."""
        chunk = Chunk(address, size, previous=after)
        if after is not None:
            after.next = chunk
        self._chunks[address] = chunk
        self.insert_free(self.coalesce(chunk))
        return chunk

    def drop_region(self, first: Chunk) -> None:
        """Forget the chunks of a region, all of which are free."""
        for chunk in list(first.and_after()):
            self.remove_free(chunk)
            del self._chunks[chunk.address]

    def take(self, rounded: int, requested: int) -> Chunk | None:
        """``FindChunkPtr``: the smallest free chunk that fits, the lowest address among equals, or None."""
        found = self._free.first(rounded)
        if found is None:
            return None
        chunk = self._chunks[found[1]]
        self.remove_free(chunk)
        if chunk.size >= rounded * 2 or chunk.size - rounded >= self.most_waste:
            self._split(chunk, rounded)
        chunk.in_use, chunk.requested = True, requested
        return chunk

    def give(self, address: int | None) -> tuple[int, int]:
        """Free the chunk at ``address``; returns its (size, requested bytes). Raises ValueError if none is in use."""
        chunk = None if address is None else self._chunks.get(address)
        if chunk is None or not chunk.in_use:
            raise ValueError(f"address {address} is not allocated")
        freed = (chunk.size, chunk.requested)
        chunk.in_use, chunk.requested = False, 0
        self.insert_free(self.coalesce(chunk))
        return freed

    def coalesce(self, chunk: Chunk) -> Chunk:
        """``TryToCoalesce``: merge with the free neighbours of the same region; returns the chunk that remains."""
        after, before = chunk.next, chunk.previous
        if after is not None and not after.in_use and self._may_merge(chunk, after):
            self.remove_free(after)
            self._merge(chunk, after)
        if before is not None and not before.in_use and self._may_merge(before, chunk):
            self.remove_free(before)
            self._merge(before, chunk)
            return before
        return chunk

    def _may_merge(self, left: Chunk, right: Chunk) -> bool:
        return True

    def insert_free(self, chunk: Chunk) -> None:
        """Put a free chunk into its bin (``InsertFreeChunkIntoBin``)."""
        self._free.add(chunk.size, chunk.address)

    def remove_free(self, chunk: Chunk) -> None:
        """Take a free chunk out of its bin (``RemoveFreeChunkFromBin``)."""
        self._free.remove(chunk.size, chunk.address)

    def _split(self, chunk: Chunk, size: int) -> None:
        """``SplitChunk``: ``chunk`` keeps ``size`` bytes, the rest becomes a free chunk after it."""
        if size == chunk.size:
            self.split_nothing(chunk)
            return
        rest = Chunk(chunk.address + size, chunk.size - size, previous=chunk, next=chunk.next)
        if chunk.next is not None:
            chunk.next.previous = rest
        chunk.next, chunk.size = rest, size
        self._chunks[rest.address] = rest
        self.insert_free(rest)

    def split_nothing(self, chunk: Chunk) -> None:
        """A rest of no bytes, which a heap that wastes none is asked for; where it can live is the arena's affair."""

    def _merge(self, left: Chunk, right: Chunk) -> None:
        left.size += right.size
        left.next = right.next
        if right.next is not None:
            right.next.previous = left
        del self._chunks[right.address]


@dataclass(slots=True, eq=False)
class Region:
    """One device allocation; ``number`` is how many there were when it was made."""

    first: Chunk
    size: int
    number: int = 0

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.first.address + self.size

    @property
    def is_free(self) -> bool:
        """Whether no chunk of it is in use."""
        return not any(chunk.in_use for chunk in self.first.and_after())


class BFC(Allocator):
    """An arena. A handle is the block's address (``None`` for a request of 0 bytes).

    ``driver_alloc`` takes bytes and returns an address or ``None``; without it a :class:`BumpDriver` serves.
    """

    def __init__(
        self, heap: ChunkHeap, first_bytes: int, driver_alloc: DriverAlloc | None, driver_free: DriverFree | None
    ) -> None:
        if driver_alloc is None:
            driver = BumpDriver()
            driver_alloc, driver_free = driver.alloc, driver.free
        self._driver_alloc = driver_alloc
        self._driver_free: DriverFree = driver_free or (lambda address: None)
        self._heap = heap
        self._curr_region_bytes = rounded_bytes(first_bytes)
        self._regions: dict[int, Region] = {}  # by address
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_allocs = 0
        self.largest_alloc_bytes = 0

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """A chunk of at least ``size`` bytes, or ``None`` for 0.

        Raises :class:`graphmem.errors.DeviceOutOfMemory` with the runtime's own words.
        """
        if size == 0:
            return None
        rounded = rounded_bytes(size)
        chunk = self._heap.take(rounded, size)
        if chunk is None:
            chunk = self._take_after_growing(rounded, size)
        self._count_allocation(chunk.size)
        return chunk.address

    @abstractmethod
    def _take_after_growing(self, rounded: int, size: int) -> Chunk:
        """A chunk where none was free. Raises :class:`graphmem.errors.DeviceOutOfMemory`."""

    def free(self, handle: int | None) -> None:
        """The chunk merges with its free neighbours and stays in its region."""
        if handle is not None:
            self.allocated_bytes -= self._heap.give(handle)[0]

    def segments(self) -> tuple[SegmentView, ...]:
        """The regions, by address."""
        return tuple(
            SegmentView(address, region.size, 0, "region", False, tuple(c.view() for c in region.first.and_after()))
            for address, region in sorted(self._regions.items())
        )

    def _doubles_for(self, rounded: int) -> bool:
        """Double the size of the next region until it holds so many bytes; whether that took any doubling."""
        before = self._curr_region_bytes
        while rounded > self._curr_region_bytes:
            self._curr_region_bytes *= 2
        return self._curr_region_bytes > before

    def _device_region(self, size: int, least: int) -> tuple[int, int] | None:
        """Address and bytes of a device allocation of ``size`` bytes, or of fewer, down to ``least``, where the device
        refuses. Up to 10 x 256 bytes nine tenths round up to the size again, for which TensorFlow 2.21 asks for ever;
        newer XLA steps down by 256 bytes, and so does this."""
        address = self._driver_alloc(size)
        while address is None:
            smaller = rounded_bytes(math.floor(np.float32(size) * BACKPEDAL_FACTOR))
            size = smaller if smaller < size else size - MIN_ALLOCATION_BYTES
            if size < least:
                return None
            address = self._driver_alloc(size)
        return address, size

    def _drop(self, address: int) -> None:
        """Give a region back, all of whose chunks are free."""
        region = self._regions.pop(address)
        self._heap.drop_region(region.first)
        self._driver_free(address)
        self.reserved_bytes -= region.size

    def _count_reserved(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _count_allocation(self, size: int) -> None:
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.num_allocs += 1
        self.largest_alloc_bytes = max(self.largest_alloc_bytes, size)
