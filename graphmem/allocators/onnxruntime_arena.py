"""ONNX Runtime's BFC arena, byte for byte.

Source: ``onnxruntime/core/framework/bfc_arena.{h,cc}``, read up to 1.25; measured on 1.31.1 through its C API.
A *reserved* block is a device allocation of exactly its size that never becomes part of a region.

:class:`StreamAwareBFCArena` is the CUDA provider's: a chunk once used on a stream does not merge with the never-used
rest of its region until the run ends (``tests/golden/onnxruntime/cuda``: 1.31.1 on the stub driver).
"""

from __future__ import annotations

from enum import IntEnum

from graphmem.allocators.base import BlockView, SegmentView
from graphmem.allocators.bfc import BFC, MIN_ALLOCATION_BYTES, Chunk, ChunkHeap, DriverAlloc, DriverFree, Region
from graphmem.base.records import dataclass
from graphmem.errors import DeviceOutOfMemory, UsageError

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


class _Heap(ChunkHeap):
    """Chunks of which one that fits exactly is split too where ``max_dead_bytes_per_chunk`` is 0: into itself and one
    of no bytes. That one's address lies in no region, or is the next chunk's, which is lost then; the process ends, at
    once (bfc_arena.h:343) or when the next chunk is freed (bfc_arena.cc:635). 1.32.0, measured."""

    def __init__(self, most_waste: int) -> None:
        super().__init__(most_waste)
        self._lost: set[int] = set()

    def split_nothing(self, chunk: Chunk) -> None:
        """Mark the next chunk as lost. Raises :class:`UsageError` where there is none."""
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

    def _may_merge(self, left: Chunk, right: Chunk) -> bool:
        return (left.address in self._tagged) == (right.address in self._tagged)

    def _merge(self, left: Chunk, right: Chunk) -> None:
        super()._merge(left, right)
        self._tagged.discard(right.address)

    def reset(self, first: Chunk) -> None:
        """Forget the stream in the region that begins with ``first``, and merge what is free
        (``ResetChunkOnTargetStream``)."""
        self._tagged.difference_update(chunk.address for chunk in first.and_after())
        chunk: Chunk | None = first
        while chunk is not None:
            beside = (chunk.previous, chunk.next)
            if not chunk.in_use and any(other is not None and not other.in_use for other in beside):
                self.remove_free(chunk)
                chunk = self.coalesce(chunk)
                self.insert_free(chunk)
            chunk = chunk.next


