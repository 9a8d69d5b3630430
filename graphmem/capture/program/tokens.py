"""One token of a long generation as plain values: its events, births and sizes, and how sizes grow."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from graphmem.trace import Category, EventKind, Operator, Place, TraceBuilder

#: Tokens in a row that have to be alike.
ALIKE_TOKENS = 4
#: A variable may hold what the token before the last one made, until it is assigned anew.
FURTHEST = 2


@dataclass(frozen=True)
class Birth:
    category: Category
    stream: int
    place: Place
    label: str
    pool: int


@dataclass
class Token:
    """The memory of one token. ``events``: (kind, how many tokens ago, number of the storage among those of that token,
    stream, position in ``operators``)."""

    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    births: list[Birth] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # events before which a forward pass began
    renamed: list[tuple[int, Birth]] = field(
        default_factory=list
    )  # new categories and labels of storages of the token before it

    def is_like(self, other: Token) -> bool:
        return (
            self.events == other.events
            and self.births == other.births
            and self.operators == other.operators
            and self.renamed == other.renamed
        )

    @property
    def is_bounded(self) -> bool:
        """Whether it frees nothing that is older than the last tokens before it, and no pool is in it."""
        lags = (lag for kind, lag, _, _, _ in self.events if kind == EventKind.FREE)
        return all(0 <= lag <= FURTHEST for lag in lags) and not any(birth.pool for birth in self.births)

    @property
    def reach(self) -> int:
        """How many tokens ago that was made which it frees; at least one."""
        return max((lag for kind, lag, _, _, _ in self.events if kind == EventKind.FREE), default=1) or 1


def grown(first: Token, second: Token) -> list[int]:
    """By how many bytes every storage of the second is larger."""
    return [b - a for a, b in zip(first.sizes, second.sizes, strict=True)]


@dataclass(frozen=True)
class Steady:
    """How tokens grow: each storage by ``growth`` bytes from the token of length ``length`` - 1 to that of ``length``,
    and by ``bend`` bytes more with every token after it. Matrices of scores, of as many rows as columns, bend."""

    token: Token
    length: int
    growth: list[int]
    bend: list[int]

    def expected(self, low: int, high: int) -> list[int]:
        """The growth between two lengths."""
        away = low + high + 1 - 2 * self.length  # twice the mean of the lengths' distances
        steps = high - low
        return [steps * g + steps * away * b // 2 for g, b in zip(self.growth, self.bend, strict=True)]


def steady(tokens: list[Token], length: int) -> Steady | None:
    """How the last tokens grow, of which the very last makes ``length``; None where they are not alike."""
    last = tokens[-ALIKE_TOKENS:]
    if len(tokens) <= ALIKE_TOKENS or not all(token.is_like(last[0]) for token in last) or not last[0].is_bounded:
        return None
    steps = [grown(a, b) for a, b in pairwise(last)]
    bends = [[y - x for x, y in zip(a, b, strict=True)] for a, b in pairwise(steps)]
    return Steady(last[-1], length, steps[-1], bends[-1]) if all(bend == bends[0] for bend in bends) else None


def between(first: Token, second: Token, whole: int, part: int, bend: list[int]) -> list[int]:
    """The sizes ``part`` tokens after the first, of the ``whole`` that lie between two tokens."""
    return [
        size + growth * part // whole - bent * part * (whole - part) // 2
        for size, growth, bent in zip(first.sizes, grown(first, second), bend, strict=True)
    ]


def birth_of(builder: TraceBuilder, index: int) -> Birth:
    return Birth(
        builder.categories[index],
        builder.streams[index],
        builder.places[index],
        builder.labels[index],
        builder.storage_pools[index],
    )
