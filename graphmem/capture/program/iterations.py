"""Iterations of a loop as the trace has them: compared with each other, and repeated.

A step that is like the one before finds another allocator: blocks were cut up meanwhile. What the later steps of a loop
make of it shows when they are played, and they need not be followed for that: the events of the last one are written
again, until the allocator is as it was before one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from graphmem.capture.record.storages import Storages
from graphmem.trace import EventKind, Place

#: Iterations in a row that have to be alike.
ALIKE_ITERATIONS = 3
#: Iterations that take turns, at most.
MOST_IN_TURN = 4
#: Bytes that a step may keep and its loop still be called alike: a few numbers for a log.
NUMBERS_BYTES = 1024
#: Iterations and events that are written at most, where the allocator does not come to rest before.
MOST_REPEATED, MOST_EVENTS = 40, 100_000
#: Storages up to this size have segments of their own (``kSmallSize`` of PyTorch's caching allocator).
SMALL_BYTES = 1 << 20
_SIGNS = {int(EventKind.ALLOC): 1, int(EventKind.FREE): -1}


def peak(builder: Any, row: int) -> int:
    """The most bytes on the device since a row of the trace, over those that were there."""
    held = most = 0
    for kind, subject, _, _ in builder.rows[row:]:
        if kind in _SIGNS and builder.places[subject] is Place.DEVICE:
            held += _SIGNS[kind] * builder.storage_bytes[subject]
            most = max(most, held)
    return most


def body(builder: Any, row: int, until: int | None = None) -> tuple[list[Any], int, int]:
    """One iteration of a loop, to be compared with the next one: a loop whose iterations are equal is left.

    The events on the device from a row of the trace on, storages by their number among those that the iteration made,
    and older ones given by their bytes; the bytes that were kept there, and those kept on the host.
    """
    events: list[Any] = []
    kept = on_host = 0
    sizes, places, streams, numbers = builder.storage_bytes, builder.places, builder.streams, dict[int, int]()
    for kind, subject, _, stream in builder.rows[row:until]:
        if kind > EventKind.RECORD_STREAM:
            events.append((kind, stream))
            continue
        if places[subject] is not Place.DEVICE:
            on_host += _SIGNS.get(kind, 0) * sizes[subject] if places[subject] is Place.HOST else 0
            continue
        kept += _SIGNS.get(kind, 0) * sizes[subject]
        if kind == EventKind.ALLOC:
            numbers[subject] = len(numbers)
            events.append((kind, sizes[subject], streams[subject]))
        else:
            name = numbers.get(subject, -sizes[subject] - 1)
            events.append((kind, name) if kind == EventKind.FREE else (kind, name, stream))
    return events, kept, on_host


def works_outside(builder: Any, row: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether since a row of the trace something was made on the device outside of spans of rows."""
    begin = row
    for first, end in (*spans, (len(builder.rows), 0)):
        for kind, subject, _, _ in builder.rows[begin:first]:
            is_made = kind == EventKind.ALLOC and builder.places[subject] is Place.DEVICE
            if is_made and builder.storage_bytes[subject] > NUMBERS_BYTES:
                return True
        begin = max(begin, end)
    return False


