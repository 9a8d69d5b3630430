"""Where buffers of known lives lie: rectangles in time and addresses, of which only the address is free.

Sizes and addresses are whole numbers of one unit. A life is a half-open range of *sections*: stretches of time, a new
one where a birth follows a death, so that two buffers are alive together where their ranges meet. *Obstacles* are
addresses that a buffer must not touch. The loops are compiled where numba is installed.

The search places buffers from the lowest address up, each on what lies below it, after Moffitt, "MiniMalloc: A
Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023): every plan can be pushed down
into one that such an order makes. Besides what is told there (nothing that would have fitted lower is placed higher;
parts that no buffer joins any more are searched apart, in an order of their own by what is left to place), a buffer
that has to wait is known to lie on one that is still to come, which bounds its section from below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphmem.plan_memory.compiled import compiled

Numbers = npt.NDArray[np.int64]

#: Answers of the search.
FOUND, IMPOSSIBLE, STOPPED = 1, 0, -1


class Lives(NamedTuple):
    """Buffers: the sections ``first`` to ``end`` (excluded) in which each is alive, its ``sizes``; its neighbours, with
    which it is alive together, are ``others[starts[i] : starts[i + 1]]``, and its obstacles, by address, rows
    ``obstacle_starts[i]`` to ``obstacle_starts[i + 1]`` of ``obstacles``: begin and end."""

    first: Numbers
    end: Numbers
    sizes: Numbers
    starts: Numbers
    others: Numbers
    obstacle_starts: Numbers
    obstacles: Numbers


class State(NamedTuple):
    """The search so far: addresses ``placed``, -1 for none; the ``lowest`` that each buffer can still have, and the
    ``early``, lowest that it will; of each section what is still to be placed there (``waiting``), and the lowest
    address of that (``floor``)."""

    placed: Numbers
    lowest: Numbers
    early: Numbers
    waiting: Numbers
    floor: Numbers


@compiled
def count_neighbours(first: Numbers, end: Numbers, by_birth: Numbers, counts: Numbers, most: int) -> int:
    """How many pairs are alive together, and of each buffer, in ``counts``; more than ``most`` are not counted."""
    pairs = 0
    for place in range(len(by_birth)):
        one = by_birth[place]
        for later in range(place + 1, len(by_birth)):
            other = by_birth[later]
            if first[other] >= end[one]:
                break
            counts[one] += 1
            counts[other] += 1
            pairs += 1
        if pairs > most:
            break
    return pairs


@compiled
def write_neighbours(first: Numbers, end: Numbers, by_birth: Numbers, ends: Numbers, others: Numbers) -> None:
    """The neighbours of each buffer, written from its ``ends`` on, which move."""
    for place in range(len(by_birth)):
        one = by_birth[place]
        for later in range(place + 1, len(by_birth)):
            other = by_birth[later]
            if first[other] >= end[one]:
                break
            others[ends[one]], others[ends[other]] = other, one
            ends[one] += 1
            ends[other] += 1


@compiled
def fit(order: Numbers, lives: Lives, is_best: bool, placed: Numbers) -> int:
    """Place buffers one after the other, each in a gap between its neighbours that are ``placed``: the lowest, or, if
    ``is_best``, the one that it fills best, the room above all of them being the last choice. The height."""
    sizes, height = lives.sizes, 0
    for one in order:
        begin, end = lives.starts[one], lives.starts[one + 1]
        low, high = lives.obstacle_starts[one], lives.obstacle_starts[one + 1]
        begins, ends = (
            np.empty(end - begin + high - low, dtype=np.int64),
            np.empty(end - begin + high - low, dtype=np.int64),
        )
        count = 0
        for place in range(begin, end):
            other = lives.others[place]
            if placed[other] >= 0:
                begins[count], ends[count] = placed[other], placed[other] + sizes[other]
                count += 1
        for place in range(low, high):
            begins[count], ends[count] = lives.obstacles[place, 0], lives.obstacles[place, 1]
            count += 1
        found, least, top = -1, np.iinfo(np.int64).max, 0
        for place in np.argsort(begins[:count]):
            gap = begins[place] - top
            if gap >= sizes[one] and gap < least:
                found, least = top, gap
                if not is_best:
                    break
            top = max(top, ends[place])
        placed[one] = top if found < 0 else found
        height = max(height, placed[one] + sizes[one])
    return height


@compiled
def fit_in_time(sizes: Numbers, events: Numbers, placed: Numbers) -> int:
    """Place buffers as they are born, each in the smallest gap that holds it; the height. ``events``: the numbers of
    buffers in the order of their births, and, less the count of buffers, of their deaths, deaths first."""
    most = 16
    gaps, count, height = np.empty((most, 2), dtype=np.int64), 0, 0
    for event in events:
        if event >= 0:
            size, found = sizes[event], -1
            for place in range(count):
                room = gaps[place, 1] - gaps[place, 0]
                if room >= size and (found < 0 or room < gaps[found, 1] - gaps[found, 0]):
                    found = place
            if found >= 0:
                placed[event] = gaps[found, 0]
                gaps[found, 0] += size
                if gaps[found, 0] == gaps[found, 1]:
                    for place in range(found, count - 1):
                        gaps[place, 0], gaps[place, 1] = gaps[place + 1, 0], gaps[place + 1, 1]
                    count -= 1
            else:
                is_last = count > 0 and gaps[count - 1, 1] == height
                placed[event] = gaps[count - 1, 0] if is_last else height
                count -= 1 if is_last else 0
                height = placed[event] + size
            continue
        one = event + len(sizes)
        begin, end = placed[one], placed[one] + sizes[one]
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if gaps[middle, 0] < begin:
                low = middle + 1
            else:
                high = middle
        joins_before = low > 0 and gaps[low - 1, 1] == begin
        joins_after = low < count and gaps[low, 0] == end
        if joins_before and joins_after:
            gaps[low - 1, 1] = gaps[low, 1]
            for place in range(low, count - 1):
                gaps[place, 0], gaps[place, 1] = gaps[place + 1, 0], gaps[place + 1, 1]
            count -= 1
        elif joins_before:
            gaps[low - 1, 1] = end
        elif joins_after:
            gaps[low, 0] = begin
        else:
            if count == most:
                more = np.empty((2 * most, 2), dtype=np.int64)
                more[:most] = gaps
                gaps, most = more, 2 * most
            for place in range(count, low, -1):
                gaps[place, 0], gaps[place, 1] = gaps[place - 1, 0], gaps[place - 1, 1]
            gaps[low, 0], gaps[low, 1] = begin, end
            count += 1
    return height


# --- the search -------------------------------------------------------------------------------------------------------


@compiled
def lifted(lives: Lives, one: int, address: int) -> int:
    """The lowest address from this on at which a buffer touches no obstacle of its own."""
    for place in range(lives.obstacle_starts[one], lives.obstacle_starts[one + 1]):
        if lives.obstacles[place, 0] < address + lives.sizes[one] and address < lives.obstacles[place, 1]:
            address = lives.obstacles[place, 1]
    return address


@compiled
def _is_hopeless(members: Numbers, last: int, passed: int, lives: Lives, state: State, capacity: int) -> bool:
    """Whether these buffers cannot all be placed from the address ``last`` on (the first ``passed`` ones above it), on
    what is placed already."""
    lowest, early, floor, sizes = state.lowest, state.early, state.floor, lives.sizes
    first, end = lives.first[members[0]], lives.end[members[0]]
    for one in members:
        early[one] = max(lowest[one], last)
        # One that would have fitted below is placed there by another branch.
        if lowest[one] + sizes[one] <= last or early[one] + sizes[one] > capacity:
            return True
        first, end = min(first, lives.first[one]), max(end, lives.end[one])
    for section in range(first, end):
        floor[section] = capacity + 1
    for rank, one in enumerate(members):
        if lowest[one] < last or (lowest[one] == last and rank < passed):
            # It has to wait for a neighbour that is placed under it.
            least = capacity + 1
            for place in range(lives.starts[one], lives.starts[one + 1]):
                other = lives.others[place]
                if state.placed[other] < 0:
                    least = min(least, early[other] + sizes[other])
            if least + sizes[one] > capacity:
                return True
            early[one] = least
        for section in range(lives.first[one], lives.end[one]):
            floor[section] = min(floor[section], early[one])
    for section in range(first, end):
        if state.waiting[section] > 0 and floor[section] + state.waiting[section] > capacity:
            return True
    return False


@compiled
def by_waiting(members: Numbers, lives: Lives, waiting: Numbers) -> Numbers:
    """The members, those first in whose fullest section most is still to be placed; of equal ones the lower named."""
    named = np.sort(members)
    most = np.array([waiting[lives.first[one] : lives.end[one]].max() for one in named])
    return named[np.argsort(-most, kind="mergesort")]


@compiled
def _parts(members: Numbers, first: int, end: int, lives: Lives, placed: Numbers, rest: Numbers) -> Numbers:
    """Sort the members that are not placed into ``rest`` by parts that no section joins; where each part begins."""
    part = np.zeros(end - first + 1, dtype=np.int64)
    for one in members:
        if placed[one] < 0:
            part[lives.first[one] + 1 - first] += 1
            part[lives.end[one] - first] -= 1
    joined, number = 0, 0
    for section in range(end - first):
        joined += part[section]
        if section > 0 and joined == 0:
            number += 1
        part[section] = number
    starts = np.zeros(number + 2, dtype=np.int64)
    for one in members:
        if placed[one] < 0:
            starts[part[lives.first[one] - first] + 1] += 1
    for place in range(number + 1):
        starts[place + 1] += starts[place]
    ends = starts.copy()
    for one in members:
        if placed[one] < 0:
            mine = part[lives.first[one] - first]
            rest[ends[mine]] = one
            ends[mine] += 1
    return starts


@compiled
def search(
    members: Numbers,
    last: int,
    passed: int,
    lives: Lives,
    state: State,
    capacity: int,
    is_by_waiting: bool,
    left: Numbers,
) -> int:
    """Place all ``members`` from the address ``last`` on (the first ``passed`` ones above it) and under ``capacity``:
    whether that was :data:`FOUND`, is :data:`IMPOSSIBLE`, or was :data:`STOPPED` after the steps that were ``left``.

    Of two that may lie at one address the first member is tried first. ``is_by_waiting``: parts of their own are
    ordered anew, see :func:`by_waiting`.
    """
    left[0] -= 1
    if left[0] < 0:
        return STOPPED
    placed, lowest, sizes = state.placed, state.lowest, lives.sizes
    if len(members) == 1:
        one = members[0]
        if lowest[one] + sizes[one] > capacity:
            return IMPOSSIBLE
        placed[one] = lowest[one]
        return FOUND
    first, end, least_top = lives.first[members[0]], lives.end[members[0]], capacity + 1
    for one in members:
        least_top = min(least_top, lowest[one] + sizes[one])
        first, end = min(first, lives.first[one]), max(end, lives.end[one])
    candidates, count = np.empty(len(members), dtype=np.int64), 0
    for rank, one in enumerate(members):
        if lowest[one] < least_top and (lowest[one] > last or (lowest[one] == last and rank >= passed)):
            place = count
            while place > 0 and lowest[members[candidates[place - 1]]] > lowest[one]:
                candidates[place] = candidates[place - 1]
                place -= 1
            candidates[place] = rank
            count += 1
    before, waiting = lowest[members], state.waiting[first:end].copy()
    rest = np.empty(len(members) - 1, dtype=np.int64)
    for rank in candidates[:count]:
        one = members[rank]
        address = lowest[one]
        placed[one] = address
        for section in range(lives.first[one], lives.end[one]):
            state.waiting[section] -= sizes[one]
        for place in range(lives.starts[one], lives.starts[one + 1]):
            other = lives.others[place]
            if placed[other] < 0 and lowest[other] < address + sizes[one]:
                lowest[other] = lifted(lives, other, address + sizes[one])
        starts, answer = _parts(members, first, end, lives, placed, rest), FOUND
        above = rank if len(starts) == 2 else 0
        for part in range(len(starts) - 1):
            some = rest[starts[part] : starts[part + 1]]
            if len(starts) > 2 and is_by_waiting and len(some):
                some[:] = by_waiting(some, lives, state.waiting)
            if len(some) and _is_hopeless(some, address, above, lives, state, capacity):
                left[0] -= 1
                answer = IMPOSSIBLE
                break
        if answer == FOUND:
            for part in np.argsort(np.diff(starts)):  # the smallest first
                some = rest[starts[part] : starts[part + 1]]
                if len(some):
                    answer = search(some, address, above, lives, state, capacity, is_by_waiting, left)
                    if answer != FOUND:
                        break
        if answer == FOUND:
            return FOUND
        placed[members], lowest[members], state.waiting[first:end] = -1, before, waiting
        if answer == STOPPED:
            return STOPPED
    return IMPOSSIBLE
