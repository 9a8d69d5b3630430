"""An independent judge of allocators: it knows the interface and the invariants of a heap, and nothing else.

Wrap an allocator in :class:`CheckedAllocator` and drive it; every call is followed by a look at ``segments()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from graphmem.allocators.base import Allocator, BlockView, PoolAllocator, SegmentView
from graphmem.errors import DeviceOutOfMemory

STATES = ("allocated", "pending", "free")


class InvalidHeapError(AssertionError):
    """A broken invariant of a heap; the message names the invariant and the place."""


def validate_segments(segments: Iterable[SegmentView], *, allocated_bytes: int, reserved_bytes: int) -> None:
    """Check a snapshot in itself and against the allocator's own totals (bytes).

    Segments do not overlap; blocks tile their segment in address order; sizes are positive; a free block holds no
    request and a request fits its block; the totals are the sums. Raises :class:`InvalidHeapError`.
    """
    ordered = sorted(segments, key=lambda segment: segment.address)
    for before, after in pairwise(ordered):
        if before.address + before.total_size > after.address:
            raise InvalidHeapError(f"segments at {before.address:#x} and {after.address:#x} overlap")
    for segment in ordered:
        _validate_tiling(segment)
        for block in segment.blocks:
            _validate_block(block)
    blocks = [block for segment in ordered for block in segment.blocks]
    _equal("allocated_bytes", allocated_bytes, sum(block.size for block in blocks if block.state == "allocated"))
    _equal("reserved_bytes", reserved_bytes, sum(segment.total_size for segment in ordered))


def live_blocks(segments: Iterable[SegmentView]) -> dict[int, BlockView]:
    """The allocated blocks by address."""
    return {block.address: block for segment in segments for block in segment.blocks if block.state == "allocated"}


class CheckedAllocator:
    """Any allocator with every call checked; obeys the same interface, so that a replay can drive it.

    Its handles are its own. Slow on purpose: each call reads the whole heap.
    """

    def __init__(self, inner: Allocator) -> None:
        self.inner = inner
        self.name = f"checked {inner.name}"
        self._live: dict[_Live, None] = {}
        self._blocks: dict[int, BlockView] = {}
        self._look()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of allocated blocks."""
        return self.inner.allocated_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of segments."""
        return self.inner.reserved_bytes

    def malloc(self, size: int, stream: int = 0) -> _Live:
        """Allocate; exactly one new block must appear, for exactly this request."""
        return self._allocated(lambda: self.inner.malloc(size, stream), size)

    def malloc_in_pool(self, size: int, stream: int, pool: int) -> _Live:
        """Allocate in a private pool; the one new block must lie there."""
        live = self._allocated(lambda: self._pools.malloc_in_pool(size, stream, pool), size)
        homes = {block.address: segment.pool for segment in self.inner.segments() for block in segment.blocks}
        if live.address is not None and homes[live.address] != pool:
            raise InvalidHeapError(f"malloc_in_pool({size}, {pool}) made a block in pool {homes[live.address]}")
        return live

    def _allocated(self, malloc: Callable[[], Any], size: int) -> _Live:
        try:
            handle = malloc()
        except DeviceOutOfMemory:
            self._expect(added=set(), removed=set(), call=f"a refused malloc({size})")
            raise
        before = self._blocks
        self._look()
        added = self._blocks.keys() - before.keys()
        if size == 0:
            if added:
                raise InvalidHeapError("a request of 0 bytes made a block")
            live = _Live(handle, None, 0)
        else:
            if len(added) != 1:
                raise InvalidHeapError(f"malloc({size}) made {len(added)} blocks")
            (address,) = added
            if self._blocks[address].requested_bytes != size:
                raise InvalidHeapError(f"malloc({size}) made {self._blocks[address]}")
            live = _Live(handle, address, size)
        self._unchanged(before, removed=set())
        self._live[live] = None
        return live

    def free(self, handle: _Live) -> None:
        """Free; exactly that block must stop being allocated."""
        if handle not in self._live:
            raise InvalidHeapError("freed twice, or never allocated")
        del self._live[handle]
        self.inner.free(handle.inner)
        removed = set() if handle.address is None else {handle.address}
        self._expect(added=set(), removed=removed, call=f"free of {handle.size} bytes")

    def record_stream(self, handle: _Live, stream: int) -> None:
        """Note a use on another stream; allocated blocks must not change."""
        self.inner.record_stream(handle.inner, stream)
        self._expect(added=set(), removed=set(), call="record_stream")

    def synchronize(self) -> None:
        """Synchronise; allocated blocks must not change."""
        self.inner.synchronize()
        self._expect(added=set(), removed=set(), call="synchronize")

    def empty_cache(self) -> None:
        """Empty the cache; allocated blocks must not change."""
        self.inner.empty_cache()
        self._expect(added=set(), removed=set(), call="empty_cache")

    def pool_call(self, name: str, *numbers: int, **options: bool) -> None:
        """Any other call of :class:`PoolAllocator`; allocated blocks must not change."""
        getattr(self._pools, name)(*numbers, **options)
        self._expect(added=set(), removed=set(), call=name)

    @property
    def _pools(self) -> PoolAllocator:
        assert isinstance(self.inner, PoolAllocator)
        return self.inner

    def segments(self) -> tuple[SegmentView, ...]:
        """The inner allocator's segments."""
        return self.inner.segments()

    def _look(self) -> None:
        segments = self.inner.segments()
        validate_segments(
            segments, allocated_bytes=self.inner.allocated_bytes, reserved_bytes=self.inner.reserved_bytes
        )
        self._blocks = live_blocks(segments)

    def _expect(self, *, added: set[int], removed: set[int], call: str) -> None:
        before = self._blocks
        self._look()
        if self._blocks.keys() - before.keys() != added or before.keys() - self._blocks.keys() != removed:
            raise InvalidHeapError(f"{call} changed other blocks than its own")
        self._unchanged(before, removed)

    def _unchanged(self, before: Mapping[int, BlockView], removed: set[int]) -> None:
        for address, block in before.items():
            if address not in removed and self._blocks.get(address) != block:
                raise InvalidHeapError(f"the live block {block} became {self._blocks.get(address)}")


class _Live:
    """A handle of :class:`CheckedAllocator`: the inner handle, and where its block was seen."""

    __slots__ = ("address", "inner", "size")

    def __init__(self, inner: Any, address: int | None, size: int) -> None:
        self.inner = inner
        self.address = address
        self.size = size


def _validate_tiling(segment: SegmentView) -> None:
    position = segment.address
    for block in segment.blocks:
        if block.address != position:
            raise InvalidHeapError(f"a block lies at {block.address:#x} where {position:#x} comes next in its segment")
        position += block.size
    if position != segment.address + segment.total_size:
        raise InvalidHeapError(f"the blocks of the segment at {segment.address:#x} do not fill it")


def _validate_block(block: BlockView) -> None:
    if block.state not in STATES:
        raise InvalidHeapError(f"{block} has an unknown state; accepted: {', '.join(STATES)}")
    if block.size <= 0:
        raise InvalidHeapError(f"{block} is empty")
    if block.state == "free" and block.requested_bytes != 0:
        raise InvalidHeapError(f"{block} is free and holds a request")
    if block.state != "free" and not 0 < block.requested_bytes <= block.size:
        raise InvalidHeapError(f"{block} does not fit its request")


def _equal(what: str, claimed: int, summed: int) -> None:
    if claimed != summed:
        raise InvalidHeapError(f"{what} is {claimed}, but the blocks sum to {summed}")
