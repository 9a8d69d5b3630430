"""ONNX Runtime's memory pattern: the tensors of a run packed into one block, which later runs allocate at once.

``MemPatternPlanner`` of ``core/framework/mem_pattern_planner.h``, checked against the blocks of recorded runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import reduce
from operator import xor

from graphmem.base.records import dataclass

#: The label of a block.
BLOCK = "memory pattern block"
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
    peak_bytes: int = 0
    _starts: list[int] = field(default_factory=list)  # of the live blocks, sorted
    _sizes: dict[int, int] = field(default_factory=dict)  # start -> bytes, of the live blocks
    _names: dict[str, int] = field(default_factory=dict)  # tensor -> start, of the live blocks
    _gaps: list[tuple[int, int]] = field(default_factory=list)  # (bytes, start) before each live block, sorted

    def trace_allocation(self, name: str, size: int) -> None:
        """Place ``size`` bytes (rounded up here) in the smallest gap that holds them, else after the last live block.

        The room between the last live block and the end of what was ever used is a gap like those between blocks. This
        is 1.31.1's behaviour, found where sources up to 1.20, which do not look there, gave other blocks.
        """
        size = aligned(size)
        end = self._end(len(self._starts))
        found = bisect_left(self._gaps, (size, 0))
        tail = self.peak_bytes - end
        is_behind = found == len(self._gaps) or size <= tail < self._gaps[found][0]
        offset = end if is_behind else self._gaps[found][1]
        self.blocks[name] = (offset, size)
        if not size:
            return
        if is_behind:
            insort(self._gaps, (0, end))
        else:
            gap, _ = self._gaps.pop(found)
            insort(self._gaps, (0, offset))
            insort(self._gaps, (gap - size, offset + size))
        insort(self._starts, offset)
        self._sizes[offset] = size
        self._names[name] = offset
        self.peak_bytes = max(self.peak_bytes, offset + size)

    def _end(self, position: int) -> int:
        """Where the live block before ``position`` ends; 0 before the first."""
        if not position:
            return 0
        start = self._starts[position - 1]
        return start + self._sizes[start]

    def trace_free(self, name: str) -> None:
        """Make room where ``name`` was; what is placed already stays where it is."""
        if name not in self._names:
            return
        start = self._names.pop(name)
        position = bisect_left(self._starts, start)
        before = self._end(position)
        self._drop_gap(start - before, before)
        del self._starts[position]
        end = start + self._sizes.pop(start)
        if position < len(self._starts):  # the gap behind it, and the one before, become one
            following = self._starts[position]
            self._drop_gap(following - end, end)
            insort(self._gaps, (following - before, before))

    def _drop_gap(self, size: int, start: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, start))]

    def pattern(self) -> MemoryPattern:
        """The pattern of what was traced."""
        return MemoryPattern(self.peak_bytes, dict(self.blocks))
