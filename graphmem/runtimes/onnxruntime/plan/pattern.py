"""ONNX Runtime's memory pattern: the tensors of a run packed into one block, which later runs allocate at once.

``MemPatternPlanner`` of ``core/framework/mem_pattern_planner.h``, checked against the blocks of recorded runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import xor

#: Offsets and sizes in the block are multiples of this (``kAllocAlignment``, ``core/framework/allocator.h``).
ALIGNMENT_BYTES = 256


def aligned(size: int) -> int:
    """``size`` bytes rounded up to a multiple of 256."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def pattern_key(shapes: Sequence[Sequence[int]]) -> int:
    """The key under which a pattern is kept: all dimensions of all inputs, XORed (``CalculateMemoryPatternsKey``).

    Equal dimensions cancel, so different shapes may share a key; the later one then finds the earlier one's block.
    """
    return reduce(xor, (dimension for shape in shapes for dimension in shape), 0)


@dataclass(frozen=True)
class MemoryPattern:
    """One block: its bytes, and by tensor the (offset, bytes) inside it."""

    peak_bytes: int
    blocks: Mapping[str, tuple[int, int]]


@dataclass
class MemoryPatternPlanner:
    """Traces the allocations and frees of a first run; offsets are fixed as they come."""

    blocks: dict[str, tuple[int, int]] = field(default_factory=dict)
    _live: list[tuple[int, int, str]] = field(default_factory=list)  # (offset, bytes, tensor), by offset
    peak_bytes: int = 0

    def trace_allocation(self, name: str, size: int) -> None:
        """Place ``size`` bytes (rounded up here) in the smallest gap that holds them, else after the last live block.

        The room between the last live block and the end of what was ever used is a gap like those between blocks. This
        is 1.31.1's behaviour, found where sources up to 1.20, which do not look there, gave other blocks.
        """
        size = aligned(size)
        offset, position = self._place(size)
        self.blocks[name] = (offset, size)
        if size:
            self._live.insert(position, (offset, size, name))
            self.peak_bytes = max(self.peak_bytes, offset + size)

    def _place(self, size: int) -> tuple[int, int]:
        end, best, smallest = 0, None, None
        for position, (offset, length, _) in enumerate(self._live):
            gap = offset - end
            if gap >= size and (smallest is None or gap < smallest):
                smallest, best = gap, (end, position)
            end = max(end, offset + length)
        tail = self.peak_bytes - end
        if best is None or (smallest is not None and size <= tail < smallest):
            best = (end, len(self._live))
        return best

    def trace_free(self, name: str) -> None:
        """Make room where ``name`` was; what is placed already stays where it is."""
        for position, (_, _, live) in enumerate(self._live):
            if live == name:
                del self._live[position]
                return

    def pattern(self) -> MemoryPattern:
        """The pattern of what was traced."""
        return MemoryPattern(self.peak_bytes, dict(self.blocks))
