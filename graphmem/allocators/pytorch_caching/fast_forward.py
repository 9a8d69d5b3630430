"""The allocator's plain path on arrays, for numba to compile: requests and frees of the two default pools.

    played = fast_forward(allocator, kinds, subjects, sizes, streams)

plays events into a new allocator until one needs more than the plain path: a request that the card refuses, a private
pool, an event of another kind. The allocator is then as if it had played them itself, and goes on by itself. With
numba (``pip install graphmem[fast]``) it takes 20 to 40 times less than the allocator's own methods; without, or where
settings are not the plain ones, nothing is played here. The steps are those of :mod:`.allocator`, which is the one to
read; tests hold the two together.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import Played
from graphmem.allocators.cuda_driver import LowestHole
from graphmem.allocators.pytorch_caching.blocks import ADDRESS_BITS, GONE, ONE_EXBIBYTE, ORDER_BITS, Block, FreeSet
from graphmem.allocators.pytorch_caching.table import PREV, SET, STATE

if TYPE_CHECKING:
    from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator

Numbers = npt.NDArray[np.int64]

#: More streams are rare, and take memory for each.
_MOST_STREAMS = 8


def fast_forward(
    allocator: PyTorchCachingAllocator,
    kinds: Numbers,
    subjects: Numbers,
    sizes: Sequence[int],
    streams: Sequence[int],
) -> Played | None:
    """Play events as far as the plain path goes into a new ``allocator``. None where nothing is played.

    ``kinds`` and ``subjects`` (the index of a storage) are of each event, ``sizes`` (bytes) and ``streams`` of each
    storage.
    """
    if not _is_plain(allocator) or not (streams and 0 <= min(streams) <= max(streams) < _MOST_STREAMS):
        return None
    play = _compiled()
    if play is None or max(sizes) >= ONE_EXBIBYTE:
        return None
    driver = allocator.driver
    room = -1 if driver.capacity_bytes is None else max(0, driver.capacity_bytes - driver.other_bytes)
    events, storages, sets = len(kinds), len(sizes), 2 * (max(streams) + 1)
    blocks = np.zeros((2 * storages + 1, 8), dtype=np.int64)  # a request makes two at most
    free, counts = np.zeros((sets, 2 * storages + 1), dtype=np.int32), np.zeros(sets, dtype=np.int64)
    held = np.full(storages, -1, dtype=np.int64)
    allocated, reserved = np.empty(events, dtype=np.int64), np.empty(events, dtype=np.int64)
    done, rows, peak = play(
        kinds, subjects, np.array(sizes, dtype=np.int64), np.array(streams, dtype=np.int64),
        allocator.conf.large_segment_size_bytes, int(allocator.numbers_segments), room,
        blocks, free, counts, held, allocated, reserved,
    )  # fmt: skip
    if not done:
        return None
    made = _Made(allocator, blocks[:rows])
    made.put_back([free[one, : counts[one]].tolist() for one in range(sets)])
    allocator.allocated_bytes, allocator.peak_allocated_bytes = int(allocated[done - 1]), int(peak)
    living = np.flatnonzero(held >= 0)
    handles = {index: made.blocks[row] for index, row in zip(living.tolist(), held[living].tolist(), strict=True)}
    return Played(allocated[:done], reserved[:done], handles)


def _is_plain(allocator: PyTorchCachingAllocator) -> bool:
    """Whether the allocator is new and its settings ask for nothing but splitting and merging."""
    driver = allocator.driver
    return allocator.is_plain and driver.used_bytes == 0 and type(driver.addresses) is LowestHole


class _Made:
    """The allocator's own blocks, made of the rows of the table. ``blocks``: by their rows."""

    def __init__(self, allocator: PyTorchCachingAllocator, table: Numbers) -> None:
        self._allocator = allocator
        numbers, first_of_set = np.unique(table[:, SET], return_index=True)
        self._sets = numbers[np.argsort(first_of_set)].tolist()  # in the order in which they were first asked
        there = np.flatnonzero(table[:, STATE] != GONE)
        self._rows: dict[int, list[int]] = dict(zip(there.tolist(), table[there].tolist(), strict=True))
        self.blocks: dict[int, Block] = {}

    def put_back(self, free: list[list[int]]) -> None:
        """Give the allocator its segments and its sets of free blocks, each a list of rows in order."""
        allocator = self._allocator
        sets = {one: allocator.free_set("large" if one % 2 else "small", one // 2) for one in self._sets}
        for number, row in self._rows.items():
            if row[PREV] < 0:
                self._segment(number, sets[row[SET]])
        for one, free_set in sets.items():
            free_set.blocks = [self.blocks[row] for row in free[one]]
            free_set.keys = [(block.size << ORDER_BITS) + block.order for block in free_set.blocks]

    def _segment(self, first: int, free_set: FreeSet) -> None:
        """The blocks of a segment, from the first on."""
        before, row, total = None, first, 0
        while row >= 0:
            size, serial, address, _, after, state, _, requested = self._rows[row]
            block = Block((serial << ADDRESS_BITS) | address, size, free_set, state, before, None)
            block.requested_size = requested
            if before is not None:
                before.next = block
            self.blocks[row], before, row, total = block, block, after, total + size
        self._allocator.take_segment(self.blocks[first], total)


@functools.cache
def _compiled() -> Callable[..., Any] | None:
    """The compiled player; None without numba."""
    if importlib.util.find_spec("numba") is None:
        return None
    from graphmem.allocators.pytorch_caching import plain_path

    return plain_path.play  # type: ignore[no-any-return]
