"""Policies of addresses below PyTorch's allocator that tests and recordings need beside the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from graphmem.allocators.cuda_driver import MALLOC_BASE, LowestHole


class HighestHole(LowestHole):
    """The highest free range that fits, so that later segments lie lower."""

    def take(self, size: int) -> int:
        """Highest address where ``size`` bytes fit."""
        for position in range(len(self._sizes) - 1, -1, -1):
            if self._sizes[position] >= size:
                self._sizes[position] -= size
                address = self._starts[position] + self._sizes[position]
                if not self._sizes[position]:
                    del self._starts[position], self._sizes[position]
                return address
        raise OverflowError("address space exhausted")


class NeverReused:
    """Strictly increasing addresses: a freed range stays unused."""

    def __init__(self, base: int = MALLOC_BASE) -> None:
        self._next = base

    def take(self, size: int) -> int:
        """The next address."""
        address = self._next
        self._next += size
        return address

    def give(self, address: int, size: int) -> None:
        """Freed ranges are never used again."""


class RecordedAddresses:
    """Exactly the addresses that a real driver returned, in order (for replaying a recording)."""

    def __init__(self, addresses: Iterable[int]) -> None:
        self._addresses: Iterator[int] = iter(addresses)

    def take(self, size: int) -> int:
        """The next recorded address. Raises :class:`LookupError` when the recording has no further one."""
        for address in self._addresses:
            return address
        raise LookupError(f"the recording has no further segment (one of {size} bytes was asked for)")

    def give(self, address: int, size: int) -> None:
        """Nothing to do: the recording decides."""
