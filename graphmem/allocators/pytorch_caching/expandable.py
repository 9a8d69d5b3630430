"""Expandable segments: one range of addresses per stream and pool, into which memory is mapped page by page.

``struct ExpandableSegment``, ``find_expandable_block``, ``map_block``, ``try_allocate_expandable_block`` and
``unmap_block`` of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.11). A page is 2 MiB in the small pool and
``large_segment_size`` (20 MiB) in the large one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphmem.allocators.cuda_driver import SPAN_BYTES
from graphmem.allocators.pytorch_caching.blocks import FREE, UNMAPPED, Block, FreeSet

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator

#: Address range of a segment on a card of unknown size, bytes. (On a real card it is 9/8 of its memory.)
UNKNOWN_CARD_BYTES = 1 << 44


class ExpandableSegment:
    """A reserved address range. ``head`` is its first block; mapped and unmapped blocks tile the whole range."""

    def __init__(self, allocator: PyTorchCachingAllocator, free_set: FreeSet, page_bytes: int, wanted: int = 0) -> None:
        self.page_bytes = page_bytes
        self.size = segment_bytes(allocator.driver.capacity_bytes, page_bytes, wanted)
        self.address = allocator.driver.reserve_address(self.size)
        order = allocator.order_of_new_segment(self.address)
        self.head = Block(order, self.size, free_set, UNMAPPED, None, None, self)

    def mapped_ranges(self) -> Iterator[Block]:
        """The first block of every contiguous mapped range."""
        block: Block | None = self.head
        while block is not None:
            if block.state != UNMAPPED and (block.prev is None or block.prev.state == UNMAPPED):
                yield block
            block = block.next


def segment_bytes(card_bytes: int | None, page_bytes: int, wanted: int = 0) -> int:
    """Bytes of the address range of a segment with such pages, on a card with so much memory; where that is not known,
    of at least the bytes ``wanted``."""
    unknown = UNKNOWN_CARD_BYTES if wanted <= UNKNOWN_CARD_BYTES else max(wanted, SPAN_BYTES >> 4)
    room = unknown if card_bytes is None else card_bytes + card_bytes // 8
    return -(-room // page_bytes) * page_bytes


def try_allocate_expandable_block(allocator: PyTorchCachingAllocator, free_set: FreeSet, rounded: int) -> Block | None:
    """Map enough pages behind a free or unmapped block to hold ``rounded`` bytes; ``None`` when memory runs out.

    What was mapped before it ran out stays mapped, as free blocks.
    """
    block = find_expandable_block(allocator, free_set, rounded)
    if block.state == UNMAPPED:
        mapped = map_block(allocator, block, min(block.size, rounded))
        if mapped is None:
            return None
        block = mapped
    while block.size < rounded:
        # Invariant: a free block, then an unmapped one.
        after = block.next
        assert after is not None
        mapped = map_block(allocator, after, min(rounded - block.size, after.size))
        if mapped is None:
            return None
        block = mapped
    free_set.remove(block)
    return block


def find_expandable_block(allocator: PyTorchCachingAllocator, free_set: FreeSet, rounded: int) -> Block:
    """The lowest place where free and unmapped neighbours offer ``rounded`` bytes; else a new segment."""
    for unmapped in free_set.unmapped:
        before = unmapped.prev
        start = before if before is not None and before.state == FREE else unmapped
        if _has_available_address_space(start, rounded):
            return start
    segment = allocator.add_expandable_segment(free_set, rounded)
    free_set.insert_unmapped(segment.head)
    return segment.head


def _has_available_address_space(start: Block, rounded: int) -> bool:
    room = 0
    block: Block | None = start
    while room < rounded and block is not None and block.state in (FREE, UNMAPPED):
        room += block.size
        block = block.next
    return room >= rounded


def map_block(allocator: PyTorchCachingAllocator, block: Block, size: int) -> Block | None:
    """Map whole pages over the first ``size`` bytes of an unmapped block; the free block that results, or ``None``."""
    free_set = block.free_set
    assert block.segment is not None
    page = block.segment.page_bytes
    pages = -(-size // page)
    if not allocator.driver.create(pages, page):
        return None
    free_set.remove_unmapped(block)
    mapped_bytes = pages * page
    if mapped_bytes < block.size:
        rest = block.split_off(mapped_bytes, UNMAPPED)
        _count(allocator, rest)
        free_set.insert_unmapped(rest)
    block.state, order = FREE, block.order
    before, after = block.prev, block.next
    if after is not None and after.state == FREE:
        free_set.remove(after)
        block.absorb_next()
    if before is not None and before.state == FREE:
        free_set.remove(before)
        before.absorb_next()
        block = before
    if allocator.counts_blocks:
        block.take_serial(order)
    free_set.insert(block)
    allocator.count_reserved(free_set, mapped_bytes)
    return block


def unmap_block(allocator: PyTorchCachingAllocator, block: Block) -> None:
    """Unmap the pages that lie wholly inside a free block; drop the segment when nothing of it is mapped any more."""
    free_set = block.free_set
    segment = block.segment
    assert segment is not None
    page = segment.page_bytes
    begin = -(-(block.address - segment.address) // page) * page + segment.address
    end = (block.address + block.size - segment.address) // page * page + segment.address
    if begin >= end:
        return
    free_set.remove(block)
    before_size = begin - block.address
    after_size = block.address + block.size - end
    if after_size > 0:
        rest = block.split_off(block.size - after_size, FREE)
        _count(allocator, rest)
        free_set.insert(rest)
    if before_size > 0:
        unmapped = block.split_off(before_size, UNMAPPED)
        _count(allocator, block)
        free_set.insert(block)
    else:
        unmapped = block
        unmapped.state = UNMAPPED
    allocator.driver.release(end - begin)
    allocator.count_released(free_set, end - begin)
    order = unmapped.order
    joined = _join_unmapped(free_set, unmapped)
    if allocator.counts_blocks:
        joined.take_serial(order)
    if segment.head.next is None:
        free_set.remove_unmapped(segment.head)
        allocator.drop_expandable_segment(segment)


def _count(allocator: PyTorchCachingAllocator, block: Block) -> None:
    """Give a block that is new the next serial number, where blocks have one (2.12)."""
    if allocator.counts_blocks:
        block.order = allocator.order_of_new_segment(block.address)


def _join_unmapped(free_set: FreeSet, block: Block) -> Block:
    after, before = block.next, block.prev
    if after is not None and after.state == UNMAPPED:
        free_set.remove_unmapped(after)
        block.absorb_next()
    if before is not None and before.state == UNMAPPED:
        before.absorb_next()  # its address stays, and so does its place among the unmapped
        return before
    free_set.insert_unmapped(block)
    return block
