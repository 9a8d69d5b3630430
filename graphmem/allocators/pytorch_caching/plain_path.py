"""The plain path of the allocator, compiled by numba: whole numbers, and arrays of them. See :mod:`.fast_forward`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from graphmem.allocators.alloc_conf import MIN_LARGE_ALLOC_BYTES
from graphmem.allocators.base import GIVE, STOP, TAKE
from graphmem.allocators.cuda_driver import MALLOC_BASE, PAGE_BYTES, SPAN_BYTES
from graphmem.allocators.pytorch_caching.blocks import (
    ALLOCATED,
    FREE,
    GONE,
    MIN_BLOCK_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from graphmem.allocators.pytorch_caching.table import (
    ADDRESS,
    NEXT,
    PREV,
    REQUESTED,
    SERIAL,
    SET,
    SIZE,
    STATE,
)

Numbers = npt.NDArray[np.int64]


@njit(cache=True)
def _place(blocks: Numbers, free: Numbers, pool: int, count: int, size: int, serial: int, address: int) -> int:
    """Where a free block of this size and order is, or would be, among the ``count`` rows of a set, in order."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        row = free[pool, middle]
        is_before = blocks[row, SIZE] < size
        if blocks[row, SIZE] == size:
            is_before = blocks[row, SERIAL] < serial
            if blocks[row, SERIAL] == serial:
                is_before = blocks[row, ADDRESS] < address
        if is_before:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _insert(blocks: Numbers, free: Numbers, counts: Numbers, row: int) -> None:
    pool = blocks[row, SET]
    count = counts[pool]
    place = _place(blocks, free, pool, count, blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS])
    for number in range(count, place, -1):
        free[pool, number] = free[pool, number - 1]
    free[pool, place] = row
    counts[pool] = count + 1


@njit(cache=True)
def _remove(blocks: Numbers, free: Numbers, counts: Numbers, row: int) -> None:
    pool = blocks[row, SET]
    count = counts[pool]
    place = _place(blocks, free, pool, count, blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS])
    for number in range(place, count - 1):
        free[pool, number] = free[pool, number + 1]
    counts[pool] = count - 1


@njit(cache=True)
def play(
    kinds: Numbers, subjects: Numbers, sizes: Numbers, streams: Numbers, large_segment: int, numbers_segments: int,
    room: int, blocks: Numbers, free: Numbers, counts: Numbers, held: Numbers, allocated: Numbers, reserved: Numbers,
) -> tuple[int, int, int]:  # fmt: skip
    """Play events until one is not plain: how many were played, the rows of ``blocks``, and the most bytes allocated.

    ``room``: bytes that the card has, -1 for no limit. Filled here: ``blocks``; the first ``counts`` of each row of
    ``free`` (the small pool of stream s is row 2 s, the large one the next); the block ``held`` by each storage, -1 for
    none; bytes ``allocated`` and ``reserved`` after each event.
    """
    rows, now, most, total, mapped, address, serial = 0, 0, 0, 0, 0, MALLOC_BASE, 0
    for event in range(len(kinds)):
        kind, subject = kinds[event], subjects[event]
        if kind == TAKE and sizes[subject] > 0:
            size = sizes[subject]
            rounded = -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
            pool = 2 * streams[subject] + (1 if rounded > SMALL_BYTES else 0)
            place = _place(blocks, free, pool, counts[pool], rounded, -1, -1)
            if place < counts[pool]:
                row = free[pool, place]
                _remove(blocks, free, counts, row)
            else:
                wanted = -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
                if rounded <= SMALL_BYTES:
                    wanted = SMALL_SEGMENT_BYTES
                elif rounded < MIN_LARGE_ALLOC_BYTES:
                    wanted = large_segment
                pages = -(-wanted // PAGE_BYTES) * PAGE_BYTES
                if (room >= 0 and mapped + pages > room) or mapped + pages > SPAN_BYTES:
                    return event, rows, most
                row, rows = rows, rows + 1
                serial += numbers_segments
                blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS] = wanted, serial, address
                blocks[row, PREV], blocks[row, NEXT], blocks[row, SET] = -1, -1, pool
                total, mapped, address = total + wanted, mapped + pages, address + pages
            rest = blocks[row, SIZE] - rounded
            if rest >= (MIN_BLOCK_BYTES if pool % 2 == 0 else SMALL_BYTES + 1):
                after = blocks[row, NEXT]
                blocks[rows, SIZE], blocks[rows, SERIAL] = rest, blocks[row, SERIAL]
                blocks[rows, ADDRESS], blocks[rows, PREV] = blocks[row, ADDRESS] + rounded, row
                blocks[rows, NEXT], blocks[rows, STATE], blocks[rows, SET] = after, FREE, pool
                if after >= 0:
                    blocks[after, PREV] = rows
                blocks[row, NEXT], blocks[row, SIZE] = rows, rounded
                _insert(blocks, free, counts, rows)
                rows += 1
            blocks[row, STATE], blocks[row, REQUESTED] = ALLOCATED, size
            held[subject] = row
            now += blocks[row, SIZE]
            most = max(most, now)
        elif kind == GIVE and held[subject] >= 0:
            row, held[subject] = held[subject], -1
            pool = blocks[row, SET]
            now -= blocks[row, SIZE]
            before = blocks[row, PREV]
            if before >= 0 and blocks[before, STATE] == FREE:
                _remove(blocks, free, counts, before)
                blocks[before, SIZE] += blocks[row, SIZE]
                after = blocks[row, NEXT]
                blocks[before, NEXT], blocks[row, STATE] = after, GONE
                if after >= 0:
                    blocks[after, PREV] = before
                row = before
            after = blocks[row, NEXT]
            if after >= 0 and blocks[after, STATE] == FREE:
                _remove(blocks, free, counts, after)
                blocks[row, SIZE] += blocks[after, SIZE]
                blocks[after, STATE] = GONE
                blocks[row, NEXT] = blocks[after, NEXT]
                if blocks[after, NEXT] >= 0:
                    blocks[blocks[after, NEXT], PREV] = row
            blocks[row, STATE] = FREE
            _insert(blocks, free, counts, row)
        elif kind == STOP:
            return event, rows, most
        allocated[event], reserved[event] = now, total
    return len(kinds), rows, most
