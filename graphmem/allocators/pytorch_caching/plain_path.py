"""The plain path of the allocator, compiled by numba: whole numbers, and arrays of them. See :mod:`.fast_forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core.typing.templates import Signature
from numba.extending import intrinsic

from graphmem.allocators.alloc_conf import MIN_LARGE_ALLOC_BYTES, ROUNDUP_SLOTS
from graphmem.allocators.base import GIVE, STOP, TAKE
from graphmem.allocators.cuda_driver import MALLOC_BASE, PAGE_BYTES, SPAN_BYTES, VIRTUAL_BASE
from graphmem.allocators.pytorch_caching.blocks import (
    ALLOCATED,
    FREE,
    GONE,
    MIN_BLOCK_BYTES,
    ONE_EXBIBYTE,
    ROUND_LARGE_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    UNMAPPED,
)
from graphmem.allocators.pytorch_caching.table import (
    ADDRESS,
    GIVEN,
    HOLES,
    LAST_SERIAL,
    MAPPED,
    MOST_MAPPED,
    NEXT,
    PREV,
    REQUESTED,
    RESERVED,
    RETRIES,
    SERIAL,
    SET,
    SIZE,
    STATE,
    TAKEN,
    Rules,
    Table,
)

Numbers = npt.NDArray[np.int64]

_ONE = np.uint64(1)


@intrinsic
def _unowned(_: Any, array: types.Array) -> tuple[Signature, Callable[..., Any]]:
    """The same array without its owner, which the caller keeps: numba counts the owner's users at each mention of an
    array, and those atomic steps took more than half of a run."""

    def made(context: Any, builder: Any, signature: Signature, values: Any) -> Any:
        view = context.make_array(signature.return_type)(context, builder, values[0])
        view.meminfo = view.meminfo.type(None)
        return view._getvalue()

    return array(array), made


@njit(cache=True, inline="always")
def _place(table: Table, pool: int, size: int, serial: int, address: int) -> int:
    """Where a free block of this size and order is, or would be, among the rows of a set, in order."""
    blocks, sizes, free = table.blocks, table.free_sizes, table.free
    low, high = 0, table.counts[pool]
    while low < high:
        middle = (low + high) // 2
        is_before = sizes[pool, middle] < size
        if sizes[pool, middle] == size:
            row = free[pool, middle]
            is_before = blocks[row, SERIAL] < serial
            if blocks[row, SERIAL] == serial:
                is_before = blocks[row, ADDRESS] < address
        if is_before:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, inline="always")
def _insert(table: Table, row: int) -> None:
    blocks, pool = table.blocks, table.blocks[row, SET]
    sizes, free, count = table.free_sizes[pool], table.free[pool], table.counts[pool]
    place = _place(table, pool, blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS])
    end = np.uint64(count)
    for moved in range(np.uint64(count - place)):  # without a sign, as no index is then counted from the end
        free[end - moved] = free[end - moved - _ONE]
        sizes[end - moved] = sizes[end - moved - _ONE]
    free[place], sizes[place] = row, blocks[row, SIZE]
    table.counts[pool] = count + 1


@njit(cache=True, inline="always")
def _remove_at(table: Table, pool: int, place: int) -> int:
    """Take the row at a place out of a set; the row."""
    sizes, free, count = table.free_sizes[pool], table.free[pool], table.counts[pool]
    row: int = free[place]
    for moved in range(np.uint64(count - 1 - place)):
        gap = np.uint64(place) + moved
        free[gap] = free[gap + _ONE]
        sizes[gap] = sizes[gap + _ONE]
    table.counts[pool] = count - 1
    return row


@njit(cache=True, inline="always")
def _remove(table: Table, row: int) -> None:
    blocks, pool = table.blocks, table.blocks[row, SET]
    _remove_at(table, pool, _place(table, pool, blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS]))


@njit(cache=True, inline="always")
def _bits(number: int) -> int:
    """``int.bit_length``."""
    count = 0
    while number:
        number >>= 1
        count += 1
    return count


@njit(cache=True, inline="always")
def _rounded(size: int, divisions: Numbers) -> int:
    """``round_size``; the steps between powers of two are those of ``_next_division``. No divisions: none are asked."""
    parts: int = divisions[min(max(_bits(size) - 21, 0), ROUNDUP_SLOTS - 1)] if len(divisions) else 0
    if parts <= 1 or size <= MIN_BLOCK_BYTES * parts:
        return -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    if size & (size - 1) == 0:
        return size
    power: int = 1 << (_bits(size) - 1)
    step = power >> (_bits(parts) - 1)
    return 2 * power if step == 0 else -(-size // step) * step


@njit(cache=True, inline="always")
def _expanded(table: Table, row: int) -> int:
    """Bytes that a free block may grow to: ``_expandable_size``."""
    blocks, after = table.blocks, table.blocks[row, NEXT]
    size: int = blocks[row, SIZE]
    if after >= 0 and blocks[after, STATE] == UNMAPPED:
        size += blocks[after, SIZE]
    return size


@njit(cache=True, inline="always")
def _best_fit(table: Table, rules: Rules, pool: int, rounded: int) -> int:
    """``get_free_block``, with its limits: the row, which is taken out of its set; -1 for none."""
    place, count = _place(table, pool, rounded, -1, -1), table.counts[pool]
    if place == count:
        return -1
    free = table.free
    if rules.is_expandable:
        while place + 1 < count and _expanded(table, free[pool, place + 1]) < _expanded(table, free[pool, place]):
            place += 1
    size = table.free_sizes[pool, place]
    if (size >= rules.max_split) if rounded < rules.max_split else (size >= rounded + rules.most_rounding):
        return -1
    row: int = _remove_at(table, pool, place)
    return row


@njit(cache=True, inline="always")
def _mapped(table: Table, rules: Rules, pool: int, rounded: int, room: int) -> int:
    """``try_allocate_expandable_block``: bytes that are mapped behind the last block of the set's segment, so that it
    holds a request; -1 where that is not plain. The last block is the free one then, before what is not mapped."""
    blocks, tail = table.blocks, table.tails[pool]
    page = SMALL_SEGMENT_BYTES if pool % 2 == 0 else rules.large_segment
    before = blocks[tail, PREV]
    there = blocks[before, SIZE] if before >= 0 and blocks[before, STATE] == FREE else 0
    size = -(-max(0, rounded - there) // page) * page
    return -1 if size > room or size >= blocks[tail, SIZE] else size


@njit(cache=True, inline="always")
def _map(table: Table, pool: int, size: int, rows: int) -> tuple[int, int]:
    """``map_block``: the last block of the segment with so many bytes more, taken out of its set; and how many rows
    there are then."""
    blocks, tail = table.blocks, table.tails[pool]
    row = blocks[tail, PREV]
    if row >= 0 and blocks[row, STATE] == FREE:
        _remove(table, row)
        blocks[row, SIZE] += size
    else:
        before, row, rows = row, rows, rows + 1
        blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS] = size, blocks[tail, SERIAL], blocks[tail, ADDRESS]
        blocks[row, PREV], blocks[row, NEXT], blocks[row, SET] = before, tail, pool
        if before >= 0:
            blocks[before, NEXT] = row
    blocks[tail, PREV] = row
    blocks[tail, ADDRESS] += size
    blocks[tail, SIZE] -= size
    blocks[tail, REQUESTED] += 1 if size else 0
    return row, rows


# --- the driver -------------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


@njit(cache=True, inline="always")
def _take_addresses(table: Table, pages: int) -> int:
    """``LowestHole.take``; -1 where no range is large enough."""
    holes, count = table.holes, table.counted[HOLES]
    for place in range(count):
        if holes[place, 1] >= pages:
            address: int = holes[place, 0]
            holes[place, 0] += pages
            holes[place, 1] -= pages
            if holes[place, 1] == 0:
                for number in range(place, count - 1):
                    holes[number] = holes[number + 1]
                table.counted[HOLES] -= 1
            return address
    return -1


@njit(cache=True)
def _give_addresses(table: Table, address: int, pages: int) -> None:
    """``LowestHole.give``."""
    holes, count, place = table.holes, table.counted[HOLES], 0
    while place < count and holes[place, 0] < address:
        place += 1
    joins = place > 0 and holes[place - 1, 0] + holes[place - 1, 1] == address
    if place < count and address + pages == holes[place, 0]:
        holes[place, 0] = address
        holes[place, 1] += pages
        if joins:
            holes[place - 1, 1] += holes[place, 1]
            for number in range(place, count - 1):
                holes[number] = holes[number + 1]
            table.counted[HOLES] -= 1
    elif joins:
        holes[place - 1, 1] += pages
    else:
        for number in range(count, place, -1):
            holes[number] = holes[number - 1]
        holes[place, 0], holes[place, 1] = address, pages
        table.counted[HOLES] += 1


@njit(cache=True)
def _release(table: Table, row: int) -> None:
    """``release_block``."""
    blocks, counted = table.blocks, table.counted
    size = blocks[row, SIZE]
    _remove(table, row)
    blocks[row, STATE] = GONE
    counted[RESERVED] -= size
    counted[MAPPED] -= _pages(size)
    counted[GIVEN] += 1
    _give_addresses(table, blocks[row, ADDRESS], _pages(size))


@njit(cache=True, inline="always")
def _is_whole(table: Table, row: int) -> bool:
    is_whole: bool = table.blocks[row, PREV] < 0 and table.blocks[row, NEXT] < 0
    return is_whole


@njit(cache=True)
def _releasable(table: Table) -> int:
    """Bytes of the pages that :func:`_release_cached` would give back."""
    pages = 0
    for pool in range(len(table.counts)):
        for place in range(table.counts[pool]):
            row = table.free[pool, place]
            if _is_whole(table, row):
                pages += _pages(table.blocks[row, SIZE])
    return pages


@njit(cache=True)
def _release_cached(table: Table) -> None:
    """``release_cached_blocks``."""
    table.counted[RETRIES] += 1
    for pool in range(len(table.counts)):
        for place in range(table.counts[pool] - 1, -1, -1):
            row = table.free[pool, place]
            if _is_whole(table, row):
                _release(table, row)


@njit(cache=True)
def _release_available(table: Table, rules: Rules, pool: int, rounded: int) -> bool:
    """``release_available_cached_blocks``."""
    if rules.max_split > ONE_EXBIBYTE:
        return False
    target, released = max(rounded, rules.max_split), 0
    place = _place(table, pool, target, -1, -1)
    if place < table.counts[pool]:
        _release(table, table.free[pool, place])
        return True
    while place > 0 and released < target:
        place -= 1
        row = table.free[pool, place]
        if table.blocks[row, SIZE] < rules.max_split:
            break
        released += table.blocks[row, SIZE]
        _release(table, row)
    is_enough: bool = released >= target
    return is_enough


@njit(cache=True, inline="always")
def _new_segment(table: Table, rules: Rules, pool: int, rounded: int, wanted: int, room: int) -> int:
    """``cudaMalloc`` of so many bytes, with what is given back before giving up: the address; -1 where that is not
    enough, and nothing is given back; -2 where addresses are too scattered to say."""
    counted, pages = table.counted, _pages(wanted)
    if counted[MAPPED] + pages > room:
        if room > SPAN_BYTES // 2 or counted[MAPPED] - _releasable(table) + pages > room:
            return -1
        if not _release_available(table, rules, pool, rounded) or counted[MAPPED] + pages > room:
            _release_cached(table)
    address: int = _take_addresses(table, pages)
    if address < 0:
        return -2
    counted[RESERVED] += wanted
    counted[MAPPED] += pages
    counted[MOST_MAPPED] = max(counted[MOST_MAPPED], counted[MAPPED])
    counted[TAKEN] += 1
    counted[LAST_SERIAL] += rules.numbers_segments
    return address


# --- blocks and events ------------------------------------------------------------------------------------------------


@njit(cache=True, inline="always")
def _split(table: Table, row: int, rounded: int, rows: int) -> None:
    """``split_off``: the rest of a block becomes the free block of the next row."""
    blocks, after = table.blocks, table.blocks[row, NEXT]
    blocks[rows, SIZE], blocks[rows, SERIAL] = blocks[row, SIZE] - rounded, blocks[row, SERIAL]
    blocks[rows, ADDRESS], blocks[rows, PREV] = blocks[row, ADDRESS] + rounded, row
    blocks[rows, NEXT], blocks[rows, STATE], blocks[rows, SET] = after, FREE, blocks[row, SET]
    if after >= 0:
        blocks[after, PREV] = rows
    blocks[row, NEXT], blocks[row, SIZE] = rows, rounded
    _insert(table, rows)


@njit(cache=True, inline="always")
def _free(table: Table, row: int) -> None:
    """``free_block``: among the free ones, merged with free neighbours."""
    blocks = table.blocks
    before = blocks[row, PREV]
    if before >= 0 and blocks[before, STATE] == FREE:
        _remove(table, before)
        blocks[before, SIZE] += blocks[row, SIZE]
        after = blocks[row, NEXT]
        blocks[before, NEXT], blocks[row, STATE] = after, GONE
        if after >= 0:
            blocks[after, PREV] = before
        row = before
    after = blocks[row, NEXT]
    if after >= 0 and blocks[after, STATE] == FREE:
        _remove(table, after)
        blocks[row, SIZE] += blocks[after, SIZE]
        blocks[after, STATE] = GONE
        blocks[row, NEXT] = blocks[after, NEXT]
        if blocks[after, NEXT] >= 0:
            blocks[blocks[after, NEXT], PREV] = row
    blocks[row, STATE] = FREE
    _insert(table, row)


@njit(cache=True)
def play(
    kinds: Numbers, subjects: Numbers, sizes: Numbers, streams: Numbers, divisions: Numbers, rules: Rules, table: Table,
    held: Numbers, allocated: Numbers, reserved: Numbers,
) -> tuple[int, int, int]:  # fmt: skip
    """Play events until one is not plain: how many were played, the rows of the table, and the most bytes allocated;
    none where it cannot be said.

    Filled here: the ``table``; the block ``held`` by each storage, -1 for none; bytes ``allocated`` and ``reserved``
    after each event.
    """
    table = Table(
        _unowned(table.blocks), _unowned(table.free), _unowned(table.free_sizes), _unowned(table.counts),
        _unowned(table.tails), _unowned(table.holes), _unowned(table.counted),
    )  # fmt: skip
    blocks, counted = table.blocks, table.counted
    rows, now, most, virtual = 0, 0, 0, VIRTUAL_BASE
    table.holes[0, 0], table.holes[0, 1], counted[HOLES] = MALLOC_BASE, SPAN_BYTES, 1
    room = SPAN_BYTES if rules.room < 0 else min(rules.room, SPAN_BYTES)
    least_rest = MIN_BLOCK_BYTES if rules.is_expandable else SMALL_BYTES + 1
    for event in range(len(kinds)):
        kind, subject = kinds[event], subjects[event]
        if kind == TAKE and sizes[subject] > 0:
            size = sizes[subject]
            rounded = _rounded(size, divisions)
            pool = 2 * streams[subject] + (1 if rounded > SMALL_BYTES else 0)
            row = _best_fit(table, rules, pool, rounded)
            if row < 0 and rules.is_expandable:
                if table.tails[pool] < 0:
                    whole = rules.large_range if pool % 2 else rules.small_range
                    counted[LAST_SERIAL] += rules.numbers_segments
                    blocks[rows, SIZE], blocks[rows, ADDRESS] = whole, virtual
                    blocks[rows, SERIAL] = counted[LAST_SERIAL]
                    blocks[rows, PREV], blocks[rows, NEXT] = -1, -1
                    blocks[rows, STATE], blocks[rows, SET] = UNMAPPED, pool
                    table.tails[pool], rows = rows, rows + 1
                    virtual += -(-whole // PAGE_BYTES) * PAGE_BYTES
                more = _mapped(table, rules, pool, rounded, room - counted[MAPPED])
                if more < 0:
                    return event, rows, most
                row, rows = _map(table, pool, more, rows)
                counted[RESERVED] += more
                counted[MAPPED] += more
            elif row < 0:
                wanted = -(-rounded // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
                if rounded <= SMALL_BYTES:
                    wanted = SMALL_SEGMENT_BYTES
                elif rounded < MIN_LARGE_ALLOC_BYTES:
                    wanted = rules.large_segment
                address = _new_segment(table, rules, pool, rounded, wanted, room)
                if address == -2:
                    return 0, 0, 0
                if address < 0:
                    return event, rows, most
                row, rows = rows, rows + 1
                blocks[row, SIZE], blocks[row, SERIAL], blocks[row, ADDRESS] = wanted, counted[LAST_SERIAL], address
                blocks[row, PREV], blocks[row, NEXT], blocks[row, SET] = -1, -1, pool
            is_worth_it = blocks[row, SIZE] - rounded >= (MIN_BLOCK_BYTES if pool % 2 == 0 else least_rest)
            if is_worth_it and (rounded < rules.max_split or rules.is_expandable):
                _split(table, row, rounded, rows)
                rows += 1
            blocks[row, STATE], blocks[row, REQUESTED] = ALLOCATED, size
            held[subject] = row
            now += blocks[row, SIZE]
            most = max(most, now)
        elif kind == GIVE and held[subject] >= 0:
            row, held[subject] = held[subject], -1
            now -= blocks[row, SIZE]
            _free(table, row)
        elif kind == STOP:
            return event, rows, most
        allocated[event], reserved[event] = now, counted[RESERVED]
    return len(kinds), rows, most
