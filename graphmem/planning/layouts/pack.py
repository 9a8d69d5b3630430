"""Which jobs share which card, by what each needs there: the fewest cards, or the cheapest, by integer programming.

    jobs = [graphmem.Job("tagger", "hf:bert-base-uncased", count=4, settings={"batch": 16})]
    packing = graphmem.pack(jobs, ["2xA100-80GB", "4xT4"])

Every process that shares a card has a context of its own there, and nothing is shared between them (time slicing, MPS
without its common context); a MIG slice is a card by its own name. All figures are bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphmem.answering.runs import Progress, RunCache, labelled, silent
from graphmem.devices import Device
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.layouts.cluster import cluster_of
from graphmem.planning.request import Request
from graphmem.reports import Answer
from graphmem.reports.document import Column, Document, Items, Section, Table, Text, Value, section
from graphmem.units import GIB, format_bytes

#: Draws of what the jobs on a card need, from their intervals, each for itself.
_DRAWS = 2_000
#: What a job without a card costs, in cards: more than any number of them.
_LEFT_OUT = 1e4


@dataclass(frozen=True)
class Job:
    """``count`` equal processes. ``settings``: those that :meth:`Request.changed` takes, such as the batch.
    ``memory_bytes``: what one needs on any card, where no model says it."""

    name: str
    model: object = None
    count: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Need:
    """What one process of a job needs on a card: as predicted, and at most at the margin asked for. ``open``: names of
    causes that nothing bounds."""

    job: Job
    device_bytes: int
    most_bytes: int
    open: tuple[str, ...] = ()
    estimate: Estimate | None = field(default=None, repr=False)

    @property
    def host_bytes(self) -> int:
        """Bytes of its tensors in the host's memory, as far as a model says them."""
        return self.estimate.host_bytes + self.estimate.pinned_bytes if self.estimate is not None else 0


def _room(card: Device) -> int:
    """Bytes of a card that are not held by others."""
    return card.capacity_bytes - card.others_bytes


@dataclass(frozen=True)
class Shared:
    """A card and the processes on it. ``trouble``: the share of runs in which they need more than it has, as far as
    causes with bounds tell."""

    card: Device
    number: int
    needs: tuple[Need, ...]
    trouble: float

    @property
    def room_bytes(self) -> int:
        """What is left as predicted."""
        return _room(self.card) - sum(need.device_bytes for need in self.needs)


@dataclass(frozen=True)
class Packing(Answer):
    """The cards that are used, and the jobs that found no room, each with how many processes and why."""

    cards: tuple[Shared, ...]
    there: int
    left_out: tuple[tuple[Job, int, str], ...]

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem pack``."""
        return Document("pack", "Jobs on cards", list(self._sections()), self.to_dict)

    def _sections(self) -> Iterator[Section]:
        placed = sum(len(shared.needs) for shared in self.cards)
        missing = sum(count for _, count, _ in self.left_out)
        verdict = f"{placed} of {placed + missing} processes have a place, on {len(self.cards)} of {self.there} cards."
        yield section("", Text((verdict,), "no" if missing else "yes"))
        columns = (
            Column("card"), Column("processes", wraps=True), Column("need", "bytes"), Column("left", "bytes"),
            Column("at most", "bytes"), Column("trouble", "figure"),
        )  # fmt: skip
        rows: list[tuple[Value, ...]] = []
        for shared in self.cards:
            needs = sum(need.device_bytes for need in shared.needs)
            most = sum(need.most_bytes for need in shared.needs)
            name = f"{shared.card.name} #{shared.number}"
            rows.append((name, _listed(shared.needs), needs, shared.room_bytes, most, f"{100 * shared.trouble:.2g} %"))
        if rows:
            yield section("", Table(columns, rows))
        if self.left_out:
            yield section("No room", Items(tuple(f"{count} x {job.name}: {why}" for job, count, why in self.left_out)))
        open_there = sorted({cause for shared in self.cards for need in shared.needs for cause in need.open})
        if open_there:
            yield section("", Text((f"Nothing bounds: {', '.join(open_there)}; trouble is at least as said.",)))

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.pack/1``; memory in bytes)."""
        return {
            "schema": "graphmem.pack/1",
            "cards": [
                {
                    "gpu": shared.card.name,
                    "number": shared.number,
                    "jobs": [
                        {"name": need.job.name, "device_bytes": need.device_bytes, "most_bytes": need.most_bytes,
                         "host_bytes": need.host_bytes, "unbounded": list(need.open)}
                        for need in shared.needs
                    ],
                    "room_bytes": shared.room_bytes,
                    "trouble": shared.trouble,
                }
                for shared in self.cards
            ],
            "cards_there": self.there,
            "left_out": [{"name": job.name, "count": count, "reason": why} for job, count, why in self.left_out],
        }  # fmt: skip


