"""Which layout of a training over several cards fits, and which of those that do sends the least."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graphmem.answering import stages
from graphmem.answering.question import Question
from graphmem.answering.runs import Progress, RunCache, shape_of, silent
from graphmem.base.spellings import also_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.layouts import search
from graphmem.planning.layouts.advice import GROWING, Tweak, tweaks_of
from graphmem.planning.layouts.axes import AXES, FRAMEWORKS, Job, Layout, frameworks_here, space
from graphmem.planning.layouts.cluster import cluster_of, half_of, sequences_of
from graphmem.planning.layouts.communication import Links, links_of
from graphmem.planning.layouts.configuration import File, files_of
from graphmem.planning.layouts.cost import describe
from graphmem.planning.layouts.document import of_plan
from graphmem.planning.layouts.search import Candidate, Search
from graphmem.reports import Answer
from graphmem.reports.document import Document
from graphmem.training import Training
from graphmem.workers import Workers

if TYPE_CHECKING:
    from graphmem.workers.crew import Crew

#: Captures of a search, unless told otherwise.
CONFIRM = 8
#: Axes that are told of as the size of a kind of layout.
_AXES_OF_SIZE = ("micro_batch", "whole_gradients", "recompute")
_FITTING = (search.FITS, search.TIGHT)
_WRAPPERS = ("ddp", "fsdp", "zero", "tp", "ep", "pp", "cp", "world_size")


@dataclass(frozen=True)
class Plan(Answer):
    """The layouts of a job: ``fitting``, each captured, the best first; ``others``, with the reason why they are not
    among them; what would save memory in the best one (``advice``), and its configuration (``files``)."""

    job: Job
    links: Links
    fitting: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    captured: int
    advice: tuple[Tweak, ...] = ()
    files: tuple[File, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem plan``."""
        return of_plan(self, statuses(self), details)

    def __repr__(self) -> str:
        return f"<Plan of {self.job.shape.name}: {len(self.fitting)} layouts fit>"

    @property
    def best(self) -> Candidate | None:
        """The first of those that fit."""
        return self.fitting[0] if self.fitting else None

    @property
    def closest(self) -> Candidate | None:
        """The captured layout that needs the least, where none fits."""
        captured = [one for one in self.others if one.estimate is not None]
        return min(captured, key=_device, default=None)

    def reasons(self) -> list[tuple[str, int, str]]:
        """Why layouts are not among those that fit: kind of layout, how many of it, the reason of the smallest."""
        by_kind: dict[str, list[Candidate]] = {}
        for one in self.others:
            if one.reason:
                by_kind.setdefault(one.reason if one.status == search.FAILED else _kind(one.layout), []).append(one)
        found = []
        for members in by_kind.values():
            shown = min(members, key=lambda one: (one.estimate is None, one.bound.bytes))
            if shown.status == search.FAILED:
                found.append((_failed(members), len(members), f"cannot be analysed: {shown.reason}"))
            else:
                found.append((_kind(shown.layout), len(members), f"{_size(shown.layout)}: {shown.reason}"))
        return found

    def open(self) -> list[Candidate]:
        """Layouts that may fit by their bounds and were not captured, the cheapest first."""
        return sorted((one for one in self.others if one.status == search.OPEN), key=lambda one: one.order)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.plan/1``; memory in bytes)."""
        cluster, shape = self.job.cluster, self.job.shape
        return {
            "schema": "graphmem.plan/1",
            "model": shape.name,
            "parameters": shape.parameters,
            "cluster": {"gpu": cluster.card.name, "gpus": cluster.count, "gpus_per_node": cluster.on_node,
                        "capacity_bytes": cluster.card.capacity_bytes},
            "step": self.job.step.describe(),
            "global_batch": self.job.sequences,
            "seq_len": self.job.seq_len or None,
            "links": asdict(self.links),
            "captured": self.captured,
            "fitting": [_as_dict(one) for one in self.fitting],
            "others": [_as_dict(one) for one in self.others],
            "advice": [one.to_dict() for one in self.advice],
            "files": [asdict(one) for one in self.files],
            "assumptions": list(self.assumptions),
            "notes": list(self.notes),
        }  # fmt: skip


@also_named("gpus", "gpu")
def plan(
    model: Any,
    example_inputs: Any = None,
    *,
    gpus: str,
    nodes: int | None = None,
    global_batch: str | int,
    seq_len: int | None = None,
    training: Training | None = None,
    confirm: int = CONFIRM,
    frameworks: Sequence[str] | None = None,
    links: Links | None = None,
    advice: bool = True,
    jobs: int = 1,
    engine: str = "",
    scheduler: str | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Search the layouts of ``model``'s training over ``gpus`` (``16xH100-80GB``) in ``nodes`` machines.

    ``global_batch``: of an optimizer step over all cards, in sequences or as ``1M-tokens``. ``training``: the step, by
    default AdamW with bf16 computation, fp16 on cards without it, and nothing that shares it out. ``confirm``: how many
    layouts are captured at most; every figure of :attr:`Plan.fitting` is a capture, of deep models written from a few
    layers. ``frameworks``: of ``ddp``, ``fsdp`` and ``deepspeed``; by default those that run here. ``links``: GB/s
    between the cards. ``advice``: look for what saves memory in the best one. ``jobs`` workers make captures side by
    side, by the ``engine`` (``processes``, ``dask``, ``ray``) at the address ``scheduler``: those of the next layout,
    and of the ones that are expected to follow. ``options`` are those of :func:`graphmem.analyze`. Raises
    :class:`GraphmemError`.
    """
    crew = Workers(jobs, engine, scheduler).crew()
    report = say or (lambda _: None)
    cluster = cluster_of(gpus, nodes, options.pop("device", None))
    step = Training(amp=half_of(cluster.card)) if training is None else training
    _check(step, confirm, frameworks, options)
    sequences = sequences_of(global_batch, seq_len)
    asked = {"device": cluster.card, "seq_len": seq_len, **options}
    report("reading the model")
    shape = shape_of(Question(model, example_inputs, batch=1, training=step, **asked))
    job = Job(shape, cluster, sequences, seq_len or 0, step, frameworks_here(frameworks))
    layouts = space(job)
    if not layouts:
        raise UsageError(
            f"a global batch of {sequences:,} sequences cannot be divided among {cluster.count} cards in any layout; "
            "give a multiple of the number of cards"
        )

    chosen = links or links_of(cluster.card.name)
    with crew or contextlib.nullcontext():
        capture = _Captures(model, example_inputs, asked, step, advice, crew)
        found = Search(job, chosen, confirm, capture, report, capture.ahead, 1 if crew is None else crew.size)
        candidates = found.run(layouts)
        fitting = sorted((one for one in candidates if one.status in _FITTING), key=lambda one: one.rank)
        best = fitting[0] if fitting else None
        tried = tuple(tweaks_of(job, best, capture, report)) if best is not None and advice else ()
    others = [one for one in candidates if one.status not in _FITTING]
    return Plan(
        job,
        chosen,
        tuple(fitting),
        tuple(others),
        found.captured,
        tried,
        files_of(job, best.layout, best.alloc_conf) if best is not None else (),
        (describe(cluster.card, chosen), *_assumed(best)),
        tuple(_notes(job, frameworks)),
    )


