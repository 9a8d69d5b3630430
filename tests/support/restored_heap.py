"""Begin in the middle: give an allocator a heap that exists already, such as the one a recording starts with."""

from __future__ import annotations

from collections.abc import Iterable

from graphmem.allocators.base import SegmentView
from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import ALLOCATED, FREE, Block, FreeSet
from graphmem.errors import UsageError


def restore(allocator: PyTorchCachingAllocator, segments: Iterable[SegmentView]) -> dict[int, Block]:
    """Fill a new allocator with ``segments`` in the order in which they were obtained; the live blocks by address.

    Expandable segments and pending blocks are not taken (:class:`graphmem.errors.UsageError`). Counters of
    ``memory_stats`` begin at this heap only for allocated and reserved bytes.
    """
    live: dict[int, Block] = {}
    for segment in segments:
        if segment.is_expandable:
            raise UsageError("expandable segments cannot be restored")
        if segment.pool and segment.pool not in allocator.private_pools.by_number:
            allocator.create_or_incref_pool(segment.pool)
        free_set = allocator.free_set("small" if segment.kind == "small" else "large", segment.stream, segment.pool)
        head = _adopted(allocator, free_set, segment.address, segment.total_size)
        block = head
        for view in segment.blocks:
            rest = block.split_off(view.size, FREE) if view.size < block.size else None
            if view.state == "allocated":
                block.state = ALLOCATED
                block.requested_size = view.requested_bytes
                allocator.allocated_bytes += view.size
                live[view.address] = block
            elif view.state == "free":
                free_set.insert(block)
            else:
                raise UsageError("blocks that wait for a stream cannot be restored")
            if rest is not None:
                block = rest
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    return live


def _adopted(allocator: PyTorchCachingAllocator, free_set: FreeSet, address: int, size: int) -> Block:
    """The block of a segment that exists already, not yet among the free ones; the address policy must not hand the
    range out again."""
    driver = allocator.driver
    if not driver._take(size):
        raise UsageError(f"a heap with a segment of {size} bytes does not fit a card of {driver.capacity_bytes}")
    driver._sizes[address] = size
    head = Block(allocator.order_of_new_segment(address), size, free_set, FREE, None, None)
    allocator._heads[address] = head
    allocator.count_reserved(free_set, size)
    return head
