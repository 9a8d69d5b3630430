"""PyTorch's CUDA caching allocator without CUDA: the same decisions, on addresses that nobody backs with memory.

The methods carry the names of ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp`` (read: main between
torch 2.10 and 2.11; checked against recordings of 2.11 and 2.13). Modelled: both pools, streams, splitting and merging,
``record_stream``, retries, garbage collection, memory fraction, private pools (CUDA graphs, MemPool), expandable
segments and every setting that changes device memory. Not modelled: ``backend:cudaMallocAsync``, and
``graph_capture_record_stream_reuse``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import floor

from graphmem.allocators.alloc_conf import AllocConf, parse_alloc_conf
from graphmem.allocators.base import Played, SegmentView
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.pytorch_caching.blocks import (
    ADDRESS_BITS,
    ALLOCATED,
    FREE,
    GONE,
    MIN_BLOCK_BYTES,
    ONE_EXBIBYTE,
    ORDER_BITS,
    PENDING,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
    Block,
    FreeSet,
    Pool,
    get_allocation_size,
    round_size,
)
from graphmem.allocators.pytorch_caching.events import EventQueues
from graphmem.allocators.pytorch_caching.expandable import ExpandableSegment, try_allocate_expandable_block
from graphmem.allocators.pytorch_caching.fast_forward import Numbers, fast_forward
from graphmem.allocators.pytorch_caching.private_pools import PoolInterface
from graphmem.allocators.pytorch_caching.release import (
    garbage_collect_cached_blocks,
    release_available_cached_blocks,
    release_cached_blocks,
)
from graphmem.allocators.pytorch_caching.stats import COUNTERS, DeviceStats
from graphmem.allocators.pytorch_caching.table import (
    GIVEN,
    LAST_SERIAL,
    MOST_MAPPED,
    RESERVED,
    RETRIES,
    TAKEN,
)
from graphmem.allocators.pytorch_caching.views import out_of_memory, rejection, segment_views
from graphmem.base import versions
from graphmem.errors import DeviceOutOfMemory, UsageError


class PyTorchCachingAllocator(PoolInterface):
    """The allocator of one device.

    ``capacity_bytes`` is the card's total memory (``None``: unlimited, nothing is ever out of memory); give a
    ``driver`` instead to choose addresses, event lag or the bytes that others use. ``track_stats`` keeps all counters
    of ``torch.cuda.memory_stats`` (slower). A handle is the block itself; ``None`` is the handle of a 0-byte request.

    Raises :class:`graphmem.errors.UsageError` for settings that are not modelled.
    """

    name = "pytorch_caching"

    def __init__(
        self,
        capacity_bytes: int | None = None,
        conf: AllocConf | None = None,
        torch_version: tuple[int, int] = versions.NEWEST,
        *,
        driver: CudaDriver | None = None,
        track_stats: bool = False,
    ) -> None:
        super().__init__(torch_version)
        conf = AllocConf() if conf is None else conf
        if conf.backend != "native":
            raise UsageError(
                f"allocator backend {conf.backend!r} is not modelled: CUDA's own pool decides there, which is closed "
                "source; accepted: native"
            )
        if driver is not None and capacity_bytes is not None:
            raise UsageError("give capacity_bytes or a driver (which has its own capacity), not both")
        self.conf = conf
        self.torch_version = torch_version
        self.driver = CudaDriver(capacity_bytes) if driver is None else driver
        self.stats = DeviceStats(conf.max_split_size_bytes) if track_stats else None

        self.allocated_bytes = 0
        self.reserved_bytes = 0  # total_allocated_memory upstream
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0

        self._small = Pool(is_small=True)
        self._large = Pool(is_small=False)
        self._expandable_segments: list[ExpandableSegment] = []
        self._follow(conf)
        self.counts_blocks = versions.OLDEST_BLOCK_FIRST.holds(torch_version)
        self.numbers_segments = versions.OLDEST_SEGMENT_FIRST.holds(torch_version)
        if self.numbers_segments:
            self.counts_blocks = False
        self._next_serial = 0
        self._heads: dict[int, Block] = {}  # first block of every cudaMalloc'ed segment
        self._stream_uses: dict[Block, set[int]] = {}
        self._events = EventQueues()
        self._allowed: int | None = None
        self._rejects_above: int | None = None
        self._collects = False
        self.set_memory_fraction(conf.per_process_memory_fraction)

    # ------------------------------------------------------------------ the interface

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """Allocate ``size`` bytes for ``stream``. Raises :class:`graphmem.errors.DeviceOutOfMemory`."""
        if size <= 0:
            return None
        if self._events.streams or self.private_pools.deferred:
            self.process_events()
        # round_size without divisions, inlined: this is the hot path.
        rounded = (size + 511) & -512 if self._divisions is None else round_size(size, self._divisions)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        free_set = pool.by_stream.get(stream)
        if free_set is None:
            free_set = self._new_free_set(pool, stream)
        block = self.get_free_block(free_set, rounded)
        if block is None:
            block = self._alloc_or_raise(free_set, rounded, size)
            free_set = block.free_set
        return self.alloc_found_block(free_set, block, rounded, size)

    def malloc_in_pool(self, size: int, stream: int, pool: int) -> Block | None:
        """Allocate from a private pool, which must be held. Raises as :meth:`malloc` does."""
        if size <= 0:
            return None
        self.process_events()
        rounded = round_size(size, self.conf.roundup_power2_divisions)
        free_set = self.free_set("small" if rounded <= SMALL_BYTES else "large", stream, pool)
        block = self.get_free_block(free_set, rounded) or self._alloc_or_raise(free_set, rounded, size)
        return self.alloc_found_block(free_set, block, rounded, size)

    def free(self, handle: Block | None) -> None:
        """Give a block back; it stays reserved, and pending while other streams use it."""
        if handle is None:
            return
        if handle.state != ALLOCATED:
            raise ValueError("freed a block that is not allocated")
        self.allocated_bytes -= handle.size
        if self.stats is not None:
            self.stats.count_free(handle)
        if self._stream_uses and handle in self._stream_uses:
            handle.state = PENDING
            if self.private_pools.in_capture:
                self.private_pools.deferred.append(handle)
            else:
                self.private_pools.stream_uses_in_capture.pop(handle, None)
                self._events.insert_events(handle, self._stream_uses.pop(handle), self.driver.event_lag)
            return
        self.free_block(handle)

    def record_stream(self, handle: Block | None, stream: int) -> None:
        """Note that ``stream`` uses the block too; the block's own stream needs no note."""
        if handle is None or stream == handle.free_set.stream:
            return
        if handle.state != ALLOCATED:
            raise ValueError("recorded a stream on a block that is not allocated")
        self._stream_uses.setdefault(handle, set()).add(stream)
        if self.private_pools.in_capture:
            self.private_pools.stream_uses_in_capture.setdefault(handle, set()).add(stream)

    def synchronize(self) -> None:
        """``torch.cuda.synchronize``: outstanding events complete, and are noticed at the next allocation."""
        if self.driver.synchronize_completes_events:
            self._events.complete()

    def wait_for(self, stream: int, later: int) -> None:
        """``torch.cuda.Event.synchronize``: a stream's outstanding events complete, but for the ``later`` last ones."""
        if self.driver.synchronize_completes_events:
            self._events.complete_on(stream, later)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``: give back every segment in which nothing is allocated, except of held pools."""
        release_cached_blocks(self, self._large, self._small)

    def empty_pool(self, pool: int) -> None:
        """``emptyCache(id)``, which a MemPool does when it is deleted: give its unused segments back."""
        release_cached_blocks(self, self._large, self._small, pool)

    def set_memory_fraction(self, fraction: float) -> None:
        """``torch.cuda.set_per_process_memory_fraction``: cap reserved bytes at that part of the card's memory."""
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"invalid memory fraction {fraction}; accepted: 0 to 1")
        self._allowed = None
        if fraction < 1.0:
            total = self.driver.capacity_bytes
            if total is None:
                raise UsageError("a memory fraction needs the card's capacity_bytes")
            exact = fraction * float(total)
            # std::llround on positive numbers; a plain cast before.
            rounded = versions.ROUNDED_FRACTION.holds(self.torch_version)
            self._allowed = floor(exact + 0.5) if rounded else int(exact)
        # pytorch#179473 (2.12): refused at once, without the attempts that follow otherwise. Only what the fraction
        # lets through gets that far (recorded with 2.13), so a fraction below 1 turns it off.
        total = self.driver.capacity_bytes
        self._rejects_above = total if self.conf.throw_on_cudamalloc_oom else None
        self._collects = self._allowed is not None and self.conf.garbage_collection_threshold > 0.0

    def refuse(self, size: int, stream: int = 0, pool: int = 0) -> None:
        """A request that was out of memory when the run was recorded. On another card it may be served, and is given
        back at once; without a limit, the cache goes back as it did before the error."""
        if self.driver.capacity_bytes is None:
            self.empty_cache()
            return
        own = PyTorchCachingAllocator  # a subclass that notes requests has no part in this one
        try:
            block = own.malloc_in_pool(self, size, stream, pool) if pool else own.malloc(self, size, stream)
        except DeviceOutOfMemory:
            return
        own.free(self, block)

    def limit_to_fraction(self, fraction: float) -> None:
        """:meth:`set_memory_fraction`, for which no limit is no card, and no part of one."""
        if self.driver.capacity_bytes is not None:
            self.set_memory_fraction(fraction)

    def change_settings(self, text: str) -> None:
        """``torch._C._accelerator_setAllocatorSettings``: settings that ``text`` leaves out get their defaults.

        Blocks stay as they are, also where expandable segments are switched on or off: those of the other kind are
        free for what was asked before, and each goes back in its own way. Raises
        :class:`graphmem.errors.UsageError` for a text that PyTorch refuses.
        """
        conf = parse_alloc_conf(text, self.torch_version)
        if conf.backend != self.conf.backend:
            raise UsageError(f"allocator settings {text!r}: the backend stays as the run began")
        self.conf = conf
        self._follow(conf)
        for pool in (self._small, self._large, *self.private_pools.pools()):
            for free_set in pool.by_stream.values():
                free_set.split_from = self._split_from(pool)
        if self.stats is not None:
            self.stats.follow(conf.max_split_size_bytes)
        # A fraction that the text does not name is not reset: it was given to the allocator, not to the settings.
        if conf.per_process_memory_fraction != 1.0:
            self.limit_to_fraction(conf.per_process_memory_fraction)
        self._rejects_above = self.driver.capacity_bytes if conf.throw_on_cudamalloc_oom else None
        self._collects = self._allowed is not None and conf.garbage_collection_threshold > 0.0

    def _follow(self, conf: AllocConf) -> None:
        self._expandable = conf.expandable_segments
        self._max_split = conf.max_split_size_bytes
        expandable = self._expandable or bool(self._expandable_segments)
        self._limits_reuse = expandable or self._max_split <= ONE_EXBIBYTE
        self._divisions = conf.roundup_power2_divisions if any(conf.roundup_power2_divisions) else None

    def segments(self) -> tuple[SegmentView, ...]:
        """The segments as ``torch.cuda.memory_snapshot`` lists them: in address order, tiled by their blocks."""
        return segment_views(self._heads.values(), self._expandable_segments)

    # ------------------------------------------------------------------ many events at once

    @property
    def is_plain(self) -> bool:
        """Whether nothing was allocated yet, and nothing but the card's memory limits what is reserved."""
        special = (self.stats, self._allowed, self._rejects_above, *self.private_pools.pools())
        return (
            type(self) is PyTorchCachingAllocator
            and all(one is None for one in special)
            and not (self._heads or self._expandable_segments or self.counts_blocks)
        )

    def fast_forward(
        self, kinds: Numbers, subjects: Numbers, sizes: Sequence[int] | Numbers, streams: Sequence[int] | Numbers
    ) -> Played | None:
        """Play events as far as the plain path goes; None where nothing is played."""
        return fast_forward(self, kinds, subjects, sizes, streams)

    def take_segments(self, sizes: Mapping[Block, int], most_reserved: int, counted: Sequence[int]) -> None:
        """Hold segments of so many bytes by their first blocks, as after all that was ``counted`` (:mod:`.table`)."""
        self.driver.hold({first.address: size for first, size in sizes.items()}, counted[MOST_MAPPED])
        self._heads = {first.address: first for first in sizes}
        self.reserved_bytes, self.peak_reserved_bytes = counted[RESERVED], most_reserved
        self.num_device_alloc, self.num_device_free = counted[TAKEN], counted[GIVEN]
        self.num_alloc_retries = self.num_sync_all_streams = counted[RETRIES]
        self._next_serial = counted[LAST_SERIAL]

    def take_mapped(self, free_set: FreeSet, size: int, times: int) -> None:
        """Obtain from the driver what was mapped, in so many ``times``, of an expandable segment that is there."""
        assert self.driver.create(1, size)
        self.count_reserved(free_set, size)
        self.num_device_alloc += times - 1

    # ------------------------------------------------------------------ allocating

    def get_free_block(self, free_set: FreeSet, rounded: int) -> Block | None:
        """Take the best-fitting free block out of its set: the smallest, of equals the first in order."""
        if self._collects:
            free_set.pool.get_free_blocks_call_count += 1
        keys = free_set.keys
        position = bisect_left(keys, rounded << ORDER_BITS)
        if position == len(keys):
            return None
        if self._limits_reuse:
            chosen = self._limited_choice(free_set, position, rounded)
            if chosen is None:
                return None
            position = chosen
        del keys[position]
        return free_set.blocks.pop(position)

    def _limited_choice(self, free_set: FreeSet, position: int, rounded: int) -> int | None:
        """The best fit, within the limits of expandable segments and ``max_split_size``; None: it must not be used."""
        blocks = free_set.blocks
        if self._expandable:
            # A block in front of unmapped space counts with the size it can grow to.
            while (
                blocks[position].segment is not None
                and position + 1 < len(blocks)
                and _expandable_size(blocks[position + 1]) < _expandable_size(blocks[position])
            ):
                position += 1
        else:
            # Switched off since: whoever did so wants memory of cudaMalloc, to share it with another process.
            while blocks[position].segment is not None:
                position += 1
                if position == len(blocks):
                    return None
        size = blocks[position].size
        if rounded < self._max_split:
            return None if size >= self._max_split else position
        return None if size >= rounded + self.conf.max_non_split_rounding_bytes else position

    def _alloc_or_raise(self, free_set: FreeSet, rounded: int, size: int) -> Block:
        """The second half of upstream's ``malloc``: new memory, with everything it tries before giving up."""
        if size >= ONE_EXBIBYTE:
            raise DeviceOutOfMemory(
                "CUDA out of memory. Tried to allocate more than 1EB memory.",
                requested_bytes=size,
                free_bytes=self.driver.free_bytes(),
            )
        if self._collects and self._allowed is not None:
            garbage_collect_cached_blocks(self, self._large, self._allowed)
        block = self.alloc_block(free_set, rounded, size)
        if block is None:
            block = self.try_mempool_fallback(free_set, rounded)
        if block is None and release_available_cached_blocks(self, free_set, rounded):
            block = self.alloc_block(free_set, rounded, size)
        if block is None and not self.private_pools.in_capture:
            release_cached_blocks(self, self._large, self._small)
            self.num_alloc_retries += 1
            block = self.alloc_block(free_set, rounded, size)
        if block is None:
            self.num_ooms += 1
            wanted = get_allocation_size(rounded, self.conf.large_segment_size_bytes)
            raise out_of_memory(self, wanted, size, self._allowed)
        return block

    def try_mempool_fallback(self, free_set: FreeSet, rounded: int) -> Block | None:
        """A free block of a pool that serves others when memory runs out (``use_on_oom``)."""
        # Upstream looks there for blocks of plain segments only, which such pools have not with expandable segments.
        if free_set.pool.private_pool or self._expandable:
            return None
        for number in self.private_pools.overflow():
            private = self.private_pools.by_number[number]
            pool = private.small if free_set.is_small else private.large
            found = pool.by_stream.get(free_set.stream)
            block = None if found is None else self.get_free_block(found, rounded)
            if block is not None:
                return block
        return None

    def alloc_block(self, free_set: FreeSet, rounded: int, size: int) -> Block | None:
        """A block of new memory, or ``None`` when the driver or the fraction refuses."""
        wanted = get_allocation_size(rounded, self.conf.large_segment_size_bytes)
        if self._allowed is not None and self.reserved_bytes + wanted > self._allowed:
            return None
        if self._rejects_above is not None and self.reserved_bytes + wanted > self._rejects_above:
            self.num_oom_rejections += 1
            raise rejection(self, wanted, size)
        if self._expandable:
            return try_allocate_expandable_block(self, free_set, rounded)
        address = self.driver.malloc(wanted)
        if address is None:
            return None
        block = Block(self.order_of_new_segment(address), wanted, free_set, FREE, None, None)
        self._heads[address] = block
        self.count_reserved(free_set, wanted)
        if self.stats is not None:
            self.stats.count_segment(block, 1)
        return block

    def alloc_found_block(self, free_set: FreeSet, block: Block, rounded: int, size: int) -> Block:
        """Hand a block out, after splitting off its unused rest (``should_split``)."""
        was_split = self.stats is not None and block.is_split
        splits = block.size - rounded >= free_set.split_from and (rounded < self._max_split or self._expandable)
        if splits:
            rest = block.split_off(rounded, FREE)
            # FreeSet.insert, inlined: this is the hot path.
            rest.gc_count_base = free_set.pool.get_free_blocks_call_count
            keys = free_set.keys
            key = (rest.size << ORDER_BITS) + rest.order
            position = bisect_left(keys, key)
            keys.insert(position, key)
            free_set.blocks.insert(position, rest)
            if self.counts_blocks:
                block.order = self.order_of_new_segment(block.address)
        block.state = ALLOCATED
        block.requested_size = size
        allocated = self.allocated_bytes + block.size
        self.allocated_bytes = allocated
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        if self.stats is not None:
            self.stats.count_alloc(block, was_split, splits)
        return block

    def order_of_new_segment(self, address: int) -> int:
        """The ``order`` of the first block of a segment that is created now; in 2.12 of every new block."""
        if not (self.numbers_segments or self.counts_blocks):
            return address
        self._next_serial += 1
        return (self._next_serial << ADDRESS_BITS) | address

    def free_set(self, kind: str, stream: int, private_pool: int = 0) -> FreeSet:
        """The free blocks of a stream in the ``small`` or the ``large`` pool, or in that of a private pool."""
        small, large = self._small, self._large
        if private_pool:
            private = self.private_pools.by_number[private_pool]
            small, large = private.small, private.large
        pool = small if kind == "small" else large
        return pool.by_stream.get(stream) or self._new_free_set(pool, stream)

    def _new_free_set(self, pool: Pool, stream: int) -> FreeSet:
        pool.by_stream[stream] = FreeSet(pool, stream, self._split_from(pool))
        return pool.by_stream[stream]

    def _split_from(self, pool: Pool) -> int:
        """``should_split``: a remainder of at least 512 bytes in the small pool and with expandable segments, whatever
        the block lies in; in the large pool more than 1 MiB."""
        if not self.private_pools.splits(pool.private_pool):
            return ONE_EXBIBYTE
        return MIN_BLOCK_BYTES if pool.is_small or self._expandable else SMALL_BYTES + 1

    # ------------------------------------------------------------------ freeing

    def free_block(self, block: Block) -> None:
        """Put a block among the free ones, merged with its free neighbours (``try_merge_blocks``)."""
        if self.stats is not None:
            self.stats.count_free_completed(block)
        free_set = block.free_set
        keys, blocks = free_set.keys, free_set.blocks
        size, freed_order = block.size, block.order
        prev = block.prev
        if prev is not None and prev.state == FREE:
            position = bisect_left(keys, (prev.size << ORDER_BITS) + prev.order)
            del keys[position], blocks[position]
            block.state = GONE
            size += prev.size
            after = block.next
            prev.next = after
            if after is not None:
                after.prev = prev
            block = prev
        after = block.next
        if after is not None and after.state == FREE:
            position = bisect_left(keys, (after.size << ORDER_BITS) + after.order)
            del keys[position], blocks[position]
            after.state = GONE
            size += after.size
            after = after.next
            block.next = after
            if after is not None:
                after.prev = block
        block.size = size
        if self.counts_blocks:
            block.take_serial(freed_order)
        block.state = FREE
        block.gc_count_base = free_set.pool.get_free_blocks_call_count
        key = (size << ORDER_BITS) + block.order
        position = bisect_left(keys, key)
        keys.insert(position, key)
        blocks.insert(position, block)

    def process_events(self) -> None:
        """Free the blocks whose events have completed; not during a capture, which forbids queries."""
        if self.private_pools.in_capture:
            return
        self._insert_events_deferred_until_no_capture()
        for block in self._events.poll():
            self.free_block(block)

    def synchronize_and_free_events(self, private_pool: int = 0) -> None:
        """Wait for every event, or for those of one private pool, and free the blocks that waited for them."""
        self.num_sync_all_streams += 1
        self._insert_events_deferred_until_no_capture()
        for block in self._events.wait(private_pool):
            self.free_block(block)

    def _insert_events_deferred_until_no_capture(self) -> None:
        """Streams that used a block only inside the capture have been joined since, and need no event."""
        for block, streams in self.private_pools.take_deferred(self._stream_uses):
            if streams:
                self._events.insert_events(block, streams, self.driver.event_lag)
            else:
                self.free_block(block)

    # ------------------------------------------------------------------ giving memory back

    def release_block(self, block: Block) -> None:
        """Give one segment back to the driver."""
        free_set = block.free_set
        self.driver.free(block.address)
        free_set.remove(block)
        del self._heads[block.address]
        block.state = GONE
        self.count_released(free_set, block.size)
        if self.stats is not None:
            self.stats.count_segment(block, -1)

    # ------------------------------------------------------------------ counting

    def count_reserved(self, free_set: FreeSet, size: int) -> None:
        """Memory was obtained from the driver."""
        self.reserved_bytes += size
        self.num_device_alloc += 1
        if free_set.pool.private_pool:
            self.private_pools.by_number[free_set.pool.private_pool].reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
            self.private_reserved_at_peak = self.private_pools.reserved_bytes()
        if self.stats is not None:
            self.stats.change_reserved(free_set.pool, size)

    def count_released(self, free_set: FreeSet, size: int) -> None:
        """Memory went back to the driver."""
        self.reserved_bytes -= size
        self.num_device_free += 1
        if free_set.pool.private_pool:
            self.private_pools.by_number[free_set.pool.private_pool].reserved_bytes -= size
        if self.stats is not None:
            self.stats.change_reserved(free_set.pool, -size)

    def memory_stats(self) -> dict[str, int]:
        """``torch.cuda.memory_stats()``. Raises :class:`UsageError` unless ``track_stats`` was set."""
        if self.stats is None:
            raise UsageError("memory_stats needs an allocator made with track_stats=True")
        counters = {name: getattr(self, name) for name in COUNTERS}
        split = self._max_split if self._max_split < 2**63 else -1
        return self.stats.as_dict() | counters | {"max_split_size": split}

    def reset_peak_stats(self) -> None:
        """``torch.cuda.reset_peak_memory_stats``; the peaks of a replay stay."""
        if self.stats is not None:
            self.stats.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """``torch.cuda.reset_accumulated_memory_stats``."""
        if self.stats is not None:
            self.stats.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = 0

    # ------------------------------------------------------------------ looking

    def room_bytes(self) -> int:
        """Bytes that may still be reserved, by the card's memory and by the fraction set for the process."""
        free = self.driver.free_bytes()
        return free if self._allowed is None else min(free, self._allowed - self.reserved_bytes)

    def add_expandable_segment(self, free_set: FreeSet, wanted: int = 0) -> ExpandableSegment:
        """Reserve the address range of a new expandable segment for this stream and pool, with room for ``wanted``."""
        page = SMALL_SEGMENT_BYTES if free_set.is_small else self.conf.large_segment_size_bytes
        segment = ExpandableSegment(self, free_set, page, wanted)
        self._expandable_segments.append(segment)
        return segment

    def drop_expandable_segment(self, segment: ExpandableSegment) -> None:
        """``release_expandable_segment``: nothing of the range is mapped any more."""
        self._expandable_segments.remove(segment)


def _expandable_size(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