@dataclass
class _Captures:
    """Captures of layouts, each of its fullest process; here, or some of them ahead by a ``crew``. ``is_advised``: keep
    the runs of those that fit, as advice may ask for their other loop."""

    model: Any
    example_inputs: Any
    options: dict[str, Any]  # of :func:`graphmem.analyze`, for all layouts
    step: Training
    is_advised: bool
    crew: Crew | None
    _made: dict[Layout, list[tuple[Estimate, str] | GraphmemError]] = field(default_factory=dict)
    _shelves: dict[tuple[Layout, int], RunCache] = field(default_factory=dict)

    def ahead(self, layouts: Sequence[Layout]) -> None:
        """Make the captures of layouts side by side, unless the first of them has its own already."""
        if self.crew is None or layouts[0] in self._made:
            return
        tasks = [(one, rank) for one in layouts if one not in self._made for rank in one.ranks]
        alone = replace(self, crew=None, _made={}, _shelves={})
        found = dict(self.crew.results(partial(_of_worker, alone), tasks))
        for number, (layout, _) in enumerate(tasks):
            self._made.setdefault(layout, []).append(found[number])

    def __call__(self, layout: Layout, say: Progress, **changed: Any) -> tuple[Estimate, str]:
        """The estimate, and the allocator's options where they are not those asked for. Raises
        :class:`GraphmemError`."""
        found = []
        for one in self._made.get(layout, ()) if not changed else ():
            if isinstance(one, GraphmemError):
                raise one
            found.append(one)
        found = found or [self.of_process(layout, rank, say, changed) for rank in layout.ranks]
        return max(found, key=lambda one: (one[0].fit is not None and not one[0].fit.fits, one[0].device))

    def of_process(self, layout: Layout, rank: int, say: Progress, changed: dict[str, Any]) -> tuple[Estimate, str]:
        """The same of one process; ``changed``: fields of the ``step``, and keywords that are not as asked."""
        of_step, others = changed.get("step", {}), {name: value for name, value in changed.items() if name != "step"}
        training = replace(layout.training(replace(self.step, **of_step)), rank=rank)
        arguments = {"top": 0, **self.options, "batch": layout.rows, "training": training, **others}
        question = Question(self.model, self.example_inputs, **arguments)
        shelf = self._shelves.get((layout, rank), RunCache())
        found = _captured(question, shelf, say)
        fit = found[0].fit
        if self.is_advised and fit is not None and fit.fits:
            self._shelves[layout, rank] = shelf
        return found


