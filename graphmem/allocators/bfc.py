"""Best fit with coalescing (BFC): the common part of TensorFlow's and ONNX Runtime's arenas.

Source: ``xla/tsl/framework/bfc_allocator.{h,cc}``; ONNX Runtime's ``core/framework/bfc_arena.{h,cc}`` began as a copy
of it and still decides these things alike. A *region* is one device allocation; it is cut into *chunks*, which are
split when handed out and merged when freed. Sizes are bytes. When and by how much to grow is each arena's own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from graphmem.allocators.base import BlockView

MIN_ALLOCATION_BYTES = 256  # kMinAllocationSize, bfc_allocator.h
DRIVER_ALIGNMENT_BYTES = 512  # a guess; cudaMalloc promises 256 or more, and only the order of addresses matters here


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
        if chunk.next is not None and not chunk.next.in_use:
            self.remove_free(chunk.next)
            self._merge(chunk, chunk.next)
        if chunk.previous is not None and not chunk.previous.in_use:
            self.remove_free(chunk.previous)
            chunk = chunk.previous
            assert chunk.next is not None
            self._merge(chunk, chunk.next)
        return chunk

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
