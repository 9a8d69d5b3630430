"""Several processes of one job: which of them differ, and which holds the most.

Every figure is an analysis of that process. Process groups show which processes are worth one: along each of them
(tensor, pipeline, data parallelism) those at the ends are analysed first, and where their traces are the same, event by
event, those between are taken to be so too; where they are not, the middle decides. Differences along one group may
depend on those along another, so the combinations are analysed as well.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from graphmem.answering.question import Question
from graphmem.answering.runs import Progress, RunCache, labelled, silent
from graphmem.answering.stages import estimate_of
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.trace import Trace
from graphmem.training import Training
from graphmem.training.processes import Processes
from graphmem.units import format_bytes

#: Processes that are analysed at most: more that differ are told of, not analysed.
MOST_ANALYSED = 32


def fullest(question: Question, ranks: str | Sequence[int], say: Progress = silent) -> Estimate:
    """The estimate of the process that holds the most of the card; ``details["ranks"]`` has the others' figures.

    ``ranks``: which are analysed, or ``all`` that differ. Raises :class:`GraphmemError`.
    """
    step = question.step
    if not isinstance(step, Training) or step.processes is None:
        raise UsageError("ranks are of several processes: give their number (--world-size, or --nproc-per-node of run)")
    job = _Job(question, step, step.processes, say)
    if isinstance(ranks, str):
        if ranks != "all":
            raise UsageError(f"ranks are all or numbers, not {ranks!r}")
        job.analyse_all()
    else:
        for rank in sorted(set(ranks)):
            job.analyse(rank)
    return job.report()


@dataclass
class _Job:
    question: Question
    step: Training
    processes: Processes
    say: Progress
    done: dict[int, _Analysed] = field(default_factory=dict)
    is_cut: bool = False

    def analyse(self, rank: int) -> _Analysed:
        """The process of this rank, which is analysed once."""
        if rank not in self.done:
            one = replace(self.question, training=replace(self.step, rank=rank))
            cache = RunCache()
            try:
                estimate = estimate_of(one, cache, labelled(self.say, f"rank {rank}"))
            except GraphmemError as error:
                raise type(error)(f"rank {rank}: {error}") from error
            assert cache.last is not None
            self.done[rank] = _Analysed(estimate, _digest(cache.last.trace), cache.last.groups)
        return self.done[rank]

    def analyse_all(self) -> None:
        """Every process that differs from the others."""
        groups = self.analyse(0).groups
        differing = [self._differing(axis) for axis in _axes(groups, self.processes.world_size)]
        for ranks in itertools.product(*differing):
            rank = sum(ranks)
            if len(self.done) >= MOST_ANALYSED and rank not in self.done:
                self.is_cut = True
                return
            self.analyse(rank)

    def _differing(self, axis: Sequence[int]) -> list[int]:
        """Of the processes of a group, which begins with the first of all, one of every kind."""
        self._between(axis, 0, len(axis) - 1)
        kinds = {self.done[rank].digest: rank for rank in reversed(axis) if rank in self.done}
        return sorted(kinds.values())

    def _between(self, axis: Sequence[int], first: int, last: int) -> None:
        if len(self.done) >= MOST_ANALYSED:
            self.is_cut = True
            return
        one, other = self.analyse(axis[first]), self.analyse(axis[last])
        if one.digest == other.digest or last - first < 2:
            return
        middle = (first + last) // 2
        self._between(axis, first, middle)
        self._between(axis, middle, last)

    def report(self) -> Estimate:
        """The estimate of the fullest, with the others beside it."""
        most = max(sorted(self.done), key=lambda rank: tuple(reversed(_figures(self.done[rank].estimate).values())))
        estimate = self.done[most].estimate
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(self.done):
            kinds.setdefault(tuple(_figures(self.done[rank].estimate).values()), []).append(rank)
        rows = [{"ranks": ranks, **_figures(self.done[ranks[0]].estimate)} for ranks in kinds.values()]
        job = {
            "world_size": self.processes.world_size,
            "nproc_per_node": self.processes.on_node,
            "fullest": most,
            "analysed": sorted(self.done),
            "complete": not self.is_cut,
            "kinds": rows,
        }
        failed = self._failed()
        program = {"program": self.done[failed[0]].estimate.details["program"]} if failed else {}
        remarks = self._headlines(most, failed)
        estimate = estimate.with_details(ranks=job, **program)
        return replace(estimate, diagnostics=(*remarks, *estimate.diagnostics))

    def _failed(self) -> list[int]:
        """Processes whose program ended with an error."""
        return [rank for rank in sorted(self.done) if self.done[rank].estimate.details.get("program", {}).get("code")]

    def _headlines(self, most: int, failed: Sequence[int]) -> Iterator[Diagnostic]:
        for rank in failed:
            yield Code.RANK_FAILED.about(rank=rank, ending=self.done[rank].estimate.details["program"]["words"])
        estimate, first = self.done[most].estimate, self.done[min(self.done)].estimate
        if estimate.device > first.device:
            more = format_bytes(estimate.device - first.device)
            yield Code.RANK_FULLEST.about(rank=most, ranks=self.processes.world_size, more=more, first=min(self.done))
        if self.is_cut:
            yield Code.RANKS_CUT.about(most=MOST_ANALYSED)


@dataclass(frozen=True)
class _Analysed:
    estimate: Estimate
    digest: str  # of the trace: equal ones have equal events
    groups: tuple[tuple[int, ...], ...]


def _figures(estimate: Estimate) -> dict[str, int]:
    return {f"{level}_bytes": getattr(estimate, level) for level in ("requested", "allocated", "reserved", "device")}


def _axes(groups: Sequence[tuple[int, ...]], world_size: int) -> list[tuple[int, ...]]:
    """The groups of the first process that span all processes, as the axes of a grid do; else all in one row."""
    found = sorted({group for group in groups if group[:1] == (0,) and 1 < len(group) < world_size}, key=len)
    smallest = [group for group in found if not any(set(other) < set(group) for other in found)]
    corners = {sum(ranks) for ranks in itertools.product(*smallest)} if smallest else set()
    if math.prod(map(len, smallest)) == world_size and corners == set(range(world_size)):
        return smallest
    return [tuple(range(world_size))]


def _digest(trace: Trace) -> str:
    """A digest that differs between traces with different events."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(trace.kinds.tobytes())
    digest.update(trace.subjects.tobytes())
    digest.update(repr([(storage.bytes, storage.place, storage.stream) for storage in trace.storages]).encode())
    return digest.hexdigest()
