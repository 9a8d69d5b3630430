"""How the caching allocator gives memory back to the driver.

``release_cached_blocks``, ``release_blocks``, ``release_available_cached_blocks`` and ``garbage_collect_cached_blocks``
of ``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from graphmem.allocators.pytorch_caching.blocks import FREE, ONE_EXBIBYTE, ORDER_BITS, FreeSet, Pool
from graphmem.allocators.pytorch_caching.expandable import unmap_block

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator


def release_cached_blocks(allocator: PyTorchCachingAllocator, large: Pool, small: Pool, private_pool: int = 0) -> None:
    """Give back every segment without live blocks, and the free pages of expandable segments.

    Of the default pools (``large``, ``small``) unless a capture is under way, and of the private pools that nobody
    holds; or of one such ``private_pool`` alone.
    """
    pools = allocator.private_pools
    if not private_pool and not pools.in_capture:
        allocator.synchronize_and_free_events()
        _release_blocks(allocator, large)
        _release_blocks(allocator, small)
    for number in [private_pool] if private_pool else list(pools.freeable):
        freeable = pools.freeable.get(number)
        if freeable is None:
            continue
        if private_pool:
            allocator.synchronize_and_free_events(private_pool)
        _release_blocks(allocator, freeable.small)
        _release_blocks(allocator, freeable.large)
        pools.forget_empty(number)


def _release_blocks(allocator: PyTorchCachingAllocator, pool: Pool) -> None:
    free = [block for free_set in pool.by_stream.values() for block in free_set.blocks]
    for block in free:
        if block.segment is None and not block.is_split:
            allocator.release_block(block)
    for block in free:
        if block.segment is not None:
            unmap_block(allocator, block)


def release_available_cached_blocks(allocator: PyTorchCachingAllocator, free_set: FreeSet, rounded: int) -> bool:
    """With ``max_split_size``: give back just enough oversize segments of this stream; whether it was enough."""
    max_split = allocator.conf.max_split_size_bytes
    if max_split > ONE_EXBIBYTE:
        return False
    target = max(rounded, max_split)
    position = bisect_left(free_set.keys, target << ORDER_BITS)
    if position < len(free_set.keys) and free_set.blocks[position].segment is None:
        allocator.release_block(free_set.blocks[position])
        return True
    # No single block is large enough: several, beginning with the largest.
    released = 0
    for block in reversed(free_set.blocks[:position]):
        if released >= target or block.size < max_split:
            break
        if block.segment is None:
            released += block.size
            allocator.release_block(block)
    return released >= target


def garbage_collect_cached_blocks(allocator: PyTorchCachingAllocator, large: Pool, allowed: int) -> None:
    """Give back whole free segments of the default large pool that went unused longest, down to the threshold.

    ``allowed`` is the cap on reserved bytes that the threshold is a part of.
    """
    threshold = int(allocator.conf.garbage_collection_threshold * float(allowed))
    if allocator.reserved_bytes <= threshold:
        return
    target = allocator.reserved_bytes - threshold
    now = large.get_free_blocks_call_count
    whole = [block for free_set in large.by_stream.values() for block in free_set.blocks if not block.is_split]
    total_age = sum(now - block.gc_count_base for block in whole)
    reclaimed = 0
    while reclaimed < target and whole:
        mean_age = total_age / len(whole)
        old = [block for block in whole if block.segment is None and now - block.gc_count_base >= mean_age]
        if not old:
            return
        for block in old:
            reclaimed += block.size
            total_age -= now - block.gc_count_base
            allocator.release_block(block)
        whole = [block for block in whole if block.state == FREE]