def pack(
    jobs: Sequence[Job],
    gpus: Sequence[str],
    *,
    margin: float = 1.0,
    prices: Mapping[str, float] | None = None,
    say: Callable[[str], None] = silent,
) -> Packing:
    """Share jobs out among cards (``4xA100-80GB``): as few cards as will do, or the cheapest where ``prices`` (of a
    card by its name, in any unit) are given; as many processes as there is room for. A card is filled by what processes
    need in a share ``margin`` of runs (1: in all that is known to be possible). Raises :class:`GraphmemError`.
    """
    cards = [cluster.card for cluster in map(cluster_of, gpus) for _ in range(cluster.count)]
    _check(jobs, cards, margin)
    kinds = list(dict.fromkeys(card.name for card in cards))
    of_name = {card.name: card for card in cards}
    needs: dict[tuple[int, str], Need | str] = {}
    for number, job in enumerate(jobs):
        cache = RunCache()
        for kind in kinds:
            needs[number, kind] = _need(job, of_name[kind], margin, cache, labelled(say, f"{job.name} on {kind}"))
    placed = _placed(jobs, cards, needs, prices or {})
    return _packing(jobs, cards, needs, placed)


def _check(jobs: Sequence[Job], cards: Sequence[Device], margin: float) -> None:
    if not jobs:
        raise UsageError("there are no jobs")
    names = [job.name for job in jobs]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(f"two jobs are called {double!r}")
    for job in jobs:
        if (job.model is None) == (job.memory_bytes is None):
            raise UsageError(f"job {job.name!r}: give a model, or the memory that it needs")
        if type(job.count) is not int or not 1 <= job.count <= 10_000:
            raise UsageError(f"job {job.name!r}: count is a whole number from 1 to 10,000, not {job.count!r}")
    if not 0 < margin <= 1:
        raise UsageError(f"margin is a share above 0 and up to 1, not {margin!r}")
    if len(cards) > 1_000:
        raise UsageError(f"{len(cards):,} cards: up to 1,000 are packed at a time")


def _need(job: Job, card: Device, margin: float, cache: RunCache, say: Progress) -> Need | str:
    """What one process needs on a card, or why it does not run there."""
    room = _room(card)
    if job.memory_bytes is not None:
        found = Need(job, job.memory_bytes, job.memory_bytes)
    else:
        try:
            estimate = Request(job.model).changed(**job.settings, device=card).run(cache, say)
        except GraphmemError as error:
            return str(error)
        doubts = estimate.doubts
        open_there = tuple(cause.name for cause in doubts.causes if cause.spread("device").above)
        most = estimate.device + max(0, doubts.at("device", margin))
        found = Need(job, estimate.device, most, open_there, estimate)
    if found.most_bytes > room:
        return f"it needs up to {format_bytes(found.most_bytes)}, and {card.name} has {format_bytes(room)}"
    return found


