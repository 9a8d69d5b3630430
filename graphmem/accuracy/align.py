"""Line two sequences of integers up, in order, in time that grows with their length.

A walk: equal elements match; where they differ, the nearest point at which both go on alike for a few is looked
up (n-gram index of one side), and the stretch between is matched exactly if it is small. On the long, repetitive
sequences of training runs this finds what a full longest-common-subsequence finds, in a fraction of its time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

#: Elements that must agree in a row for two places to count as the same place.
_GRAM = 4
#: How far ahead the same place is looked for, on either side.
_WINDOW = 4000
#: Largest stretch (product of both lengths) that is matched exactly.
_EXACT = 250_000


@dataclass(frozen=True)
class Match:
    """Which elements correspond: ``(start in a, start in b, length)`` of every run of equal elements, in order."""

    length_a: int
    length_b: int
    blocks: tuple[tuple[int, int, int], ...]

    @property
    def share(self) -> float:
        """Matched elements, as a share of both sequences; 1 when they are equal."""
        total = self.length_a + self.length_b
        return 1.0 if total == 0 else 2 * sum(length for _, _, length in self.blocks) / total

    def differences(self) -> list[tuple[int, int, int, int]]:
        """``(start in a, end in a, start in b, end in b)`` of what lies between the matched runs."""
        found = []
        at_a = at_b = 0
        for start_a, start_b, length in (*self.blocks, (self.length_a, self.length_b, 0)):
            if start_a > at_a or start_b > at_b:
                found.append((at_a, start_a, at_b, start_b))
            at_a, at_b = start_a + length, start_b + length
        return found


def align(a: Sequence[int], b: Sequence[int]) -> Match:
    """Match ``a`` with ``b``."""
    pairs: list[tuple[int, int]] = []
    places = _gram_places(b)
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        next_i, next_j = _resume(a, b, i, j, places)
        pairs.extend(_exact(a, b, i, next_i, j, next_j))
        i, j = next_i, next_j
    return Match(len(a), len(b), tuple(_blocks(pairs)))


def _gram_places(values: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for start in range(len(values) - _GRAM + 1):
        places[tuple(values[start : start + _GRAM])].append(start)
    return places


def _resume(
    a: Sequence[int], b: Sequence[int], i: int, j: int, places: dict[tuple[int, ...], list[int]]
) -> tuple[int, int]:
    """The nearest point at or after (i, j) where both go on alike; the ends if there is none."""
    best, found = 2 * _WINDOW, (len(a), len(b))
    for ahead in range(min(_WINDOW, len(a) - i - _GRAM + 1)):
        if ahead >= best:
            break
        starts = places.get(tuple(a[i + ahead : i + ahead + _GRAM]), ())
        first = bisect_left(starts, j)
        if first < len(starts) and ahead + starts[first] - j < best:
            best, found = ahead + starts[first] - j, (i + ahead, starts[first])
    return found


def _exact(a: Sequence[int], b: Sequence[int], i: int, end_i: int, j: int, end_j: int) -> list[tuple[int, int]]:
    """A longest common subsequence of ``a[i:end_i]`` and ``b[j:end_j]``; nothing if they are too long for that."""
    if (end_i - i) * (end_j - j) > _EXACT:
        return []
    lengths = [[0] * (end_j - j + 1) for _ in range(end_i - i + 1)]
    for x in range(end_i - 1, i - 1, -1):
        row, below = lengths[x - i], lengths[x - i + 1]
        for y in range(end_j - 1, j - 1, -1):
            row[y - j] = below[y - j + 1] + 1 if a[x] == b[y] else max(below[y - j], row[y - j + 1])
    pairs = []
    x, y = i, j
    while x < end_i and y < end_j:
        if a[x] == b[y]:
            pairs.append((x, y))
            x, y = x + 1, y + 1
        elif lengths[x - i + 1][y - j] >= lengths[x - i][y - j + 1]:
            x += 1
        else:
            y += 1
    return pairs


def _blocks(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    blocks: list[tuple[int, int, int]] = []
    for i, j in pairs:
        if blocks and (blocks[-1][0] + blocks[-1][2], blocks[-1][1] + blocks[-1][2]) == (i, j):
            start_i, start_j, length = blocks.pop()
            blocks.append((start_i, start_j, length + 1))
        else:
            blocks.append((i, j, 1))
    return blocks