def repeat(storages: Storages, marks: Sequence[int], times: int) -> tuple[list[int], int]:
    """Write the last iterations between ``marks``, which are rows, up to ``times`` more, as they would follow now, if
    they are like those before them: the last one, or a few that take turns (``if step % 2 == 0``). Of more than
    :data:`MOST_REPEATED` that keep small storages, those between are written as what they keep. The marks of the last
    ones that are there then, and how many were written. Raises ``torch.OutOfMemoryError`` where the card would."""
    builder, marks, written = storages.builder, list(marks), 0
    turn = in_turn(builder, marks) if times > 0 else 0
    if not turn:
        return marks, written
    memory, now, seen = storages.memory, storages.operator, list[object]()
    before, begin, end = marks[-1 - 2 * turn :: turn]
    iteration = _Iteration(storages, before, begin, end)
    lengths = [len([*_on_device(builder, begin, mark)]) for mark in marks[-turn:]]
    turns, done = -(-times // turn), 0
    ends = whole = min(turns, MOST_REPEATED, max(1, MOST_EVENTS // (end - begin + 1)))
    while done < ends:
        state = None if memory is None else memory.segments()
        if state in seen:  # from here on it goes round: what is left of the last round decides where it ends
            ends, seen = done + (turns - done) % (len(seen) - seen.index(state)), []
            continue
        seen.append(state)
        done += 1
        if done == whole:
            written += turn * iteration.write_kept(turns - whole)
        marks = [*marks[turn:], *(len(builder.rows) + length for length in lengths)]
        iteration.write()
        written += turn
    iteration.give_to_tensors()
    storages.operator = now
    return marks, written


def in_turn(builder: Any, marks: Sequence[int]) -> int:
    """How many iterations take turns: the fewest that are like as many before them; 0 if none are."""
    marks = list(marks)
    turns = range(1, (len(marks) - 1) // 2 + 1)
    return next((turn for turn in turns if _is_steady(builder, *marks[-1 - 2 * turn :: turn])), 0)


def _is_steady(builder: Any, before: int, begin: int, end: int) -> bool:
    """Whether two iterations in a row, between these rows, are alike, and what they gave back was their own."""
    if body(builder, before, begin)[0] != body(builder, begin, end)[0]:
        return False
    known = {*_made(builder, before, begin), *_made(builder, begin, end)}
    gone = {subject for kind, subject, _, _ in builder.rows[end:] if kind == EventKind.FREE}
    return gone.isdisjoint(known) and all(
        subject in known if kind <= EventKind.RECORD_STREAM else kind <= EventKind.EMPTY_CACHE
        for kind, subject, _, _ in _on_device(builder, begin, end)
    )


def _on_device(builder: Any, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The rows about the device between two."""
    for row in builder.rows[begin:end]:
        if row[0] > EventKind.RECORD_STREAM or builder.places[row[1]] is Place.DEVICE:
            yield row


def _made(builder: Any, begin: int, end: int) -> list[int]:
    """The storages on the device that an iteration made."""
    return [subject for kind, subject, _, _ in _on_device(builder, begin, end) if kind == EventKind.ALLOC]


class _Iteration:
    """An iteration that is written again. Storages are known by their number among those that it made."""

    def __init__(self, storages: Storages, before: int, begin: int, end: int) -> None:
        builder = storages.builder
        self._storages, self._rows = storages, list(_on_device(builder, begin, end))
        self._own = {subject: number for number, subject in enumerate(_made(builder, begin, end))}
        self._older = {subject: number for number, subject in enumerate(_made(builder, before, begin))}
        self._last = list(self._own)
        freed = [subject for kind, subject, _, _ in self._rows if kind == EventKind.FREE]
        gone = {self._own.get(subject, self._older.get(subject, 0)) for subject in freed}
        self._gathered: dict[int, list[int]] = {number: [] for number in set(range(len(self._own))) - gone}

    def write(self) -> None:
        storages, made = self._storages, list[int]()
        for kind, subject, storages.operator, stream in self._rows:
            if kind == EventKind.ALLOC:
                made.append(storages.alloc_again(subject))
                continue
            index = subject
            if kind <= EventKind.RECORD_STREAM:
                index = made[self._own[subject]] if subject in self._own else self._last[self._older[subject]]
            storages.builder.event(EventKind(kind), storages.operator, index, stream)
        for number, others in self._gathered.items():
            others.append(self._last[number])
        self._last = made

    def write_kept(self, times: int) -> int:
        """Write of up to ``times`` iterations what they keep alone; how many were written: none where a storage is
        large, and shares its segments with what else an iteration makes."""
        kept = [row for row in self._rows if row[0] == EventKind.ALLOC and self._own[row[1]] in self._gathered]
        most = max((self._storages.builder.storage_bytes[subject] for _, subject, _, _ in kept), default=0)
        times = min(times, MOST_EVENTS // len(kept)) if 0 < most <= SMALL_BYTES else 0
        for _ in range(times):
            for _, subject, self._storages.operator, _ in kept:
                number = self._own[subject]
                self._gathered[number].append(self._last[number])
                self._last[number] = self._storages.alloc_again(subject)
        return times

    def give_to_tensors(self) -> None:
        """What the program holds of the iteration is what the last one made."""
        for ref in self._storages.live.values():
            number = self._own.get(ref.index)
            if number is not None:
                ref.index = self._last[number]
                if number in self._gathered:
                    self._storages.gathered[ref.index] = self._gathered[number]
