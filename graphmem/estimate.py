"""The Estimate: graphmem's answer, as plain values. Every figure is in bytes, of one of four levels.

The levels, always in this order: *requested* (the sizes of tensors) <= *allocated* (blocks handed out) <= *reserved*
(segments held from the driver) <= *device* (as in ``nvidia-smi``: reserved plus the context).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from graphmem import reports
from graphmem.base.figures import NO_DOUBTS, Doubts, Figure, Loads, parse_margin
from graphmem.base.records import dataclass
from graphmem.diagnostics import CUT_SHORT, Code
from graphmem.diagnostics import Diagnostic as Diagnostic

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphmem.allocators.base import SegmentView
    from graphmem.reports.document import Document
    from graphmem.trace import Trace

SCHEMA = "graphmem.estimate/1"
#: The levels of a peak, each at most as large as the next; :class:`Peak` has one field of bytes for each.
LEVELS = ("requested", "allocated", "reserved", "device")

#: The levels with what they mean in general words; a runtime has its own.
MEANINGS = (
    ("requested", "what the tensors asked for"),
    ("allocated", "blocks handed out for them"),
    ("reserved", "memory held from the driver"),
    ("device", "nvidia-smi's line of the process: reserved plus context"),
)

#: Categories that are gaps between two levels, after the storage categories of ``graphmem.trace.Category``.
GAPS = ("ROUNDING", "FRAGMENTATION", "CONTEXT")


#: Category or gap -> bytes.
Breakdown = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Peak:
    """The four levels. In ``Estimate.peak`` each is its own maximum over the whole run."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """The four levels' maxima while a phase ran (memory held at its beginning included)."""

    iteration: int
    name: str
    peak: Peak

    def __str__(self) -> str:
        """``iteration 2 backward``, as :class:`graphmem.trace.Phase` writes it."""
        from graphmem.trace import Phase

        return str(Phase(self.iteration, self.name))


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Private pools of one kind at the peak: how many, the bytes of their segments, and those that storages asked for.

    Bytes reserved and not requested serve nobody outside the pool.
    """

    label: str
    count: int
    reserved_bytes: int
    requested_bytes: int


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Memory that a whole program holds from step to step at the peak, and the line that made it."""

    bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Moment:
    """When the peak happens: index of the event, and the operator that made it."""

    event: int
    phase: str
    operator: str
    module: str
    source: str


@dataclass(frozen=True, slots=True)
class LiveStorage:
    """A storage alive at the peak."""

    bytes: int
    category: str
    label: str
    operator: str
    module: str
    source: str
    phase: str


@dataclass(frozen=True, slots=True)
class CardUse:
    """The memory in use on the card at the peak there, divided as ``nvidia-smi`` does; that of a run that ends for want
    of memory is the most that it held until then.

    The process holds its segments and ``context``, the figures of the memory outside its allocator, given the libraries
    it ``loads``. How far the sum is known is :meth:`Estimate.interval`. ``others_bytes``: held by others, as the
    question gives it. ``driver_bytes`` is the driver's own share, in no process and in no card's capacity here: the
    total of nvidia-smi less that of CUDA, None where it is not known. NVML's first ``nvmlDeviceGetMemoryInfo``, which
    many tools read, counts it as used.
    """

    process_bytes: int
    others_bytes: int
    driver_bytes: int | None
    context: tuple[Figure, ...]
    loads: Loads

    @property
    def whole_bytes(self) -> int:
        """Everything on the card, the driver's share included as far as it is known."""
        return self.process_bytes + self.others_bytes + (self.driver_bytes or 0)


