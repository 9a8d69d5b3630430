"""The driver below PyTorch's caching allocator: physical memory, its addresses, and the progress of events.

A real driver's address order cannot be predicted; up to torch 2.11 it decides best-fit ties. So the policy is a
parameter, and a recorded run can feed the very addresses its driver returned. All figures are bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from graphmem.units import MIB

#: Granularity of cudaMalloc and of cuMemCreate (``cuMemGetAllocationGranularity``) on every NVIDIA card since Pascal.
PAGE_BYTES = 2 * MIB
#: Where the model starts handing out addresses: arbitrary. Multiples of 512 bytes up to 2**62 are exact in JavaScript.
MALLOC_BASE = 0x2000_0000_0000
#: Address space behind it, so that a step too large for any card still has its figures.
SPAN_BYTES = 1 << 60
VIRTUAL_BASE = MALLOC_BASE + SPAN_BYTES


class AddressPolicy(Protocol):
    """Which addresses ``cudaMalloc`` returns."""

    def take(self, size: int) -> int:
        """Address of a range of ``size`` bytes."""

    def give(self, address: int, size: int) -> None:
        """Take the range back."""


class LowestHole:
    """The lowest free range that fits: the model's default, and what its recordings were made with. ``taken``: ranges
    that were given out, bytes by addresses."""

    def __init__(
        self, base: int = MALLOC_BASE, span: int = SPAN_BYTES, taken: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        self._starts: list[int] = []  # of the free ranges, neighbours joined
        self._sizes: list[int] = []
        start = base
        for address, size in (*sorted(taken.items()), (base + span, 0)):
            if address > start:
                self._starts.append(start)
                self._sizes.append(address - start)
            start = address + size

    def take(self, size: int) -> int:
        """Lowest address where ``size`` bytes fit."""
        for position, room in enumerate(self._sizes):
            if room >= size:
                return self._cut(position, size)
        raise OverflowError("address space exhausted")

    def give(self, address: int, size: int) -> None:
        """Take the range back."""
        position = bisect_left(self._starts, address)
        if position < len(self._starts) and address + size == self._starts[position]:
            size += self._sizes[position]
            del self._starts[position], self._sizes[position]
        if position and self._starts[position - 1] + self._sizes[position - 1] == address:
            self._sizes[position - 1] += size
            return
        self._starts.insert(position, address)
        self._sizes.insert(position, size)

    def _cut(self, position: int, size: int) -> int:
        start, room = self._starts[position], self._sizes[position]
        if room == size:
            del self._starts[position], self._sizes[position]
        else:
            self._starts[position], self._sizes[position] = start + size, room - size
        return start


class CudaDriver:
    """One card's memory as a process sees it.

    ``capacity_bytes`` is the card's total memory (``None``: unlimited); ``other_bytes`` is what the context, libraries
    and other processes hold of it. ``event_lag`` is how many queries an event answers with "not ready": 0 makes a
    deferred free complete at the next allocation, ``None`` only at a synchronisation (the upper bound of what
    ``record_stream`` can cost). ``synchronize_completes_events=False`` lets events lag behind a device synchronisation
    too, which only the stub driver that made our recordings does.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        other_bytes: int = 0,
        addresses: AddressPolicy | None = None,
        virtual_base: int = VIRTUAL_BASE,
        event_lag: int | None = 0,
        synchronize_completes_events: bool = True,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.other_bytes = other_bytes
        self.event_lag = event_lag
        self.synchronize_completes_events = synchronize_completes_events
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.addresses: AddressPolicy = addresses if addresses is not None else LowestHole()
        self._sizes: dict[int, int] = {}
        self._next_virtual = virtual_base

    def free_bytes(self) -> int:
        """Free bytes as ``cudaMemGetInfo`` reports them; a figure larger than any card when there is no capacity."""
        if self.capacity_bytes is None:
            return SPAN_BYTES - self.used_bytes
        return max(0, self.capacity_bytes - self.used_bytes - self.other_bytes)

    def malloc(self, size: int) -> int | None:
        """``cudaMalloc``: the address, or ``None`` when memory is exhausted. Takes whole pages."""
        pages = -(-size // PAGE_BYTES) * PAGE_BYTES
        before = self.peak_used_bytes
        if not self._take(pages):
            return None
        try:
            address = self.addresses.take(pages)
        except OverflowError:  # more than addresses can tell apart, as only a damaged trace asks for
            self.used_bytes, self.peak_used_bytes = self.used_bytes - pages, before
            return None
        self._sizes[address] = pages
        return address

    def free(self, address: int) -> None:
        """``cudaFree``."""
        pages = self._sizes.pop(address)
        self.used_bytes -= pages
        self.addresses.give(address, pages)

    def hold(self, sizes: Mapping[int, int], most_bytes: int) -> None:
        """Have given out this memory by ``cudaMalloc``, bytes by addresses, and ``most_bytes`` at one time."""
        self._sizes = {address: -(-size // PAGE_BYTES) * PAGE_BYTES for address, size in sizes.items()}
        self.used_bytes, self.peak_used_bytes = sum(self._sizes.values()), most_bytes
        self.addresses = LowestHole(taken=self._sizes)

    def reserve_address(self, size: int) -> int:
        """``cuMemAddressReserve``: a virtual range of ``size`` bytes, never reused."""
        address = self._next_virtual
        self._next_virtual += -(-size // PAGE_BYTES) * PAGE_BYTES
        return address

    def create(self, count: int, chunk_bytes: int) -> bool:
        """``cuMemCreate`` of ``count`` chunks, one after the other; all of them, or none is kept."""
        if self.capacity_bytes is not None:
            room = max(0, self.capacity_bytes - self.other_bytes - self.used_bytes) // chunk_bytes
            if room < count:
                # The chunks that could be created are given back, but for a moment they were taken.
                self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes + room * chunk_bytes)
                return False
        return self._take(count * chunk_bytes)

    def release(self, size: int) -> None:
        """``cuMemUnmap`` and ``cuMemRelease`` of ``size`` bytes of chunks."""
        self.used_bytes -= size

    def _take(self, size: int) -> bool:
        used = self.used_bytes + size
        if self.capacity_bytes is not None and used + self.other_bytes > self.capacity_bytes:
            return False
        self.used_bytes = used
        if used > self.peak_used_bytes:
            self.peak_used_bytes = used
        return True
