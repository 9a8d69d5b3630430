"""The search: which layouts are captured, and the bounds and estimates of the others.

Layouts that a bound refuses are never captured. The others are tried from the cheapest on, as far as they may fit by an
expectation that learns from every capture and is shown to nobody. What was captured settles others: what needs more
than one that does not fit does not fit either, and a cheaper one that fits makes smaller ones of its kind needless.
Once one fits, those are tried that would be cheaper and were not expected to fit, the likeliest first: an expectation
must not keep the best one from being found.

Where several captures are made side by side, those are begun that would follow if each turned out as expected; the
search goes its way all the same, one by one, and finds some of them there already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from graphmem.answering.runs import Progress, counted, labelled
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.layouts import bounds
from graphmem.planning.layouts.axes import Job, Layout
from graphmem.planning.layouts.bounds import Bound, States, bound
from graphmem.planning.layouts.communication import Links
from graphmem.planning.layouts.cost import Cost, cost_of
from graphmem.units import format_bytes

#: The status of a layout.
FITS, TIGHT, TOO_LARGE, REFUSED, IMPLIED, OPEN, NEEDLESS, FAILED = (
    "fits", "fits when cached segments are given back", "does not fit", "refused by its bound",
    "refused by a capture", "not captured", "smaller than one that fits", "cannot be analysed",
)  # fmt: skip
#: Expected bytes, as a share of the card, up to which a layout is captured: in the order of cost; where a costlier one
#: fits; and for the last capture that is left, which should find one that fits.
_CLOSE_TO_CAPACITY, _MAY_STILL_FIT, _SAFELY_BELOW = 1.1, 1.4, 0.85
#: Kinds of layouts that fit, after which the search may end.
WANTED = 3

#: Estimates a layout: a capture of its fullest process, with the allocator's options that it takes (those asked for,
#: else the default ones, else segments that grow where only those fit). Raises :class:`GraphmemError`.
Capture = Callable[[Layout, Progress], tuple[Estimate, str]]
#: Captures layouts side by side, so that ``Capture`` has them.
Ahead = Callable[[Sequence[Layout]], None]


@dataclass
class Candidate:
    """A layout with its figures. ``estimate``: of its fullest process, where it was captured; ``alloc_conf``:
    the allocator's options that it fits with, where they are not those that were asked for."""

    layout: Layout
    bound: Bound
    cost: Cost
    status: str = OPEN
    reason: str = ""
    estimate: Estimate | None = None
    alloc_conf: str = ""

    @property
    def order(self) -> tuple[bool, float, str, int, int]:
        """By which candidates are tried: the cheapest first, of equal ones those with the framework's own options,
        then those with the fewest micro-batches, as larger ones compute faster."""
        one = self.layout
        return one.offload, self.cost.seconds, one.buckets, one.accumulate, self.bound.bytes

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        """By which those that fit are shown: cost, of about equal cost the room that is left, then the fewest
        micro-batches."""
        assert self.estimate is not None
        assert self.estimate.fit is not None
        margin, one = self.estimate.fit.margin_bytes, self.layout
        return self.status == TIGHT, one.offload, self.cost.step, -margin, one.accumulate


