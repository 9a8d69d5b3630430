"""Figures that are not known exactly: their causes, how far they may be off, and how doubts add up.

A :class:`Cause` is one reason why a figure may be another, with how far off each level may be because of it: from the
least to the most, and, between, at which share of the observed or assumed cases. :class:`Doubts` are the causes of one
estimate; they alone add causes up. They are taken to go together: where one is at its 99 %, all are. Then shares add,
``most`` of the sum is the sum of every ``most``, and no independence is claimed that nobody measured; causes that are
independent give a narrower interval than the one given here.

The values between the least and the most follow from the cause's ``basis``:

- ``bounds``: nobody counted how often. As likely below the figure as above, and evenly spread on either side, which
  claims nothing beyond the three figures.
- ``measured``: errors seen in recordings, in order: the i-th of n stands at i / (n + 1), its expected share (Weibull's
  plotting position), straight lines between. The ends are the extremes seen: of runs like these, (n - 1) / (n + 1) are
  expected inside.
- ``unknown``: an end that nothing bounds is None. It has no probability either.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from graphmem.base.records import dataclass
from graphmem.errors import UsageError


@dataclass(frozen=True, slots=True)
class Figure:
    """Bytes that are not known exactly, with the least and the most that their source allows."""

    name: str
    bytes: int
    least_bytes: int
    most_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Communicator:
    """One of NCCL's communicators, of ``ranks`` processes; with ``peers`` of them this one exchanges messages (sends,
    receives, all-to-all), with ``far_peers`` of those across machines, None where not known. ``on_node``: its ranks on
    this process's machine, of which this is number ``place``; None: not known. ``gathers``: whether collectives went
    through it that are no all-reduces; ``reduced_bytes``: the largest all-reduce, 0 for none, None where not known.
    """

    ranks: int
    peers: int = 0
    far_peers: int | None = None
    on_node: int | None = None
    place: int = 0
    gathers: bool = True
    reduced_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Loads:
    """The libraries that a run makes a process load. ``communicators``: NCCL's; ``cuda``, ``nccl_version``: the
    versions of CUDA and of NCCL, None for those of today; ``nccl_variables``: names and texts of NCCL's environment."""

    cudnn: bool = False
    communicators: tuple[Communicator, ...] = ()
    eager: bool = False
    cuda: tuple[int, int] | None = None
    nccl_version: tuple[int, int] | None = None
    nccl_variables: tuple[tuple[str, str], ...] = ()


# --- how far one figure may be off ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread:
    """The error of a figure in bytes: ``points`` are (share, bytes more than the figure), ascending in both, from 0 to
    1, and include 0 bytes. ``below``, ``above``: whether nothing bounds it there."""

    points: tuple[tuple[float, int], ...] = ((0.0, 0), (1.0, 0))
    below: bool = False
    above: bool = False

    @property
    def least(self) -> int | None:
        """Bytes (0 or less) by which it may be less; None where nothing bounds them."""
        return None if self.below else self.points[0][1]

    @property
    def most(self) -> int | None:
        """Bytes by which it may be more; None where nothing bounds them."""
        return None if self.above else self.points[-1][1]

    @property
    def open_end(self) -> str:
        """In words, where nothing bounds it; "" where both ends are known."""
        if self.below and self.above:
            return "without bound: nothing says how much less or more"
        return "without upper bound" if self.above else "without lower bound" if self.below else ""

    def at(self, share: float) -> int:
        """Bytes that it is off at most in this share of runs, as far as bounds or measurements tell."""
        index = bisect_left(self.points, share, key=lambda point: point[0])
        if index == 0 or self.points[index][0] == share:
            return self.points[index][1]
        (low, fewer), (high, more) = self.points[index - 1 : index + 1]
        return fewer + int((more - fewer) * ((share - low) / (high - low)))


#: Of what is known.
EXACT = Spread()


def bounded(least: int, most: int) -> Spread:
    """Between ``least`` (at most 0) and ``most`` (at least 0) bytes more than the figure, with no likelier values."""
    return EXACT if least == most == 0 else Spread(((0.0, min(least, 0)), (0.5, 0), (1.0, max(most, 0))))


def seen(offsets: Iterable[int]) -> Spread:
    """As far off as runs were seen to be."""
    ordered = sorted(offsets)
    if not ordered or ordered[0] == ordered[-1] == 0:
        return EXACT
    count = len(ordered)
    inner = [(rank / (count + 1), offset) for rank, offset in enumerate(ordered, start=1)]
    return Spread(((0.0, min(ordered[0], 0)), *inner, (1.0, max(ordered[-1], 0))))


def down_to(spread: Spread, least: int) -> Spread:
    """The spread with this end, if it is further below."""
    (share, before), *others = spread.points
    return replace(spread, points=((share, min(before, least)), *others))


# --- causes -----------------------------------------------------------------------------------------------------------

BOUNDS, MEASURED, UNKNOWN = "bounds", "measured", "unknown"
#: How many times the reserved peak the causes that nothing bounds are taken to make it at the most (docs/modeling/
#: certainty.md, "The verdict").
MOST_TIMES = 50
#: The levels of an estimate that an error in the allocator's trace reaches; device memory is all of these and more.
TRACE_LEVELS = ("requested", "allocated", "reserved", "device")


