"""ONNX Runtime's BFC arena, byte for byte.

Source: ``onnxruntime/core/framework/bfc_arena.{h,cc}``, read up to 1.25; measured on 1.31.1 through its C API.
A *region* is one device allocation; it is cut into *chunks*, which are split when handed out and merged when freed.
All chunk and region sizes are multiples of 256 bytes; a *reserved* block is a device allocation of exactly its size
that never becomes part of a region. Routine names follow upstream.

:class:`StreamAwareBFCArena` is the CUDA provider's: a chunk once used on a stream does not merge with the never-used
rest of its region until the run ends (``tests/golden/onnxruntime/cuda``: 1.31.1 on the stub driver).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from graphmem.allocators.base import BlockView, SegmentView
from graphmem.allocators.bfc import MIN_ALLOCATION_BYTES, BumpDriver, Chunk, ChunkHeap, rounded_bytes
from graphmem.errors import DeviceOutOfMemory, UsageError

BACKPEDAL_FACTOR = np.float32(0.9)  # kBackpedalFactor, BFCArena::Extend
BACKPEDAL_FLOOR_BYTES = 8 * 1024  # BFCArena::Extend gives up below this
SIZE_MAX = 2**64 - 1  # a limit of 0 means this one (OrtArenaCfg::max_mem)


class ExtendStrategy(IntEnum):
    """``arena_extend_strategy``: how much a new region holds (``ArenaExtendStrategy``, arena_extend_strategy.h)."""

    kNextPowerOfTwo = 0  # noqa: N815 - the native names are what users type
    kSameAsRequested = 1  # noqa: N815


@dataclass(frozen=True, slots=True)
class ArenaConfig:
    """``OrtArenaCfg`` under its native names, all sizes in bytes; the defaults are 1.31.1's own (its creation log)."""

    max_mem: int = 0
    arena_extend_strategy: ExtendStrategy = ExtendStrategy.kNextPowerOfTwo
    initial_chunk_size_bytes: int = 1 << 20
    max_dead_bytes_per_chunk: int = 128 << 20
    initial_growth_chunk_size_bytes: int = 2 << 20
    max_power_of_two_extend_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        """Refuse what upstream never returns from: a growth size of 0 doubles for ever."""
        for key in ("initial_chunk_size_bytes", "initial_growth_chunk_size_bytes", "max_power_of_two_extend_bytes"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key} is {getattr(self, key)}; accepted: 1 or more bytes")
        if self.max_dead_bytes_per_chunk < 0:
            raise UsageError(f"max_dead_bytes_per_chunk is {self.max_dead_bytes_per_chunk}; accepted: 0 or more bytes")
        if self.max_mem < 0:
            raise UsageError(f"max_mem is {self.max_mem}; accepted: 0 or more bytes")


@dataclass(frozen=True, slots=True)
class _Region:
    identifier: int  # num_arena_extensions when it was made; Shrink spares number 0
    first: Chunk
    size: int


