"""How often measured bytes lay inside the interval of their prediction, by the cause of the doubt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graphmem.base.figures import Doubts
from graphmem.estimate import Estimate

#: A prediction is under-estimated where more than this share of the measured value is missing.
NOTABLE = 0.01
ALL, NO_DOUBT = "all", "no doubt was told"


@dataclass(frozen=True)
class Interval:
    """The interval of one level of a predicted run: bytes from ``least`` to ``most`` (None: not bounded), and the names
    of the causes that make it so wide."""

    least: int | None
    most: int | None
    causes: tuple[str, ...]

    def contains(self, measured: int) -> bool:
        """Whether these bytes lie inside."""
        return (self.least is None or self.least <= measured) and (self.most is None or measured <= self.most)

    @property
    def is_bounded(self) -> bool:
        """Whether both ends are known."""
        return self.least is not None and self.most is not None


@dataclass(frozen=True)
class Judged:
    """One measured run beside its prediction."""

    interval: Interval
    measured: int
    predicted: int

    @property
    def is_under_estimated(self) -> bool:
        """By more than :data:`NOTABLE`."""
        return self.predicted < (1 - NOTABLE) * self.measured


@dataclass(frozen=True)
class Coverage:
    """Runs that share a cause. ``bounded``: of how many the interval has both ends; ``inside``: how many of these lay
    in it; ``under_estimated``: the share of all that needed over 1 % more than predicted."""

    cause: str
    count: int
    bounded: int
    inside: int
    under_estimated: float


def intervals(estimate: Estimate) -> dict[str, Interval]:
    """The interval of every level of an estimate."""
    return {
        level: around(estimate.doubts, level, int(getattr(estimate.peak, f"{level}_bytes")))
        for level in ("requested", "allocated", "reserved", "device")
    }


def around(doubts: Doubts, level: str, predicted: int) -> Interval:
    """The interval that doubts put around the predicted bytes of a level."""
    least, most = doubts.least(level), doubts.most(level)
    names = tuple(cause.name for cause in doubts.about(level))
    return Interval(None if least is None else predicted + least, None if most is None else predicted + most, names)


def coverage(judged: Sequence[Judged]) -> tuple[Coverage, ...]:
    """Of all runs, of those without a doubt, and of those with each cause, which may have others besides."""
    groups = {ALL: list(judged), NO_DOUBT: [one for one in judged if not one.interval.causes]}
    for one in judged:
        for cause in one.interval.causes:
            groups.setdefault(cause, []).append(one)
    return tuple(_covered(name, group) for name, group in groups.items() if group)


def _covered(name: str, judged: Iterable[Judged]) -> Coverage:
    runs = list(judged)
    bounded = [one for one in runs if one.interval.is_bounded]
    inside = sum(one.interval.contains(one.measured) for one in bounded)
    under = sum(one.is_under_estimated for one in runs) / len(runs)
    return Coverage(name, len(runs), len(bounded), inside, under)
