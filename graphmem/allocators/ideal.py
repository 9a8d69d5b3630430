"""The ideal allocator: no rounding, no fragmentation, no cache. Its peak is the least any allocator could reserve."""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.allocators.base import Allocator, BlockView, SegmentView
from graphmem.errors import DeviceOutOfMemory


@dataclass(slots=True, eq=False)
class IdealBlock:
    """A live request: its own segment, gone when it is freed."""

    address: int
    size: int
    stream: int


class IdealAllocator(Allocator):
    """Bytes of live requests, nothing more: allocated = reserved = requested.

    A free takes effect at once, whatever other streams do. Addresses are only names: they never repeat.
    """

    name = "ideal"

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._live: dict[IdealBlock, None] = {}
        self._next_address = 0

    def malloc(self, size: int, stream: int = 0) -> IdealBlock | None:
        """Add ``size`` bytes. Raises :class:`graphmem.errors.DeviceOutOfMemory` beyond the capacity."""
        if size <= 0:
            return None
        live = self.allocated_bytes + size
        if self.capacity_bytes is not None and live > self.capacity_bytes:
            free = self.capacity_bytes - self.allocated_bytes
            message = (
                f"out of memory even without rounding and fragmentation: {size} bytes asked for, {free} bytes free"
            )
            raise DeviceOutOfMemory(message, requested_bytes=size, free_bytes=free)
        self.allocated_bytes = self.reserved_bytes = live
        if live > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.peak_reserved_bytes = live
        block = IdealBlock(self._next_address, size, stream)
        self._next_address += size
        self._live[block] = None
        return block

    def free(self, handle: IdealBlock | None) -> None:
        """Take the bytes away."""
        if handle is None:
            return
        if handle not in self._live:
            raise ValueError("freed a block that is not allocated")
        del self._live[handle]
        self.allocated_bytes = self.reserved_bytes = self.allocated_bytes - handle.size

    def segments(self) -> tuple[SegmentView, ...]:
        """One segment per live request."""
        return tuple(
            SegmentView(
                b.address, b.size, b.stream, "reserved", False, (BlockView(b.address, b.size, b.size, "allocated"),)
            )
            for b in self._live
        )
