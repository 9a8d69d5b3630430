"""PyTorch's allocator on Apple's cards: Metal heaps, and buffers in them that are kept for the next request.

Source: ``aten/src/ATen/mps/MPSAllocator.h`` and ``MPSAllocator.mm`` of pytorch/pytorch; names of methods follow
``MPSHeapAllocatorImpl``. A freed buffer keeps its size: nothing is split or merged but the heap around it.

By source: heap sizes, pools, reuse, watermarks, garbage collection, what is tried before giving up. Not in PyTorch's
source, and assumed: Metal rounds buffers to 256 bytes (scalars of messages: "Tried to allocate 256 bytes on shared
pool", pinokio#941), puts each into the lowest gap of its heap, and command buffers are done when memory is asked for.
Not modelled: ``maxBufferLength``, and memory that MPSGraph takes beside the allocator (``other_bytes`` stands for it).
Not checked against a running machine.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from graphmem.allocators.base import Allocator, BlockView, SegmentView
from graphmem.base.numbers import round_up
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.units import MIB, format_bytes

# MPSAllocator.h, bytes.
SMALL_BYTES = 1 * MIB  # kMaxSmallAlloc: larger buffers are of the large pool
MIN_LARGE_BYTES = 10 * MIB  # kMinLargeAlloc: from this size on, extra large heaps
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: a heap for one buffer is a multiple of it
SMALL_HEAP_BYTES = 8 * MIB  # kSmallHeap
LARGE_HEAP_BYTES = 32 * MIB  # kLargeHeap; also how much larger than the request a reused buffer may be
XLARGE_HEAP_BYTES = 1024 * MIB  # kXLargeHeap; from half of it on, a buffer has a heap of its own
SCALAR_BYTES = 8  # kMaxScalarAlloc: up to this size, shared memory
HIGHEST_RATIO = 2.0  # default_high_watermark_upper_bound

#: What Metal rounds buffers to, bytes; assumed, see above.
BUFFER_ALIGNMENT = 256
FIRST_ADDRESS = 1 << 40  # addresses are only names here


@dataclass(frozen=True)
class Watermarks:
    """``PYTORCH_MPS_HIGH_WATERMARK_RATIO`` and ``..._LOW_...``: parts of the recommended working set, 0 for no limit.

    Above ``high`` requests fail; from ``low`` on cached buffers are collected. Raises
    :class:`graphmem.errors.UsageError` for what PyTorch refuses, such as a ``high`` below the default of ``low``.
    """

    high: float = 1.7
    low: float = 1.4

    def __post_init__(self) -> None:
        """Refuse what ``setHighWatermarkRatio`` and ``setLowWatermarkRatio`` refuse."""
        if not 0.0 <= self.high <= HIGHEST_RATIO:
            raise UsageError(f"PYTORCH_MPS_HIGH_WATERMARK_RATIO is {self.high}; accepted: 0 to {HIGHEST_RATIO}")
        most = self.high or HIGHEST_RATIO
        if not 0.0 <= self.low <= most:
            raise UsageError(
                f"PYTORCH_MPS_LOW_WATERMARK_RATIO is {self.low}; accepted: 0 to {most}, as the high one is {self.high}"
            )


def heap_bytes(size: int, *, under_pressure: bool = False) -> tuple[int, bool]:
    """(bytes of the heap made for a buffer of ``size`` bytes, whether other buffers may share it)."""
    if size <= SMALL_BYTES:
        return SMALL_HEAP_BYTES, True
    if size < MIN_LARGE_BYTES:
        return LARGE_HEAP_BYTES, True
    if size < XLARGE_HEAP_BYTES // 2 and not under_pressure:
        return XLARGE_HEAP_BYTES, True
    return round_up(size, ROUND_LARGE_BYTES), False


@dataclass(slots=True, eq=False)
class Buffer:
    """A ``BufferBlock``: ``size`` bytes at ``offset`` of its heap. ``age``: how often it was passed over."""

    number: int
    size: int
    offset: int
    heap: Heap
    requested: int = 0
    in_use: bool = False
    age: int = 0


@dataclass(slots=True, eq=False)
class Heap:
    """A ``HeapBlock``: ``size`` bytes at ``address``; ``buffers`` in the order of their offsets. ``available``: bytes
    of the largest range without a buffer (``maxAvailableSizeWithAlignment``)."""

    address: int
    size: int
    pool: Pool
    shared_by_buffers: bool
    available: int
    buffers: list[Buffer] = field(default_factory=list)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of each unused range."""
        end = 0
        for buffer in self.buffers:
            if buffer.offset > end:
                yield end, buffer.offset - end
            end = buffer.offset + buffer.size
        if end < self.size:
            yield end, self.size - end

    def add(self, buffer: Buffer) -> None:
        """Hold one more buffer."""
        insort(self.buffers, buffer, key=lambda one: one.offset)
        self._measure()

    def remove(self, buffer: Buffer) -> None:
        """Hold it no longer."""
        self.buffers.remove(buffer)
        self._measure()

    def _measure(self) -> None:
        self.available = max((size for _, size in self.gaps()), default=0)