@dataclass
class Search:
    """Captures at most ``budget`` candidates of ``job`` by ``capture``; ``ahead`` is told of ``width`` of them that are
    expected to be asked for."""

    job: Job
    links: Links
    budget: int
    capture: Capture
    say: Callable[[str], None]
    ahead: Ahead | None = None
    width: int = 1
    candidates: list[Candidate] = field(default_factory=list)
    captured: int = 0

    def run(self, layouts: Iterable[Layout]) -> list[Candidate]:
        """All candidates, settled as far as the budget goes."""
        self.candidates = [self._candidate(layout) for layout in layouts]
        self._learned = _Learned(self.job)
        while self.captured < self.budget:
            following = self._following()
            if following is None:
                break
            if self.ahead is not None:
                self.ahead([one.layout for one in self._expected_to_follow()])
            self._confirm(following)
        return self.candidates

    def _expected_to_follow(self) -> list[Candidate]:
        """The next candidates, up to the ``width``, where each fits or not as it is expected to."""
        capacity = self.job.cluster.card.capacity_bytes - self.job.cluster.card.others_bytes
        before = [(one.status, one.reason) for one in self.candidates]
        captured, found = self.captured, list[Candidate]()
        while len(found) < self.width and self.captured < self.budget:
            following = self._following()
            if following is None:
                break
            found.append(following)
            self.captured += 1
            self._settle(following, FITS if self._learned.expected(following) <= capacity else TOO_LARGE)
        self.captured = captured
        for one, (status, reason) in zip(self.candidates, before, strict=True):
            one.status, one.reason = status, reason
        return found

    def _candidate(self, layout: Layout) -> Candidate:
        found = Candidate(layout, bound(self.job, layout), cost_of(self.job, layout, self.links))
        capacity = self.job.cluster.card.capacity_bytes - self.job.cluster.card.others_bytes
        if found.bound.bytes > capacity:
            found.status, found.reason = REFUSED, _alone(found.bound, capacity)
        return found

    def _following(self) -> Candidate | None:
        """The cheapest that may fit, or a cheaper one than those that do; where none is expected to, and none has fit,
        the one that needs the least."""
        left = sorted(self._open(), key=lambda one: one.order)
        if not left:
            return None
        fitting = [one for one in self.candidates if one.status == FITS]
        capacity = self.job.cluster.card.capacity_bytes - self.job.cluster.card.others_bytes
        expected = {id(one): self._learned.expected(one) / capacity for one in left}
        likeliest = min(left, key=lambda one: expected[id(one)])
        if not fitting:
            most = _SAFELY_BELOW if self.captured == self.budget - 1 else _CLOSE_TO_CAPACITY
            # Offloading costs so much that others are tried which an expectation just misses.
            may_fit = (one for one in left if expected[id(one)] <= (min(most, 1.0) if one.layout.offload else most))
            return next(may_fit, likeliest)
        first = min(one.order for one in fitting)
        cheaper = [one for one in left if one.order < first and expected[id(one)] <= _MAY_STILL_FIT]
        if cheaper:
            return min(cheaper, key=lambda one: expected[id(one)])
        families = {one.layout.family for one in fitting}
        if len(families) >= WANTED:
            return None
        others = [one for one in left if one.layout.family not in families]  # dearer sizes of one that fits: no choice
        return next(
            (one for one in others if expected[id(one)] <= (1.0 if one.layout.offload else _CLOSE_TO_CAPACITY)), None
        )

    def _confirm(self, candidate: Candidate) -> None:
        """Capture a candidate and set its status, and that of the open ones of which it decides too."""
        number = f"{self.captured + 1} of at most {self.budget}"
        counted(self.say, self.captured, self.budget)
        self.say(f"{number}: {candidate.layout.words()}")
        try:
            candidate.estimate, candidate.alloc_conf = self.capture(candidate.layout, labelled(self.say, number))
        except GraphmemError as error:
            candidate.status, candidate.reason = FAILED, str(error)
            for other in self._open():  # what frameworks refuse, they refuse in every size
                if _kind(other.layout) == _kind(candidate.layout):
                    other.status, other.reason = FAILED, str(error)
            return
        self.captured += 1
        fit = candidate.estimate.fit
        assert fit is not None
        self._learned.note(candidate)
        if fit.passes:
            self._settle(candidate, TIGHT if fit.needs_cache_flush else FITS)
            return
        needed = format_bytes(candidate.estimate.device)
        near = ", less spare than the figures may be off" if fit.fits else ""
        candidate.reason = f"needs {needed} of {format_bytes(fit.capacity_bytes)}{near}"
        self._settle(candidate, TOO_LARGE, f"{candidate.layout.words()} needs {needed} already")

    def _settle(self, candidate: Candidate, status: str, reason: str = "") -> None:
        """The status of a candidate, and of the open ones of which it decides too, with the ``reason`` for these."""
        candidate.status = status
        one = candidate.layout
        for other in self._open():
            if status == FITS and other.layout.family == one.family and needs_no_more(other.layout, one):
                other.status = NEEDLESS
            if status == TOO_LARGE and needs_no_more(one, other.layout):
                other.status, other.reason = IMPLIED, reason

    def _open(self) -> list[Candidate]:
        return [one for one in self.candidates if one.status == OPEN]


