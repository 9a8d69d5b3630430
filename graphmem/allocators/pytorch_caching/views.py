"""Views of the caching allocator: its segments, as in ``torch.cuda.memory_snapshot``, and its out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from graphmem.allocators.base import BlockView, SegmentView
from graphmem.allocators.pytorch_caching.blocks import ALLOCATED, FREE, PENDING, UNMAPPED, Block, format_size
from graphmem.allocators.pytorch_caching.expandable import ExpandableSegment
from graphmem.errors import DeviceOutOfMemory

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator

_SNAPSHOT_STATES = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
_STATE_NAMES = {FREE: "free", ALLOCATED: "allocated", PENDING: "pending"}


def segment_views(heads: Iterable[Block], expandable: Iterable[ExpandableSegment]) -> tuple[SegmentView, ...]:
    """Segments in address order, tiled by their blocks; of an expandable one every mapped range is a segment."""
    views = [_segment_view(head, is_expandable=False) for head in heads]
    for segment in expandable:
        views += [_segment_view(first, is_expandable=True) for first in segment.mapped_ranges()]
    return tuple(sorted(views, key=lambda view: view.address))


def _segment_view(first: Block, *, is_expandable: bool) -> SegmentView:
    blocks: list[BlockView] = []
    block: Block | None = first
    total = 0
    while block is not None and block.state != UNMAPPED:
        requested = 0 if block.state == FREE else block.requested_size
        blocks.append(BlockView(block.address, block.size, requested, _STATE_NAMES[block.state]))
        total += block.size
        block = block.next
    kind = "small" if first.free_set.is_small else "large"
    pool = first.free_set.pool.private_pool
    return SegmentView(first.address, total, first.free_set.stream, kind, is_expandable, tuple(blocks), pool)


def as_snapshot(view: SegmentView) -> dict[str, Any]:
    """A segment as ``torch.cuda.memory_snapshot`` has it (``torch/csrc/cuda/Module.cpp``, 2.13), without stacks."""
    held = [block for block in view.blocks if block.state != "free"]
    return {
        "device": 0,
        "address": view.address,
        "total_size": view.total_size,
        "allocated_size": sum(block.size for block in held if block.state == "allocated"),
        "active_size": sum(block.size for block in held),
        "requested_size": sum(block.requested_bytes for block in held),
        "stream": view.stream,
        "segment_type": view.kind,
        "segment_pool_id": (0, view.pool),
        "is_expandable": view.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_bytes,
                "state": _SNAPSHOT_STATES[block.state],
                "frames": [],
            }
            for block in view.blocks
        ],
    }


def out_of_memory(
    allocator: PyTorchCachingAllocator, wanted: int, size: int, allowed_bytes: int | None
) -> DeviceOutOfMemory:
    """The error in PyTorch's words, for a segment of ``wanted`` bytes that a request of ``size`` needed."""
    free = allocator.driver.free_bytes()
    allowed = "" if allowed_bytes is None else f"{format_size(allowed_bytes)} allowed; "
    total = allocator.driver.capacity_bytes
    private = allocator.private_pools.free_bytes()
    in_private_pools = f"with {format_size(private)} allocated in private pools (e.g., CUDA Graphs), "
    rest = allocator.reserved_bytes - allocator.allocated_bytes - private
    return DeviceOutOfMemory(
        f"CUDA out of memory. Tried to allocate {format_size(wanted)}. GPU 0 has a total capacity of "
        f"{'unlimited' if total is None else format_size(total)} of which {format_size(free)} is free. {allowed}"
        f"Of the allocated memory {format_size(allocator.allocated_bytes + private)} is allocated by PyTorch, "
        f"{in_private_pools if private else ''}and {format_size(rest)} is reserved by PyTorch but unallocated.",
        requested_bytes=size,
        free_bytes=free,
    )


def rejection(allocator: PyTorchCachingAllocator, wanted: int, size: int) -> DeviceOutOfMemory:
    """The error of ``throw_on_cudamalloc_oom``, in PyTorch's words."""
    return DeviceOutOfMemory(
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
        f"limit. Requested size: {format_size(wanted)}",
        requested_bytes=size,
        free_bytes=allocator.driver.free_bytes(),
    )
