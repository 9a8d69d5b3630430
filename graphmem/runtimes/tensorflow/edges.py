"""In which order TensorFlow goes through the edges that leave a node.

Up to eight edges are kept as they were added; more are a hash table by address (``EdgeSet``, edgeset.h; ``FlatRep``,
flatrep.h), which is gone through slot by slot. A graph has its edges one after the other in blocks of its arena
(graph.cc, arena.cc), so that neighbours meet in a slot and are scattered from there; where a block lies is another
address in every process. The order of edges is therefore one of a process, and the same in all its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Generic, TypeVar

E = TypeVar("E")
#: ``EdgeSet::kInline``.
INLINE_EDGES = 8
_EDGE_BYTES = 32
_BLOCK_BYTES = 8 << 10
#: Addresses of blocks are drawn from so many bytes, in steps of an allocation of the heap.
_HEAP_BYTES, _ALIGNMENT = 1 << 30, 16
#: Slots of a bucket, the most of them that are filled, and the bits of a hash that choose none.
_WIDTH, _FILLED, _MARKER_BITS = 8, 0.8, 8


class Addresses:
    """Where a process that is drawn has its edges, by number in the order of their making."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._blocks: list[int] = []
        self._before = draw.randrange(0, _BLOCK_BYTES, _EDGE_BYTES)

    def of(self, edge: int) -> int:
        """The address of an edge."""
        block, offset = divmod(self._before + edge * _EDGE_BYTES, _BLOCK_BYTES)
        while len(self._blocks) <= block:
            self._blocks.append(self._draw.randrange(0, _HEAP_BYTES, _ALIGNMENT))
        return self._blocks[block] + offset

    def ordered(self, edges: Sequence[tuple[int, E]], *, reserved: bool = True) -> list[E]:
        """The edges that leave a node, with their numbers, in the order in which TensorFlow goes through it.
        ``reserved``: the table was made for all of them at once."""
        if len(edges) <= INLINE_EDGES:
            return [edge for _, edge in edges]
        table: _Table[E] = _Table(len(edges) if reserved else 1)
        for number, edge in edges:
            table.put(self.of(number), edge)
        return [entry[1] for entry in table.slots if entry is not None]


class _Table(Generic[E]):
    """``FlatSet`` of pointers: open addressing with steps of 1, 2, 3 ..."""

    def __init__(self, size: int) -> None:
        buckets = 1
        while size >= _FILLED * buckets * _WIDTH:
            buckets *= 2
        self.slots: list[tuple[int, E] | None] = [None] * (buckets * _WIDTH)
        self._used = 0

    def put(self, address: int, edge: E) -> None:
        if self._used >= int(len(self.slots) * _FILLED):
            larger: _Table[E] = _Table(self._used + 1)
            for entry in filter(None, self.slots):
                larger.put(*entry)
            self.slots = larger.slots
        place, step = (address + (address >> 6)) >> _MARKER_BITS, 0
        while self.slots[place % len(self.slots)] is not None:
            step += 1
            place += step
        self.slots[place % len(self.slots)] = address, edge
        self._used += 1