@dataclass(frozen=True, slots=True)
class Refusals:
    """The requests that a program was refused on the card, and whose error it caught: how many, the bytes of the first
    and its ``place``; ``went_on``: whether it did its work afterwards, with less. ``later_bytes``: the most that it was
    given at this place after the last of them, 0 where nothing. ``needed_bytes`` had to be allocated at least for all
    of them to be served."""

    count: int
    first_bytes: int
    place: str
    went_on: bool
    needed_bytes: int
    later_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit of a run on a card. ``device_bytes`` are held by the process there, ``margin_bytes`` are left of the
    capacity then, without those that others hold (negative: missing).

    ``needs_cache_flush`` is true when it fits only because the allocator gives cached segments back and retries;
    ``device_bytes`` are then held within the card, and ``unlimited_bytes`` would be held without a limit.

    ``refusals``: what the program was refused there and caught; where it gave up then, ``device_bytes`` are the least
    that it needs.

    ``fits`` holds for the figures as they are. ``probability`` is the share of runs that are expected to fit, given how
    far the figures may be off; None where something that nothing bounds may decide. ``margin`` is the share that was
    asked for, None where none was.
    """

    gpu: str
    capacity_bytes: int
    device_bytes: int
    margin_bytes: int
    fits: bool
    needs_cache_flush: bool = False
    failed_at: Moment | None = None
    others_bytes: int = 0
    unlimited_bytes: int = 0
    probability: float | None = None
    margin: float | None = None
    refusals: Refusals | None = None

    @property
    def gave_up(self) -> bool:
        """True if the program caught that the card refused it memory, and did not go on with its work."""
        return self.refusals is not None and not self.refusals.went_on

    @property
    def verdict(self) -> str:
        """``yes`` or ``no`` where at least the share that was asked for (without one: everything that is known to be
        possible) fits, or does not; else ``likely`` or ``likely not``."""
        share = 1.0 if self.margin is None else self.margin
        if self.probability is not None:
            if self.fits and self.probability >= share:
                return "yes"
            if not self.fits and 1 - self.probability >= share:
                return "no"
        return "likely" if self.is_expected else "likely not"

    @property
    def is_expected(self) -> bool:
        """True if it fits rather than not: by the probability where it is known, else by the figures."""
        return self.fits if self.probability is None else self.probability >= 0.5

    @property
    def is_sure(self) -> bool:
        """True if the verdict is ``yes`` or ``no``."""
        return self.verdict in ("yes", "no")

    @property
    def passes(self) -> bool:
        """True if it fits for who asked: with a margin only a ``yes`` does."""
        return self.is_expected if self.margin is None else self.verdict == "yes"

    @property
    def chance(self) -> str:
        """The likelihood of the verdict, as ``97 %``; nothing where it is sure or not known."""
        if self.probability is None or self.is_sure:
            return ""
        return f"{min(99, max(1, int(100 * max(self.probability, 1 - self.probability))))} %"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the verdict."""
        return {**asdict(self), "verdict": self.verdict}


class Findings(NamedTuple):
    """The findings about a run besides its figures: for the reader, and as values for ``details``."""

    diagnostics: tuple[Diagnostic, ...] = ()
    details: Mapping[str, Any] = {}


class _Later:
    """Findings that take work, found when somebody first looks. ``find`` is a function of plain values, so that a
    pending one can be sent to another process."""

    def __init__(self, find: Callable[[], Findings]) -> None:
        self._find = find

    @cached_property
    def findings(self) -> Findings:
        return self._find()


class LateDiagnostics(Sequence[Diagnostic]):
    """Diagnostics of which some are found out when somebody looks; equal to a tuple of the same."""

    def __init__(self, early: Sequence[Diagnostic], later: _Later) -> None:
        self._early, self._later = tuple(early), later

    @property
    def _all(self) -> tuple[Diagnostic, ...]:
        return (*self._early, *self._later.findings.diagnostics)

    @overload
    def __getitem__(self, index: int) -> Diagnostic: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Diagnostic]: ...
    def __getitem__(self, index: int | slice) -> Diagnostic | Sequence[Diagnostic]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (tuple, LateDiagnostics)) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


class LateDetails(Mapping[str, Any]):
    """Details of which some are found out when somebody looks."""

    def __init__(self, early: Mapping[str, Any], later: _Later) -> None:
        self._early, self._later = dict(early), later

    def beside(self, more: Mapping[str, object]) -> LateDetails:
        """These and ``more``."""
        return LateDetails({**self._early, **more}, self._later)

    @property
    def _all(self) -> dict[str, object]:
        return {**self._early, **self._later.findings.details}

    def __getitem__(self, name: str) -> object:
        return self._early[name] if name in self._early else self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