@dataclass(slots=True, eq=False)
class Pool:
    """A ``BufferPool``. ``waiting``: (bytes, number) of each cached buffer, sorted; ``cached`` has them by number."""

    name: str
    is_small: bool
    heaps: list[Heap] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    cached: dict[int, Buffer] = field(default_factory=dict)

    def first_of(self, size: int) -> Buffer | None:
        """The smallest cached buffer of at least that size, of equals the oldest."""
        position = bisect_left(self.waiting, (size, 0))
        return self.cached[self.waiting[position][1]] if position < len(self.waiting) else None

    def add(self, buffer: Buffer) -> None:
        """Keep a freed buffer."""
        insort(self.waiting, (buffer.size, buffer.number))
        self.cached[buffer.number] = buffer

    def remove(self, buffer: Buffer) -> None:
        """Take a buffer out, to be used or given back."""
        del self.waiting[bisect_left(self.waiting, (buffer.size, buffer.number))]
        del self.cached[buffer.number]

    def by_size(self) -> list[Buffer]:
        """The cached buffers, the smallest first."""
        return [self.cached[number] for _, number in self.waiting]

    def free_heap(self, size: int) -> Heap | None:
        """The heap with the least room that has enough, of equals the oldest (``get_free_heap``)."""
        fitting = (heap for heap in self.heaps if heap.available >= size)
        return min(fitting, key=lambda heap: (heap.available, heap.address), default=None)