class BFCArena(BFC):
    """One arena, of a session that uses one stream."""

    name = "onnxruntime-arena"
    _heap_type: type[ChunkHeap] = _Heap

    def __init__(
        self,
        config: ArenaConfig | None = None,
        *,
        driver_alloc: DriverAlloc | None = None,
        driver_free: DriverFree | None = None,
    ) -> None:
        self.config = config or ArenaConfig()
        self._limit = self.config.max_mem or SIZE_MAX
        first = min(self._limit, self.config.initial_chunk_size_bytes)
        super().__init__(self._heap_type(self.config.max_dead_bytes_per_chunk), first, driver_alloc, driver_free)
        self._reserved: dict[int, int] = {}
        self._requested_bytes = 0
        self._extensions = self._shrinkages = self._reserves = 0

    def malloc(self, size: int, stream: int = 0) -> int | None:
        """``BFCArena::Alloc``: a chunk of at least ``size`` bytes, or ``None`` for 0."""
        address = super().malloc(size, stream)
        self._requested_bytes += size
        return address

    def _take_after_growing(self, rounded: int, size: int) -> Chunk:
        self._extend(rounded)
        chunk = self._heap.take(rounded, size)
        assert chunk is not None  # Extend keeps no device allocation that is smaller than asked
        return chunk

    def free(self, handle: int | None) -> None:
        """``BFCArena::Free``: a reserved block goes back to the device at once, a chunk stays in its region."""
        if handle is None:
            return
        if handle in self._reserved:
            size = requested = self._reserved.pop(handle)
            self._driver_free(handle)
            self.reserved_bytes -= size
        else:
            size, requested = self._heap.give(handle)
        self.allocated_bytes -= size
        self._requested_bytes -= requested

    def reserve(self, size: int) -> int | None:
        """``BFCArena::Reserve``: a device allocation of exactly ``size`` bytes, outside every region.

        As upstream it does not look at ``max_mem``; past the limit, the unsigned subtraction in Extend wraps around and
        the limit is gone. Raises :class:`graphmem.errors.DeviceOutOfMemory` when the device itself is full.
        """
        if size == 0:
            return None
        address = self._driver_alloc(size)
        if address is None:
            raise _refused(size, self._available())
        self._reserved[address] = size
        self._reserves += 1
        self._requested_bytes += size
        self._count_reserved(size)
        self._count_allocation(size)
        return address

    def empty_cache(self) -> None:
        """``BFCArena::Shrink`` (``memory.enable_memory_arena_shrinkage``): give back every region without a chunk in
        use. Under kNextPowerOfTwo the first region ever made stays whatever its state."""
        for address, region in list(self._regions.items()):
            spared = not region.number and self.config.arena_extend_strategy == ExtendStrategy.kNextPowerOfTwo
            if region.is_free and not spared:
                self._drop(address)
                self._shrinkages += 1
                self._extensions -= 1  # as 1.31.1 reports it
        self._curr_region_bytes = self.config.initial_growth_chunk_size_bytes

    def segments(self) -> tuple[SegmentView, ...]:
        """Regions and reserved blocks, by address."""
        reserved = (
            SegmentView(address, size, 0, "reserved", False, (BlockView(address, size, size, "allocated"),))
            for address, size in self._reserved.items()
        )
        return tuple(sorted((*super().segments(), *reserved), key=lambda view: view.address))

    def stats(self) -> dict[str, int]:
        """``GetStats`` under upstream's keys. ``Limit`` is the unsigned limit upstream prints as int64 (-1: none)."""
        return {
            "Limit": self._limit if self._limit < 2**63 else self._limit - 2**64,
            "InUse": self.allocated_bytes,
            "TotalAllocated": self.reserved_bytes,
            "RequestedInUse": self._requested_bytes,
            "MaxInUse": self.peak_allocated_bytes,
            "MaxAllocSize": self.largest_alloc_bytes,
            "NumAllocs": self.num_allocs,
            "NumReserves": self._reserves,
            "NumArenaExtensions": self._extensions,
            "NumArenaShrinkages": self._shrinkages,
        }

    def _available(self) -> int:
        # size_t arithmetic: reserves beyond the limit make it wrap, as upstream
        return ((self._limit - self.reserved_bytes) % 2**64) & ~(MIN_ALLOCATION_BYTES - 1)

    def _extend(self, rounded: int) -> None:
        """``Extend``: one more region that can hold ``rounded`` bytes."""
        available = self._available()
        if rounded > available:
            message = f"Available memory of {available} is smaller than requested bytes of {rounded}"
            raise DeviceOutOfMemory(message, requested_bytes=rounded, free_bytes=available)
        found = self._device_region(self._extend_bytes(rounded, available), max(rounded, BACKPEDAL_FLOOR_BYTES))
        if found is None:
            raise _refused(rounded, available)
        address, size = found
        self._count_reserved(size)
        self._regions[address] = Region(self._heap.add_region(address, size), size, self._extensions)
        self._extensions += 1

    def _extend_bytes(self, rounded: int, available: int) -> int:
        """``get_extend_bytes``: the size to ask of the device; advances the growth state even if that then fails."""
        if self.config.arena_extend_strategy == ExtendStrategy.kSameAsRequested:
            return rounded
        increased = self._doubles_for(rounded)
        size = min(self._curr_region_bytes, available)
        if not increased:  # the cap holds for this doubling only
            self._curr_region_bytes = min(self._curr_region_bytes * 2, self.config.max_power_of_two_extend_bytes)
        return size


def _refused(size: int, free: int) -> DeviceOutOfMemory:
    message = f"Failed to allocate memory for requested buffer of size {size}"
    return DeviceOutOfMemory(message, requested_bytes=size, free_bytes=free)


class StreamAwareBFCArena(BFCArena):
    """The arena of the CUDA provider, all of whose allocations are on one stream (``bfc_arena.cc``, ~1.25)."""

    _heap_type = _TaggedHeap

    def synchronize(self) -> None:
        """The end of a run: chunks lose their stream (``ReleaseStreamBuffers``)."""
        assert isinstance(self._heap, _TaggedHeap)
        for region in self._regions.values():
            self._heap.reset(region.first)