def found_later(
    diagnostics: Sequence[Diagnostic], details: Mapping[str, object], find: Callable[[], Findings]
) -> tuple[LateDiagnostics, LateDetails]:
    """``diagnostics`` and ``details`` together with the findings of ``find``, which is called once, when either is
    looked at."""
    later = _Later(find)
    return LateDiagnostics(diagnostics, later), LateDetails(details, later)


@dataclass(frozen=True)
class Timeline:
    """Three levels after every device event (int64 arrays of one length); event ``i`` belongs to ``operators[i]``."""

    requested_bytes: npt.NDArray[np.int64]
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]


def no_card_named(gpu: str) -> str:
    """The assumption of a card, as none was named."""
    return f"no GPU was named: {gpu} (give --gpu)"


@dataclass(frozen=True, repr=False)
class Estimate(reports.Answer):
    """The memory that a run needs. ``breakdown`` (category -> bytes) sums exactly to the device bytes at ``moment``:
    the moment with the most allocated bytes while the most is reserved. ``last_growth`` is when reserved memory grew
    last. ``levels``: each with its meaning to the runtime. ``find_segments`` gives the allocator's segments at that
    moment, by another replay."""

    model: str
    runtime: str
    allocator: str
    step: str
    gpu: str
    peak: Peak
    ideal_bytes: int
    phases: tuple[PhasePeak, ...]
    moment: Moment
    breakdown: Breakdown
    top: tuple[LiveStorage, ...]
    fit: Fit | None
    host_bytes: int = 0
    pinned_bytes: int = 0
    managed_bytes: int = 0
    assumptions: tuple[str, ...] = ()
    diagnostics: Sequence[Diagnostic] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    pools: tuple[PoolUse, ...] = ()
    last_growth: Moment | None = None
    held: tuple[HeldBytes, ...] = ()
    card: CardUse | None = None
    doubts: Doubts = NO_DOUBTS
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    trace: Trace | None = field(default=None, repr=False, compare=False)
    find_segments: Callable[[], Sequence[SegmentView]] | None = field(default=None, repr=False, compare=False)
    levels: Sequence[tuple[str, str]] = MEANINGS

    def document(self, *, details: bool = False, tree: bool = False, budget_bytes: int | None = None) -> Document:
        """The report of ``graphmem analyze``: one screen, or with ``details`` all that there is; with ``tree`` also the
        modules of the model, each with its bytes at the peak."""
        from graphmem.reports import estimate, screen

        return estimate.document(self, budget_bytes) if details else screen.document(self, budget_bytes, tree)

    def to_frame(self, table: str = "storages", library: str | None = None) -> Any:
        """The ``storages``, ``operators``, ``modules`` or ``phases`` of the run as a ``DataFrame``, a row each: of
        pandas, or of polars where that is the one installed, or the ``library``. Raises
        :class:`graphmem.errors.GraphmemError` where neither is, or the events of the run were not kept."""
        from graphmem.reports import tables

        return tables.frame(self, table, library)

    def plot(self) -> reports.Shown:
        """The run over its events, to look around in: shown by a notebook, or written by ``.save("run.html")``."""
        from graphmem.reports import screen

        return reports.Shown(screen.picture(self))

    @property
    def failure(self) -> str:
        """Why the step fails on every card, whatever memory there is; empty where it does not."""
        return next((one.message for one in self.diagnostics if one.code is Code.STEP_FAILS), "")

    @property
    def ends_early(self) -> str:
        """Why the figures are the least that it needs; empty where the run came to its end."""
        return next((one.message for one in self.diagnostics if one.meaning.cause == CUT_SHORT), "")

    @property
    def card_assumed(self) -> bool:
        """Whether no card was named, and ``gpu`` is the one that was taken."""
        return no_card_named(self.gpu) in self.assumptions

    def __repr__(self) -> str:
        return f"<Estimate of {self.model}: {self.device:,} bytes of {self.gpu}>"

    def with_details(self, **more: object) -> Estimate:
        """The same with more details. What is found when somebody looks still is."""
        known = self.details
        return replace(self, details=known.beside(more) if isinstance(known, LateDetails) else {**known, **more})

    def without_events(self) -> Estimate:
        """The same without trace and timeline, which have a row for every event, and what is found by them."""
        return replace(self, trace=None, timeline=None, find_segments=None)

    @property
    def requested(self) -> int:
        """Peak requested bytes."""
        return self.peak.requested_bytes

    @property
    def allocated(self) -> int:
        """Peak allocated bytes (``torch.cuda.max_memory_allocated``)."""
        return self.peak.allocated_bytes

    @property
    def reserved(self) -> int:
        """Peak reserved bytes (``torch.cuda.max_memory_reserved``)."""
        return self.peak.reserved_bytes

    @property
    def device(self) -> int:
        """Peak device bytes, as ``nvidia-smi`` shows them for the process."""
        return self.peak.device_bytes

    def interval(self, level: str) -> tuple[int | None, int | None]:
        """(least, most) bytes of a level, given its causes of doubt (:attr:`doubts`); None: nothing bounds it. A level
        holds the one below it, so it is at least that one's least."""
        said = int(getattr(self.peak, f"{level}_bytes"))
        least, most = self.doubts.least(level), self.doubts.most(level)
        below = {"reserved": "allocated", "device": "reserved"}.get(level)
        held = self.interval(below)[0] if below else None
        return None if least is None else max(held or 0, said + least), None if most is None else said + most

    def at_margin(self, level: str, margin: str) -> int | None:
        """Bytes of a level that no more than this share of runs exceed (``p99``: of a hundred one); None where nothing
        bounds them. Raises :class:`graphmem.errors.UsageError` for anything but p50 to p100."""
        share = parse_margin(margin)
        if self.doubts.most(level) is None:
            return None
        return int(getattr(self.peak, f"{level}_bytes")) + self.doubts.at(level, share)

    def fits(self, gpu: str) -> bool:
        """True if the peak fits the named card with that card's own context (see ``graphmem gpus``).

        The run was simulated for one kind of card; its kernels may take other workspaces on another. Analyse again
        with ``device=`` for a figure made for that card. Raises :class:`graphmem.errors.UsageError` for an unknown
        name.
        """
        from graphmem.devices import device_named

        card = device_named(gpu)
        outside = card.outside(self.card.loads if self.card is not None else Loads())
        return self.peak.reserved_bytes + sum(figure.bytes for figure in outside) <= card.capacity_bytes

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.estimate/1``; all sizes in bytes)."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "runtime": self.runtime,
            "allocator": self.allocator,
            "step": self.step,
            "gpu": self.gpu,
            "peak": asdict(self.peak),
            "ideal_bytes": self.ideal_bytes,
            "phases": [{"iteration": p.iteration, "name": p.name, **asdict(p.peak)} for p in self.phases],
            "moment": asdict(self.moment),
            "last_growth": asdict(self.last_growth) if self.last_growth else None,
            "breakdown": dict(self.breakdown),
            "fits": self.fit.to_dict() if self.fit else None,
            "certainty": self._certainty(),
            "card": {**asdict(self.card), "whole_bytes": self.card.whole_bytes} if self.card else None,
            "host": {
                "host_bytes": self.host_bytes,
                "pinned_bytes": self.pinned_bytes,
                "managed_bytes": self.managed_bytes,
            },
            "assumptions": list(self.assumptions),
            "diagnostics": [found.to_dict() for found in self.diagnostics],
            "details": dict(self.details),
            "pools": [asdict(pool) for pool in self.pools],
            "held": [asdict(held) for held in self.held],
            "top": [asdict(storage) for storage in self.top],
            "at_peak": self._holders(),
        }

    def _holders(self) -> dict[str, dict[str, int]] | None:
        from graphmem.reports.holders import holders

        return None if self.trace is None else holders(self.trace, self.moment.event)

    def _certainty(self) -> dict[str, object]:
        levels = {
            level: dict(zip(("least_bytes", "most_bytes"), self.interval(level), strict=True)) for level in LEVELS
        }
        return {"levels": levels, "causes": [cause.to_dict() for cause in self.doubts.causes]}

    def to_json(self) -> str:
        """:meth:`to_dict` as indented JSON text."""
        return json.dumps(self.to_dict(), indent=2)