class MPSHeaps(Allocator):
    """The allocator of an Apple machine whose recommended working set is ``recommended_bytes`` (None: no limit).

    ``other_bytes``: what Metal counts of the process beside the heaps. ``scalars_apart``: buffers of up to 8 bytes have
    heaps of their own, as where the rest lies in private memory. A handle is the buffer; None that of 0 bytes.
    """

    name = "mps-heaps"

    def __init__(
        self,
        recommended_bytes: int | None = None,
        watermarks: Watermarks | None = None,
        *,
        other_bytes: int = 0,
        scalars_apart: bool = True,
    ) -> None:
        self.watermarks = watermarks or Watermarks()
        self.other_bytes = other_bytes
        self.high_limit = _limit(recommended_bytes, self.watermarks.high)
        self.low_limit = _limit(recommended_bytes, self.watermarks.low)
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self._small, self._large = Pool("small", is_small=True), Pool("large", is_small=False)
        self._scalars = Pool("scalars", is_small=True) if scalars_apart else self._small
        self._numbers = count()
        self._next_address = FIRST_ADDRESS

    def malloc(self, size: int, stream: int = 0) -> Buffer | None:
        """``alloc_buffer_block``. Raises :class:`graphmem.errors.DeviceOutOfMemory`."""
        if size <= 0:
            return None
        rounded = round_up(size, BUFFER_ALIGNMENT)
        buffer = self._buffer(self._pool_of(size, rounded), rounded)
        buffer.in_use, buffer.requested = True, size
        self.allocated_bytes += buffer.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return buffer

    def free(self, handle: Buffer | None) -> None:
        """``free_buffer``: the buffer waits for a request that it fits."""
        if handle is None:
            return
        if not handle.in_use:
            raise ValueError("freed a block that is not allocated")
        handle.in_use, handle.requested = False, 0
        self.allocated_bytes -= handle.size
        handle.heap.pool.add(handle)

    def empty_cache(self) -> None:
        """``release_cached_buffers``: give every cached buffer back, and the heaps that are empty then."""
        for pool in self._pools():
            for buffer in pool.by_size():
                self._release(buffer)

    def segments(self) -> tuple[SegmentView, ...]:
        """The heaps by address, tiled by buffers and gaps."""
        heaps = [heap for pool in self._pools() for heap in pool.heaps]
        return tuple(_view(heap) for heap in sorted(heaps, key=lambda heap: heap.address))

    # ------------------------------------------------------------------ allocating

    def _buffer(self, pool: Pool, size: int) -> Buffer:
        under_pressure = not pool.is_small and self._is_under_pressure()
        found, under_pressure = self._cached_buffer(pool, size, under_pressure)
        if found is not None:
            return found
        if under_pressure and size < sum(held for held, _ in pool.waiting):
            self._collect_garbage(pool)
        found = self._new_buffer(pool, size, under_pressure)
        if found is None and self._release_enough(pool, size):
            self.num_alloc_retries += 1
            found = self._new_buffer(pool, size, under_pressure)
        if found is None:
            self.num_alloc_retries += 1
            self.empty_cache()
            found = self._new_buffer(pool, size, under_pressure)
        if found is None:
            raise self._out_of_memory(size)
        return found

    def _cached_buffer(self, pool: Pool, size: int, under_pressure: bool) -> tuple[Buffer | None, bool]:
        """``get_free_buffer``: a buffer that fits, and whether there still is pressure.

        One that is far too large is given back, so that its heap has room, unless another heap has it already.
        """
        if self._exceeds(size):
            return None, under_pressure
        if self.low_limit is not None and not pool.is_small:
            for waiting in pool.cached.values():
                waiting.age += 1
        buffer = pool.first_of(size)
        if buffer is None:
            return None, under_pressure
        if buffer.size > size + LARGE_HEAP_BYTES:
            if pool.free_heap(size) is None:
                self._release(buffer, with_heap=False)
                under_pressure = False
            return None, under_pressure
        pool.remove(buffer)
        buffer.age = 0
        return buffer, under_pressure

    def _new_buffer(self, pool: Pool, size: int, under_pressure: bool) -> Buffer | None:
        """``alloc_buffer``: a buffer in a heap with room, or in a new heap."""
        if self._exceeds(size):
            return None
        heap = pool.free_heap(size) or self._new_heap(pool, size, under_pressure)
        offset = next(start for start, room in heap.gaps() if room >= size)
        buffer = Buffer(next(self._numbers), size, offset, heap)
        heap.add(buffer)
        return buffer

    def _new_heap(self, pool: Pool, size: int, under_pressure: bool) -> Heap:
        total, is_shared = heap_bytes(size, under_pressure=under_pressure)
        heap = Heap(self._next_address, total, pool, is_shared, total)
        self._next_address += total
        pool.heaps.append(heap)
        self.reserved_bytes += total
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return heap

    # ------------------------------------------------------------------ giving back

    def _release(self, buffer: Buffer, *, with_heap: bool = True) -> None:
        """``release_buffer``: a cached buffer leaves its heap, which goes too where it is empty ``with_heap``."""
        heap = buffer.heap
        heap.pool.remove(buffer)
        heap.remove(buffer)
        if with_heap and not heap.buffers:
            heap.pool.heaps.remove(heap)
            self.reserved_bytes -= heap.size

    def _release_enough(self, pool: Pool, size: int) -> bool:
        """``release_available_cached_buffers``: the first that fits, else the largest until that many bytes."""
        buffer = pool.first_of(size)
        if buffer is not None:
            self._release(buffer)
            return True
        released = 0
        for largest in reversed(pool.by_size()):
            if released >= size:
                break
            released += largest.size
            self._release(largest)
        return released >= size

    def _collect_garbage(self, pool: Pool) -> None:
        """``garbage_collect_cached_buffers``: buffers of more than the average age go, down to the low watermark."""
        assert self.low_limit is not None
        target, reclaimed, freed = self._in_use() - self.low_limit, 0, True
        while reclaimed < target and freed and pool.cached:
            freed = False
            threshold = sum(one.age for one in pool.cached.values()) / len(pool.cached)
            for buffer in pool.by_size():
                if reclaimed >= target:
                    break
                if buffer.age >= threshold:
                    freed = True
                    reclaimed += buffer.size
                    self._release(buffer, with_heap=not buffer.heap.shared_by_buffers)

    # ------------------------------------------------------------------ limits

    def _in_use(self) -> int:
        """``current_allocated_size``: what Metal counts."""
        return self.reserved_bytes + self.other_bytes

    def _exceeds(self, size: int) -> bool:
        return self.high_limit is not None and self._in_use() + size > self.high_limit

    def _is_under_pressure(self) -> bool:
        # getLowWatermarkValue: whole MiB below the low watermark.
        return self.low_limit is not None and self.low_limit - self._in_use() < MIB

    def _pool_of(self, size: int, rounded: int) -> Pool:
        """``get_pool`` on a card whose memory is the host's."""
        if size <= SCALAR_BYTES:
            return self._scalars
        return self._small if rounded <= SMALL_BYTES else self._large

    def _pools(self) -> tuple[Pool, ...]:
        return tuple(dict.fromkeys((self._small, self._large, self._scalars)))

    def _out_of_memory(self, size: int) -> DeviceOutOfMemory:
        limit = self.high_limit or 0
        words = (
            f"MPS backend out of memory (MPS allocated: {format_bytes(self.reserved_bytes)}, other allocations: "
            f"{format_bytes(self.other_bytes)}, max allowed: {format_bytes(limit)}): {format_bytes(size)} asked for"
        )
        return DeviceOutOfMemory(words, requested_bytes=size, free_bytes=max(0, limit - self._in_use()))


def _limit(recommended_bytes: int | None, ratio: float) -> int | None:
    """Bytes of that part of the working set; None for no limit."""
    return None if recommended_bytes is None or ratio == 0.0 else int(ratio * recommended_bytes)


def _view(heap: Heap) -> SegmentView:
    blocks = [
        BlockView(heap.address + one.offset, one.size, one.requested, "allocated" if one.in_use else "free")
        for one in heap.buffers
    ]
    blocks += [BlockView(heap.address + offset, size, 0, "free") for offset, size in heap.gaps()]
    return SegmentView(
        heap.address, heap.size, 0, heap.pool.name, False, tuple(sorted(blocks, key=lambda block: block.address))
    )