@dataclass(frozen=True)
class Record:
    """How far the peaks of recorded programs with a cause were from their predictions: of each the part more (0.02: 2 %
    more than predicted) of the level that differed the most."""

    changes: tuple[float, ...]

    @cached_property
    def moved(self) -> tuple[float, ...]:
        """The changes of the programs whose peak moved."""
        return tuple(change for change in self.changes if change)

    def chance(self, part: float) -> float:
        """The expected share of programs that need at least this part more (negative: less), by the rule of succession
        (Laplace), which never is nought."""
        beyond = sum(change >= part if part > 0 else change <= part for change in self.changes)
        return (beyond + 1) / (len(self.changes) + 2)

    def __str__(self) -> str:
        found = f"of {len(self.changes)} recorded programs with this cause the peak moved in {len(self.moved)}"
        ends = dict.fromkeys(f"{100 * end:+.1f} %" for end in (min(self.moved, default=0), max(self.moved, default=0)))
        return f"{found}, by {' to '.join(ends)}" if self.moved else found


@dataclass(frozen=True)
class Cause:
    """Why figures may be others. ``spreads``: level -> how far off it may be; a level that is not there is not touched.
    ``inside``: the share of runs that is expected between the ends, None where nobody counted; ``count``: of how many
    it was measured. ``times``: of a cause that nothing bounds above, how many times the reserved peak is taken to be
    enough for it all the same, None where no room is; ``record``: of a cause that nothing bounds, what recorded
    programs showed, None for none. ``remedy``: what removes the doubt, in words, "" for nothing."""

    name: str
    basis: str
    source: str
    spreads: Mapping[str, Spread]
    inside: float | None = None
    count: int = 0
    times: int | None = None
    record: Record | None = None
    remedy: str = ""

    def spread(self, level: str) -> Spread:
        """The error that the level may have."""
        return self.spreads.get(level, EXACT)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the figures of a level are bytes above the estimate, None where nothing bounds them."""
        levels = {
            level: {"least_bytes": spread.least, "most_bytes": spread.most} for level, spread in self.spreads.items()
        }
        ends = [spread.open_end for spread in self.spreads.values()]
        return {
            "name": self.name,
            "basis": self.basis,
            "bound": next(filter(None, ends), "both ends are known"),
            "source": self.source,
            "expected_inside": self.inside,
            "measured_runs": self.count,
            "recorded": None
            if self.record is None
            else {"programs": len(self.record.changes), "moved": self.record.moved},
            "remedy": self.remedy,
            "off_by": levels,
        }


def cause_of(figure: Figure) -> Cause | None:
    """The cause that a figure of the context is; None for one that is known."""
    spread = bounded(figure.least_bytes - figure.bytes, figure.most_bytes - figure.bytes)
    if spread == EXACT:
        return None
    return Cause(figure.name, BOUNDS, figure.source, {"device": spread}, remedy="graphmem calibrate measures it")


def unknown(name: str, source: str, *, below: bool = False) -> Cause:
    """A cause that nothing bounds above, nor, with ``below``, below."""
    spread = Spread(below=below, above=True)
    return Cause(name, UNKNOWN, source, dict.fromkeys(TRACE_LEVELS, spread))


# --- together ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubts:
    """The causes of one estimate, added up. Figures of levels are bytes above the estimate."""

    causes: tuple[Cause, ...] = ()

    def least(self, level: str) -> int | None:
        """The sum of every least; None where one has none."""
        return _sum([cause.spread(level).least for cause in self.causes])

    def most(self, level: str) -> int | None:
        """The sum of every most; None where one has none."""
        return _sum([cause.spread(level).most for cause in self.causes])

    def at(self, level: str, share: float) -> int:
        """Bytes that it is off at most in this share of runs, without unbounded causes."""
        return sum(cause.spread(level).at(share) for cause in self.causes)

    @property
    def times(self) -> int | None:
        """The multiple of the reserved peak that is room enough for an unbounded cause; None where no room is."""
        found = [cause.times for cause in self.causes if cause.spread("device").above]
        known = [times for times in found if times is not None]
        return max(known, default=1) if len(known) == len(found) else None

    def chance(self, part: float) -> float | None:
        """The chance that an unbounded cause makes device memory this part more, or less, than predicted, as they are
        taken to go together; None where one has no record."""
        open_there = [cause for cause in self.causes if _is_open(cause.spread("device"), part)]
        chances = [None if cause.record is None else cause.record.chance(part) for cause in open_there]
        known = [chance for chance in chances if chance is not None]
        return max(known, default=0.0) if len(known) == len(chances) else None

    @property
    def largest(self) -> Cause | None:
        """The cause that may move device memory the furthest; None without one."""
        return max(self.about("device"), key=_width, default=None)

    def about(self, level: str) -> Sequence[Cause]:
        """The causes that touch a level."""
        return [cause for cause in self.causes if cause.spread(level) != EXACT]


#: Of an estimate that is exact.
NO_DOUBTS = Doubts()


def _is_open(spread: Spread, part: float) -> bool:
    return spread.above if part > 0 else spread.below


def _width(cause: Cause) -> tuple[bool, bool, float, int]:
    """How far a cause may move device memory: without bound above, without bound, by its record, by its ends."""
    spread, record = cause.spread("device"), cause.record
    moved = float("inf") if record is None else max(map(abs, record.moved), default=0)
    return spread.above, spread.below, moved, spread.points[-1][1] - spread.points[0][1]


def _sum(parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# --- margins ----------------------------------------------------------------------------------------------------------

_MARGIN = re.compile(r"[pP](\d{2,3}(?:\.\d{1,4})?)")


def parse_margin(text: str) -> float:
    """The share that ``p99`` asks for: 0.99. Raises :class:`UsageError` for anything but p50 to p100."""
    match = _MARGIN.fullmatch(text) if isinstance(text, str) else None
    share = float(match[1]) / 100 if match else 0.0
    if not 0.5 <= share <= 1.0:
        raise UsageError(
            f"margin {text!r} cannot be read; write p and how many of a hundred runs are to fit, p50 to p100, as p99"
        )
    return share
