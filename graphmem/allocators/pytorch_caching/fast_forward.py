"""The allocator's plain path on arrays, for numba to compile: requests and frees of the two default pools.

    played = fast_forward(allocator, kinds, subjects, sizes, streams)

plays events into a new allocator until one needs more than the plain path: a request that the card refuses whatever is
given back (with expandable segments: that it refuses), a private pool, an event of another kind. Restored, the
allocator is as if it had played them itself, and goes on by itself. With numba (``pip install graphmem[fast]``) it
takes 20 to 40 times less than the allocator's own methods; without, or with a fraction of the card's memory, nothing is
played here. The steps are those of :mod:`.allocator`, which is the one to read; tests hold the two together.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import Played
from graphmem.allocators.cuda_driver import LowestHole
from graphmem.allocators.pytorch_caching.blocks import (
    ADDRESS_BITS,
    GONE,
    ONE_EXBIBYTE,
    ORDER_BITS,
    SMALL_SEGMENT_BYTES,
    Block,
    FreeSet,
)
from graphmem.allocators.pytorch_caching.expandable import ExpandableSegment, segment_bytes
from graphmem.allocators.pytorch_caching.table import PREV, RETRIES, SET, STATE, TAKEN, Rules, Table

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator

Numbers = npt.NDArray[np.int64]

#: More streams are rare, and take memory for each.
_MOST_STREAMS = 8
#: Above every size, and a number of 64 bits when another size is added.
_UNLIMITED = 1 << 62


def fast_forward(
    allocator: PyTorchCachingAllocator,
    kinds: Numbers,
    subjects: Numbers,
    sizes: Sequence[int] | Numbers,
    streams: Sequence[int] | Numbers,
) -> Played | None:
    """Play events as far as the plain path goes into a new ``allocator``. None where nothing is played.

    ``kinds`` and ``subjects`` (the index of a storage) are of each event, ``sizes`` (bytes) and ``streams`` of each
    storage.
    """
    sizes, streams = np.asarray(sizes, dtype=np.int64), np.asarray(streams, dtype=np.int64)
    if not (_is_plain(allocator) and len(sizes) and streams.max() < _MOST_STREAMS and sizes.max() < ONE_EXBIBYTE):
        return None
    play = _compiled()
    if play is None:
        return None
    events, storages, sets = len(kinds), len(sizes), 2 * int(streams.max() + 1)
    table = Table.empty(storages, sets)
    held = np.full(storages, -1, dtype=np.int64)
    allocated, reserved = np.empty(events, dtype=np.int64), np.empty(events, dtype=np.int64)
    done, rows, peak = play(
        kinds, subjects, sizes, streams, _divisions(allocator),
        _rules(allocator), table, held, allocated, reserved,
    )  # fmt: skip
    if not done:
        return None

    def restore() -> dict[int, Block]:
        made = _Made(allocator, table, rows)
        made.put_back(int(reserved[:done].max()))
        allocator.allocated_bytes, allocator.peak_allocated_bytes = int(allocated[done - 1]), int(peak)
        living = np.flatnonzero(held >= 0)
        return {index: made.blocks[row] for index, row in zip(living.tolist(), held[living].tolist(), strict=True)}

    return Played(allocated[:done], reserved[:done], int(peak), int(table.counted[RETRIES]), restore)


class PlainRuns:
    """Many runs of up to so many ``events`` of ``storages`` on one stream, each through a new allocator with the
    settings of this new one. The arrays are made once."""

    def __init__(self, allocator: PyTorchCachingAllocator, storages: int, events: int) -> None:
        self._play = _compiled() if _is_plain(allocator) else None
        self._rules, self._table = _rules(allocator), Table.empty(storages, 2)
        self._divisions = _divisions(allocator)
        self._streams = np.zeros(storages, dtype=np.int64)
        self._held, self._allocated, self._reserved = (np.empty(n, dtype=np.int64) for n in (storages, events, events))

    def most_reserved(self, kinds: Numbers, subjects: Numbers, sizes: Numbers) -> int | None:
        """The most bytes reserved while these events are played; None where they are more than the plain path."""
        if self._play is None or (len(sizes) and sizes.max() >= ONE_EXBIBYTE):
            return None
        table = self._table
        table.counts[:], table.tails[:], table.counted[:], self._held[:] = 0, -1, 0, -1
        done, _, _ = self._play(
            kinds, subjects, sizes, self._streams, self._divisions,
            self._rules, table, self._held, self._allocated, self._reserved,
        )  # fmt: skip
        if done < len(kinds):
            return None
        return int(self._reserved[:done].max()) if done else 0


def _is_plain(allocator: PyTorchCachingAllocator) -> bool:
    """Whether the allocator is new, and its settings are among those that are played here."""
    driver = allocator.driver
    return allocator.is_plain and driver.used_bytes == 0 and type(driver.addresses) is LowestHole


def _divisions(allocator: PyTorchCachingAllocator) -> Numbers:
    """Divisions between powers of two by their slots; none where no size is rounded so."""
    divisions = allocator.conf.roundup_power2_divisions
    return np.array(divisions if any(divisions) else (), dtype=np.int64)


def _rules(allocator: PyTorchCachingAllocator) -> Rules:
    driver, conf = allocator.driver, allocator.conf
    return Rules(
        conf.large_segment_size_bytes,
        min(conf.max_split_size_bytes, _UNLIMITED),
        min(conf.max_non_split_rounding_bytes, _UNLIMITED),
        int(conf.expandable_segments),
        segment_bytes(driver.capacity_bytes, SMALL_SEGMENT_BYTES),
        segment_bytes(driver.capacity_bytes, conf.large_segment_size_bytes),
        int(allocator.numbers_segments),
        -1 if driver.capacity_bytes is None else max(0, driver.capacity_bytes - driver.other_bytes),
    )


class _Made:
    """The allocator's own blocks, made of the first rows of the table. ``blocks``: by their rows."""

    def __init__(self, allocator: PyTorchCachingAllocator, table: Table, rows: int) -> None:
        self._allocator, self._table = allocator, table
        of_rows = table.blocks[:rows]
        numbers, first_of_set = np.unique(of_rows[:, SET], return_index=True)
        self._sets = numbers[np.argsort(first_of_set)].tolist()  # in the order in which they were first asked
        there = np.flatnonzero(of_rows[:, STATE] != GONE)
        self._rows: dict[int, list[int]] = dict(zip(there.tolist(), of_rows[there].tolist(), strict=True))
        self.blocks: dict[int, Block] = {}

    def put_back(self, most_reserved: int) -> None:
        """Give the allocator its segments and its sets of free blocks; ``most_reserved``: bytes, so far."""
        allocator, table = self._allocator, self._table
        sets = {one: allocator.free_set("large" if one % 2 else "small", one // 2) for one in self._sets}
        for row in (
            row for row in table.tails[self._sets].tolist() if row >= 0
        ):  # in the order of their serial numbers
            free_set = sets[self._rows[row][SET]]
            segment = allocator.add_expandable_segment(free_set)
            head, tail = self._chain(self._first(row), free_set, segment)
            segment.head, maps = head, tail.requested_size
            tail.requested_size = 0
            free_set.unmapped = [tail]
            if maps:  # it ended before, where the card had no room for the first
                allocator.take_mapped(free_set, tail.address - head.address, maps)
        plain = [number for number, row in self._rows.items() if row[PREV] < 0 and number not in self.blocks]
        if self._table.counted[TAKEN]:
            heads = [self._chain(number, sets[self._rows[number][SET]])[0] for number in plain]
            sizes = {head: sum(block.size for block in _from(head)) for head in heads}
            allocator.take_segments(sizes, most_reserved, self._table.counted.tolist())
        for one, free_set in sets.items():
            free_set.blocks = [self.blocks[row] for row in table.free[one, : table.counts[one]].tolist()]
            free_set.keys = [(block.size << ORDER_BITS) + block.order for block in free_set.blocks]

    def _first(self, row: int) -> int:
        while self._rows[row][PREV] >= 0:
            row = self._rows[row][PREV]
        return row

    def _chain(self, row: int, free_set: FreeSet, segment: ExpandableSegment | None = None) -> tuple[Block, Block]:
        """The blocks of a segment, linked, from the row of the first on: that one, and the last."""
        before, first = None, row
        while row >= 0:
            size, serial, address, _, after, state, _, requested = self._rows[row]
            block = Block((serial << ADDRESS_BITS) | address, size, free_set, state, before, None, segment)
            block.requested_size = requested
            if before is not None:
                before.next = block
            self.blocks[row], before, row = block, block, after
        assert before is not None
        return self.blocks[first], before


def _from(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.next


@functools.cache
def _compiled() -> Callable[..., Any] | None:
    """The compiled player; None without numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    from graphmem.allocators.pytorch_caching import plain_path

    return plain_path.play  # type: ignore[no-any-return]
