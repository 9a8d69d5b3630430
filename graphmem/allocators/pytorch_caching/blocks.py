"""Blocks, their sizes in bytes, and the sets of free ones: ``struct Block``, ``struct BlockPool``, ``round_size``,
``roundup_power2_next_division`` and ``get_allocation_size`` of ``c10/cuda/CUDACachingAllocator.cpp``."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.expandable import ExpandableSegment

from collections.abc import Sequence

from graphmem.allocators.alloc_conf import MIN_LARGE_ALLOC_BYTES, ROUNDUP_SLOTS
from graphmem.units import GIB, KIB, MIB

# c10/core/AllocatorConfig.h, torch 2.13 (the same since 1.13).
MIN_BLOCK_BYTES = 512  # kMinBlockSize: all sizes are rounded up to a multiple of it
SMALL_BYTES = 1 * MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: segments of the small pool
ROUND_LARGE_BYTES = 2 * MIB  # kRoundLarge: a segment for one large request is a multiple of it
# CUDACachingAllocator.cpp, one_exa_bytes: requests from this size on are refused outright.
ONE_EXBIBYTE = 1 << 60


def round_size(size: int, divisions_by_slot: Sequence[int]) -> int:
    """Bytes of the block that serves a request of ``size`` bytes."""
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    # Slot 0 holds sizes below 2 MiB, slot 1 those below 4 MiB, and so on (AllocatorConfig.cpp).
    slot = min(max(size.bit_length() - 21, 0), ROUNDUP_SLOTS - 1)
    divisions = divisions_by_slot[slot]
    if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
        return _next_division(size, divisions)
    return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def _next_division(size: int, divisions: int) -> int:
    """The next of the ``divisions`` equal steps between two powers of two."""
    if size & (size - 1) == 0:
        return size
    power = 1 << (size.bit_length() - 1)
    step = power >> (divisions.bit_length() - 1)
    return 2 * power if step == 0 else -(-size // step) * step


def get_allocation_size(rounded: int, large_segment_bytes: int) -> int:
    """Bytes of the segment made for a block of ``rounded`` bytes when no free block serves it."""
    if rounded <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < MIN_LARGE_ALLOC_BYTES:
        return large_segment_bytes
    return -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def format_size(size: int) -> str:
    """A size as PyTorch's error messages show it (``format_size``)."""
    if size <= KIB:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"


# The states of a block. Upstream spreads them over `allocated`, `event_count`, `stream_uses` and `mapped`.
FREE = 0
ALLOCATED = 1
PENDING = 2  # freed by the program, still waiting for events of other streams
UNMAPPED = 3  # address space of an expandable segment with no memory behind it
GONE = 4  # merged into a neighbour; only a stale handle can still point here

#: Bits of a block's ``order`` that hold its address.
ADDRESS_BITS = 62
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
#: Bits of ``order``: the address, and above it the serial number of the segment (torch 2.13 on), or of the block
#: (2.12, where upstream's front part of a split is the new one, and a merged block is the one that was freed); else 0.
ORDER_BITS = ADDRESS_BITS + 32


class Block:
    """A piece of a segment. Also the handle that ``malloc`` returns.

    The first block of a segment stays the same object as long as the segment lives: splitting leaves the front in
    place, merging keeps the lower neighbour. ``order`` decides between free blocks of one size, smaller first.
    ``segment``: the expandable segment it lies in; None: a segment of cudaMalloc.
    """

    __slots__ = ("free_set", "gc_count_base", "next", "order", "prev", "requested_size", "segment", "size", "state")

    def __init__(
        self,
        order: int,
        size: int,
        free_set: FreeSet,
        state: int,
        prev: Block | None,
        next_: Block | None,
        segment: ExpandableSegment | None = None,
    ) -> None:
        self.order = order
        self.size = size
        self.free_set = free_set
        self.state = state
        self.prev = prev
        self.next = next_
        self.segment = segment
        self.requested_size = 0
        self.gc_count_base = 0

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self.order & ADDRESS_MASK

    def take_serial(self, order: int) -> None:
        """Go on under the serial number in the ``order`` of another block: of one that is merged with this one."""
        self.order = (order & ~ADDRESS_MASK) | (self.order & ADDRESS_MASK)

    @property
    def is_split(self) -> bool:
        """Whether the segment holds other blocks too (``Block::is_split``)."""
        return self.prev is not None or self.next is not None

    def absorb_next(self) -> None:
        """Merge the following block into this one."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        self.next = absorbed.next
        if self.next is not None:
            self.next.prev = self
        absorbed.state = GONE

    def split_off(self, size: int, state: int) -> Block:
        """Keep the first ``size`` bytes; the rest becomes a new block of ``state`` behind this one."""
        rest = Block(self.order + size, self.size - size, self.free_set, state, self, self.next, self.segment)
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest


class Pool:
    """A small or a large pool: one set of free blocks per stream, and the clock of the garbage collector.

    ``private_pool`` is the number of the private pool it belongs to; 0: none, it is one of the two default pools.
    """

    __slots__ = ("by_stream", "get_free_blocks_call_count", "is_small", "private_pool")

    def __init__(self, is_small: bool, private_pool: int = 0) -> None:
        self.is_small = is_small
        self.private_pool = private_pool
        self.by_stream: dict[int, FreeSet] = {}
        self.get_free_blocks_call_count = 0


class FreeSet:
    """Free blocks of one stream in one pool, ordered by (size, order): ``BlockComparatorSize`` without the stream.

    ``keys`` holds ``size << ORDER_BITS | order`` of each block, so that a search compares plain integers.
    ``unmapped`` holds the unmapped blocks of expandable segments in address order. ``split_from`` is the smallest
    remainder, in bytes, that is worth splitting off.
    """

    __slots__ = ("blocks", "is_small", "keys", "pool", "split_from", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int, split_from: int) -> None:
        self.pool = pool
        self.is_small = pool.is_small
        self.stream = stream
        self.split_from = split_from
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []

    def insert(self, block: Block) -> None:
        """``BlockPool::insert_into_blocks``."""
        block.gc_count_base = self.pool.get_free_blocks_call_count
        key = (block.size << ORDER_BITS) + block.order
        position = bisect_left(self.keys, key)
        self.keys.insert(position, key)
        self.blocks.insert(position, block)

    def remove(self, block: Block) -> None:
        """Take a block out, before its size or address changes."""
        position = bisect_left(self.keys, (block.size << ORDER_BITS) + block.order)
        del self.keys[position]
        del self.blocks[position]

    def insert_unmapped(self, block: Block) -> None:
        """Add address space without memory."""
        self.unmapped.insert(bisect_left(self.unmapped, block.address, key=_address), block)

    def remove_unmapped(self, block: Block) -> None:
        """Take such address space out, before its address changes."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]


def _address(block: Block) -> int:
    return block.address