def _placed(
    jobs: Sequence[Job],
    cards: Sequence[Device],
    needs: Mapping[tuple[int, str], Need | str],
    prices: Mapping[str, float],
) -> list[list[int]]:
    """How many processes of each job are on each card. Minimises the cost of cards used, after that of processes left
    out. Raises :class:`GraphmemError` where the solver is missing or finds nothing in its time."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_matrix
    except ImportError:
        raise UsageError("packing needs scipy; pip install 'graphmem[pack]'") from None
    many, count = len(jobs), len(cards)
    used, size = many * count, many * count + count
    largest = max(card.capacity_bytes for card in cards)
    weights = np.zeros(size)
    weights[:used] = -_LEFT_OUT
    rows = lil_matrix((count + many + count, size))
    top, least = np.zeros(count + many + count), np.full(count + many + count, -np.inf)
    most = np.ones(size)
    for at, card in enumerate(cards):
        weights[used + at] = prices.get(card.name, 1 + card.capacity_bytes / largest / count / 10)
        rows[at, used + at] = -_room(card) / GIB
        for number, job in enumerate(jobs):
            need = needs[number, card.name]
            most[number * count + at] = 0 if isinstance(need, str) else job.count
            rows[at, number * count + at] = 0 if isinstance(need, str) else need.most_bytes / GIB
            rows[count + number, number * count + at] = 1
        if at and cards[at - 1].name == card.name:  # of equal cards the first are used first
            rows[count + many + at, used + at], rows[count + many + at, used + at - 1] = 1, -1
    top[count : count + many] = [job.count for job in jobs]
    found = milp(
        weights, integrality=np.ones(size), bounds=Bounds(np.zeros(size), most),
        constraints=LinearConstraint(rows.tocsr(), least, top), options={"time_limit": 60, "mip_rel_gap": 1e-6},
    )  # fmt: skip
    if found.x is None:
        raise GraphmemError(f"no packing was found: {found.message}")
    return np.rint(found.x[:used]).astype(int).reshape(many, count).tolist()  # type: ignore[no-any-return]


def _packing(
    jobs: Sequence[Job], cards: Sequence[Device], needs: Mapping[tuple[int, str], Need | str], placed: list[list[int]]
) -> Packing:
    shared, numbers = [], dict[str, int]()
    for at, card in enumerate(cards):
        numbers[card.name] = numbers.get(card.name, 0) + 1
        on_it = [needs[number, card.name] for number in range(len(jobs)) for _ in range(placed[number][at])]
        there = tuple(need for need in on_it if isinstance(need, Need))
        if there:
            shared.append(Shared(card, numbers[card.name], there, _trouble(card, there)))
    left = [(job, job.count - sum(placed[number])) for number, job in enumerate(jobs)]
    return Packing(
        tuple(shared),
        len(cards),
        tuple((job, count, _why(number, cards, needs)) for number, (job, count) in enumerate(left) if count),
    )


def _why(number: int, cards: Sequence[Device], needs: Mapping[tuple[int, str], Need | str]) -> str:
    """Why processes of a job have no card: it runs on none, or the room is taken."""
    said = [needs[number, card.name] for card in cards]
    reasons = list(dict.fromkeys(one for one in said if isinstance(one, str)))
    return (
        "; ".join(reasons) if len([one for one in said if isinstance(one, str)]) == len(said) else "the cards are full"
    )


def _trouble(card: Device, needs: Sequence[Need]) -> float:
    """The share of draws in which the processes on a card need more than it has."""
    room = _room(card)
    sure = sum(need.device_bytes for need in needs)
    doubts = [need.estimate.doubts for need in needs if need.estimate is not None]
    if sure + sum(one.at("device", 1.0) for one in doubts) <= room:
        return 0.0
    draw = random.Random(0)
    over = sum(sure + sum(one.at("device", draw.random()) for one in doubts) > room for _ in range(_DRAWS))
    return over / _DRAWS


def _listed(needs: Sequence[Need]) -> str:
    counts: dict[str, int] = {}
    for need in needs:
        counts[need.job.name] = counts.get(need.job.name, 0) + 1
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