def _of_worker(captures: _Captures, task: tuple[Layout, int]) -> tuple[Estimate, str] | GraphmemError:
    """The capture of a process in a worker, or the reason why there is none."""
    try:
        return captures.of_process(*task, silent, {})
    except GraphmemError as error:
        return error


def _captured(question: Question, shelf: RunCache, say: Callable[[str], None]) -> tuple[Estimate, str]:
    """Of one process, whose run is kept on ``shelf``; of a deep model by a template of its layers, where there is one.
    Where it does not fit as it is, and nobody chose the allocator's options, the same events with segments that grow.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the frameworks, again and again
        estimate = stages.estimate_of(question, shelf, say)
        fit = estimate.fit
        if question.alloc_conf is None and fit is not None and (not fit.passes or fit.needs_cache_flush):
            other = stages.estimate_of(replace(question, alloc_conf=GROWING), shelf, say)
            if other.fit is not None and other.fit.passes and not other.fit.needs_cache_flush:
                return other.without_events(), GROWING
    return estimate.without_events(), ""


def _check(step: Training, confirm: int, frameworks: Sequence[str] | None, options: dict[str, object]) -> None:
    if not isinstance(step, Training):
        raise UsageError(f"training is a graphmem.Training, not {step!r}: a plan is of training")
    given = [name for name in _WRAPPERS if getattr(step, name) is not None]
    given += ["checkpoint_activations"] if step.checkpoint_activations else []
    given += ["grad_accum"] if step.grad_accum > 1 else []
    if given:
        raise UsageError(f"{given[0]} is what a plan chooses; leave it out of the step")
    if "batch" in options:
        raise UsageError("the batch of a process is what a plan chooses; give global_batch")
    if type(confirm) is not int or confirm < 1:
        raise UsageError(f"confirm is a number of captures of at least 1, not {confirm!r}")
    for name in frameworks or ():
        if name not in FRAMEWORKS:
            raise UsageError(f"unknown framework {name!r}; accepted: {', '.join(FRAMEWORKS)}")


def _assumed(best: Candidate | None) -> list[str]:
    """The assumptions that the figures rest on."""
    lines = [] if best is None or best.estimate is None else list(best.estimate.assumptions)
    return [
        "captured is the first process, which has the largest part, and of pipelines the first of the last stage too; "
        "of a step of more micro-batches the first two, as the others find what the second found",
        *lines,
    ]


def _notes(job: Job, frameworks: Sequence[str] | None) -> list[str]:
    notes = []
    if frameworks is None and "deepspeed" not in job.frameworks:
        notes.append("DeepSpeed is not installed here, and its layouts are left out (pip install deepspeed)")
    if importlib.util.find_spec("accelerate") is None:
        notes.append("accelerate is not installed here, and context parallelism is left out (pip install accelerate)")
    if not job.shape.predicts:
        notes.append(
            "bounds are of its model states alone: those of activations are known of transformers' language models"
        )
    return notes


def _device(candidate: Candidate) -> int:
    assert candidate.estimate is not None
    return candidate.estimate.device


def _failed(members: Sequence[Candidate]) -> str:
    """The kinds of some failed layouts, in words: the first of them, and how many more."""
    kinds = list(dict.fromkeys(_kind(one.layout) for one in members))
    return kinds[0] if len(kinds) == 1 else f"{kinds[0]} and {len(kinds) - 1} more kinds"


def _kind(layout: Layout) -> str:
    """The axes of a layout in words, those of size left out."""
    return ", ".join(filter(None, (axis.words(layout) for axis in AXES if axis.name not in _AXES_OF_SIZE)))


def _size(layout: Layout) -> str:
    return ", ".join(filter(None, (axis.words(layout) for axis in AXES if axis.name in _AXES_OF_SIZE)))


def _as_dict(one: Candidate) -> dict[str, object]:
    estimate = one.estimate
    return {
        "layout": {**asdict(one.layout), "data": one.layout.data, "shards": one.layout.shards},
        "words": one.layout.words(),
        "options": one.layout.options(),
        "status": one.status,
        "reason": one.reason or None,
        "alloc_conf": one.alloc_conf or None,
        "bound_bytes": one.bound.bytes,
        "bound": [asdict(part) for part in one.bound.parts],
        "sent": asdict(one.cost.sent),
        "sending_seconds": one.cost.sending,
        "recomputing_seconds": one.cost.recomputing,
        "waiting_seconds": one.cost.waiting,
        "captured": None if estimate is None else {
            **{f"{level}_bytes": getattr(estimate, level) for level in ("allocated", "reserved", "device")},
            "fit": None if estimate.fit is None else estimate.fit.to_dict(),
        },
    }  # fmt: skip


def statuses(found: Plan) -> Counter[str]:
    """How many layouts there are of each status."""
    return Counter(one.status for one in (*found.fitting, *found.others))