class BFCArena:
    """One arena. A handle is the block's address (``None`` for a request of 0 bytes)."""

    name = "onnxruntime-arena"

    def __init__(
        self,
        config: ArenaConfig | None = None,
        *,
        driver_alloc: Callable[[int], int | None] | None = None,
        driver_free: Callable[[int], None] | None = None,
    ) -> None:
        """``driver_alloc`` takes bytes and returns an address or ``None``; without it a :class:`BumpDriver` serves."""
        self.config = config or ArenaConfig()
        if driver_alloc is None:
            driver = BumpDriver()
            driver_alloc, driver_free = driver.alloc, driver.free
        self._driver_alloc = driver_alloc
        self._driver_free = driver_free or (lambda address: None)
        self._limit = self.config.max_mem or SIZE_MAX
        self._curr_region_bytes = rounded_bytes(min(self._limit, self.config.initial_chunk_size_bytes))
        self._heap = self._new_heap()
        self._regions: dict[int, _Region] = {}  # by address
        self._reserved: dict[int, int] = {}
        self.allocated_bytes = 0  # InUse
        self.reserved_bytes = 0  # TotalAllocated
        self.peak_reserved_bytes = 0  # upstream keeps no maximum of TotalAllocated; this one is ours
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def _new_heap(self) -> ChunkHeap:
        return _Heap(self.config.max_dead_bytes_per_chunk)

    # -- the allocator protocol ---------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """``BFCArena::Alloc``: a chunk of at least ``size`` bytes, or ``None`` for 0.

        Raises :class:`graphmem.errors.DeviceOutOfMemory` with ONNX Runtime's own words.
        """
        if size == 0:
            return None
        rounded = rounded_bytes(size)
        chunk = self._heap.take(rounded, size)
        if chunk is None:
            self._extend(rounded)
            chunk = self._heap.take(rounded, size)
        if chunk is None:  # only a device allocation smaller than asked could bring us here; Extend never keeps one
            message = f"Failed to find a free memory block despite calling Extend. rounded_bytes={rounded}"
            raise DeviceOutOfMemory(message, requested_bytes=size, free_bytes=self._available())
        self._count_allocation(chunk.size, size)
        return chunk.address

    def free(self, handle: int | None) -> None:
        """``BFCArena::Free``: a reserved block goes back to the device at once, a chunk stays in its region."""
        if handle is None:
            return
        if handle in self._reserved:
            size = self._reserved.pop(handle)
            self._driver_free(handle)
            self.allocated_bytes -= size
            self.reserved_bytes -= size
            self._counts["RequestedInUse"] -= size
            return
        size, requested = self._heap.give(handle)
        self.allocated_bytes -= size
        self._counts["RequestedInUse"] -= requested

    def reserve(self, size: int) -> int | None:
        """``BFCArena::Reserve``: a device allocation of exactly ``size`` bytes, outside every region.

        As upstream it does not look at ``max_mem``; past the limit, the unsigned subtraction in Extend wraps around and
        the limit is gone. Raises :class:`graphmem.errors.DeviceOutOfMemory` when the device itself is full.
        """
        if size == 0:
            return None
        address = self._driver_alloc(size)
        if address is None:
            message = f"Failed to allocate memory for requested buffer of size {size}"
            raise DeviceOutOfMemory(message, requested_bytes=size, free_bytes=self._available())
        self._reserved[address] = size
        self._counts["NumReserves"] += 1
        self._add_reserved_bytes(size)
        self._count_allocation(size, size)
        return address

    def shrink(self) -> None:
        """``BFCArena::Shrink``: give back every region without a chunk in use.

        Under kNextPowerOfTwo the first region ever made stays whatever its state.
        """
        for address, region in list(self._regions.items()):
            spared = region.identifier == 0 and self.config.arena_extend_strategy == ExtendStrategy.kNextPowerOfTwo
            if spared or any(chunk.in_use for chunk in region.first.and_after()):
                continue
            self._heap.drop_region(region.first)
            del self._regions[address]
            self._driver_free(address)
            self.reserved_bytes -= region.size
            self._counts["NumArenaShrinkages"] += 1
            self._counts["NumArenaExtensions"] -= 1  # as 1.31.1 reports it
        self._curr_region_bytes = self.config.initial_growth_chunk_size_bytes

    def record_stream(self, handle: int | None, stream: int) -> None:
        """Nothing: a session uses one stream."""

    def synchronize(self) -> None:
        """Nothing: a freed chunk is free at once."""

    def empty_cache(self) -> None:
        """:meth:`shrink`, the arena's only way to give memory back (``memory.enable_memory_arena_shrinkage``)."""
        self.shrink()

    def segments(self) -> tuple[SegmentView, ...]:
        """Regions and reserved blocks, by address."""
        views = [
            SegmentView(address, region.size, 0, "region", False, tuple(c.view() for c in region.first.and_after()))
            for address, region in self._regions.items()
        ]
        for address, size in self._reserved.items():
            block = BlockView(address, size, size, "allocated")
            views.append(SegmentView(address, size, 0, "reserved", False, (block,)))
        return tuple(sorted(views, key=lambda view: view.address))

    def stats(self) -> dict[str, int]:
        """``GetStats`` under upstream's keys. ``Limit`` is the unsigned limit upstream prints as int64 (-1: none)."""
        limit = self._limit if self._limit < 2**63 else self._limit - 2**64
        return {"Limit": limit, "InUse": self.allocated_bytes, "TotalAllocated": self.reserved_bytes, **self._counts}

    # -- growing ------------------------------------------------------------------------------------------------------

    def _available(self) -> int:
        # size_t arithmetic: reserves beyond the limit make it wrap, as upstream
        return ((self._limit - self.reserved_bytes) % 2**64) & ~(MIN_ALLOCATION_BYTES - 1)

    def _extend(self, rounded: int) -> None:
        """``Extend``: one more region that can hold ``rounded`` bytes."""
        available = self._available()
        if rounded > available:
            message = f"Available memory of {available} is smaller than requested bytes of {rounded}"
            raise DeviceOutOfMemory(message, requested_bytes=rounded, free_bytes=available)
        size = self._extend_bytes(rounded, available)
        address = self._driver_alloc(size)
        while address is None:
            size = rounded_bytes(math.floor(np.float32(size) * BACKPEDAL_FACTOR))
            if size < rounded or size < BACKPEDAL_FLOOR_BYTES:
                message = f"Failed to allocate memory for requested buffer of size {rounded}"
                raise DeviceOutOfMemory(message, requested_bytes=rounded, free_bytes=available)
            address = self._driver_alloc(size)
        self._add_reserved_bytes(size)
        self._regions[address] = _Region(self._counts["NumArenaExtensions"], self._heap.add_region(address, size), size)
        self._counts["NumArenaExtensions"] += 1

    def _extend_bytes(self, rounded: int, available: int) -> int:
        """``get_extend_bytes``: the size to ask of the device; advances the growth state even if that then fails."""
        if self.config.arena_extend_strategy == ExtendStrategy.kSameAsRequested:
            return rounded
        increased = False
        while rounded > self._curr_region_bytes:
            self._curr_region_bytes *= 2
            increased = True
        size = min(self._curr_region_bytes, available)
        if not increased:  # the cap holds for this doubling only, not for the loop above
            self._curr_region_bytes = min(self._curr_region_bytes * 2, self.config.max_power_of_two_extend_bytes)
        return size

    # -- statistics ---------------------------------------------------------------------------------------------------

    def _add_reserved_bytes(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _count_allocation(self, size: int, requested: int) -> None:
        counts = self._counts
        self.allocated_bytes += size
        counts["NumAllocs"] += 1
        counts["RequestedInUse"] += requested
        counts["MaxInUse"] = max(counts["MaxInUse"], self.allocated_bytes)
        counts["MaxAllocSize"] = max(counts["MaxAllocSize"], size)


class _Heap(ChunkHeap):
    """Chunks of which one that fits exactly is split too where ``max_dead_bytes_per_chunk`` is 0: into itself and one
    of no bytes. That one's address lies in no region, or is the next chunk's, which is lost then; the process ends, at
    once (bfc_arena.h:343) or when the next chunk is freed (bfc_arena.cc:635). 1.32.0, measured."""

    def __init__(self, most_waste: int) -> None:
        super().__init__(most_waste)
        self._lost: set[int] = set()

    def split_nothing(self, chunk: Chunk) -> None:
        """Raises :class:`UsageError` where nothing follows the chunk."""
        if chunk.next is None:
            raise _ends(chunk)
        self._lost.add(chunk.next.address)

    def give(self, address: int | None) -> tuple[int, int]:
        """As for every heap; raises :class:`UsageError` for a chunk that was lost."""
        if address in self._lost:
            raise _ends(self[address])
        return super().give(address)


def _ends(chunk: Chunk) -> UsageError:
    return UsageError(
        "max_dead_bytes_per_chunk:0 ends this process: ONNX Runtime splits chunks that fit exactly, and loses the one "
        f"behind them (here of {chunk.size} bytes); give 1 or more bytes"
    )


class _TaggedHeap(_Heap):
    """Chunks that know whether the stream has used them; only chunks of one kind merge (``StreamAwareBFCArena``)."""

    def __init__(self, most_waste: int) -> None:
        super().__init__(most_waste)
        self._tagged: set[int] = set()  # addresses of chunks used on the stream since the last reset

    def take(self, rounded: int, requested: int) -> Chunk | None:
        chunk = super().take(rounded, requested)
        if chunk is not None:
            self._tagged.add(chunk.address)
        return chunk

    def _split(self, chunk: Chunk, size: int) -> None:  # before the chunk is tagged: the rest keeps what it was
        is_rest = size < chunk.size
        super()._split(chunk, size)
        if is_rest and chunk.next is not None and chunk.address in self._tagged:
            self._tagged.add(chunk.next.address)

    def coalesce(self, chunk: Chunk) -> Chunk:
        if chunk.next is not None and not chunk.next.in_use and self._alike(chunk, chunk.next):
            self.remove_free(chunk.next)
            self._merge(chunk, chunk.next)
        before = chunk.previous
        if before is not None and not before.in_use and self._alike(before, chunk):
            self.remove_free(before)
            self._merge(before, chunk)
            return before
        return chunk

    def _alike(self, left: Chunk, right: Chunk) -> bool:
        return (left.address in self._tagged) == (right.address in self._tagged)

    def _merge(self, left: Chunk, right: Chunk) -> None:
        super()._merge(left, right)
        self._tagged.discard(right.address)

    def reset(self, first: Chunk) -> None:
        """Forget the stream in the region that begins with ``first``, and merge what is free
        (``ResetChunkOnTargetStream``)."""
        chunk: Chunk | None = first
        while chunk is not None:
            self._tagged.discard(chunk.address)
            chunk = chunk.next
        chunk = first
        while chunk is not None:
            beside = (chunk.previous, chunk.next)
            if not chunk.in_use and any(other is not None and not other.in_use for other in beside):
                self.remove_free(chunk)
                chunk = self.coalesce(chunk)
                self.insert_free(chunk)
            chunk = chunk.next


class StreamAwareBFCArena(BFCArena):
    """The arena of the CUDA provider, all of whose allocations are on one stream (``bfc_arena.cc``, ~1.25)."""

    def _new_heap(self) -> ChunkHeap:
        return _TaggedHeap(self.config.max_dead_bytes_per_chunk)

    def synchronize(self) -> None:
        """The end of a run: chunks lose their stream (``ReleaseStreamBuffers``)."""
        heap = self._heap
        assert isinstance(heap, _TaggedHeap)
        for region in self._regions.values():
            heap.reset(region.first)


_COUNTERS = (
    "RequestedInUse", "MaxInUse", "MaxAllocSize", "NumAllocs", "NumReserves",
    "NumArenaExtensions", "NumArenaShrinkages",
)  # fmt: skip