def _kind(layout: Layout) -> tuple[object, ...]:
    """The part of a layout that decides whether a framework can run it at all."""
    split = layout.tensor > 1, layout.expert > 1, layout.pipeline > 1, layout.context > 1
    return layout.wrapper, layout.shards > 1, *split


def needs_no_more(one: Layout, other: Layout) -> bool:
    """Whether ``one`` is ``other`` with nothing changed but what saves memory: smaller micro-batches, recomputation,
    offloading, gradients that are reduced at once, fewer of them kept."""
    same = ("processes", "wrapper", "shard", "tensor", "expert", "pipeline", "in_flight", "context")
    if any(getattr(one, name) != getattr(other, name) for name in same):
        return False
    return (
        one.micro_batch <= other.micro_batch
        and one.recompute >= other.recompute
        and one.offload >= other.offload
        and one.whole_gradients <= other.whole_gradients
        # A single micro-batch keeps no gradients of others.
        and (one.accumulate == 1 or other.accumulate > 1)
        and one.buckets >= other.buckets
    )


def _alone(found: Bound, capacity: int) -> str:
    """``needs 141 GiB of 79 GiB for weights and gradients alone``: the fewest parts that do."""
    parts = found.over(capacity)
    *rest, last = [part.name for part in parts]
    named = f"{', '.join(rest)} and {last}" if rest else last
    total = format_bytes(sum(part.bytes for part in parts))
    return f"needs {total} of {format_bytes(capacity)} for {named} alone"


# --- what is expected -------------------------------------------------------------------------------------------------

#: Elements that a block without recomputation keeps, for each that the bound counts; what is taken before the first
#: capture tells.
_AT_FIRST = {True: 2.5, False: 5.0}


class _Learned:
    """How much of what lies above the model states there is, for each byte that the bound counts: as captured."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._scales: dict[tuple[object, ...], float] = {}

    def expected(self, candidate: Candidate) -> float:
        """Device bytes that a layout is expected to need. They only decide the order of the search."""
        fixed, varying = self._parts(candidate.layout)
        own, *others = self._keys(candidate.layout)
        scale = _AT_FIRST[candidate.layout.recompute]
        if own in self._scales:
            scale = self._scales[own]
        elif found := next((self._scales[key] for key in others if key in self._scales), 0.0):
            scale = math.sqrt(scale * found)  # of another kind: half believed
        return fixed + varying * scale

    def note(self, candidate: Candidate) -> None:
        """Learn from a capture."""
        assert candidate.estimate is not None
        fixed, varying = self._parts(candidate.layout)
        if varying:
            for key in self._keys(candidate.layout):
                self._scales[key] = max(0.0, (candidate.estimate.device - fixed) / varying)

    def _keys(self, layout: Layout) -> list[tuple[object, ...]]:
        kind = (layout.recompute, layout.tensor, layout.expert, layout.pipeline, layout.context)
        return [(layout.family, layout.recompute), (*kind, layout.wrapper, layout.shard), kind, (layout.recompute,)]

    def _parts(self, layout: Layout) -> tuple[float, float]:
        states = States.of(self._job, layout)
        held = states.weights + states.gradients + states.optimizer + states.buckets + states.accumulated
        units = 2 * bounds.largest_unit(self._job, layout) + bounds.gathered(self._job, layout)
        fixed = held + units + self._job.cluster.card.context_bytes
        # The bound divides all by tensor's size; of 34 bytes an element 10 are not (Korthikanti et al. 2022, eq. 2),
        # block inputs and the loss not at all.
        whole = layout.tensor
        share = 1.0 if layout.recompute else (10 + 24 / whole) / 34
        varying = bounds.saved_inputs(self._job, layout) * share + bounds.loss_bytes(self._job, layout) / 2
        if layout.pipeline > 1:  # of the bound's one micro-batch in the last stage the first one has several
            varying *= layout.pipeline
        return fixed, varying * whole + 1.0
