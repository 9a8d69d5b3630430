"""A peak that others measured on a card and published, as a case that can be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from graphmem.accuracy.coverage import Judged, around
from graphmem.accuracy.published.models import factory_of, let_torchvision_load
from graphmem.answering import stages
from graphmem.answering.question import Question
from graphmem.base.figures import BOUNDS, EXACT, NO_DOUBTS, Cause, Doubts, bounded
from graphmem.base.versions import version_named
from graphmem.cudnn.library import NEVER
from graphmem.devices import Device, device_named
from graphmem.errors import GraphmemError, SourceError
from graphmem.estimate import Estimate
from graphmem.labels import ESTIMATES
from graphmem.replay import replay
from graphmem.runtimes import pytorch
from graphmem.trace import Category, EventKind, Trace
from graphmem.training import Inference, Training
from graphmem.training.program import Program


@dataclass(frozen=True)
class ModelSpec:
    """``library`` is ``torchvision``, ``timm`` or ``transformers``; ``side`` in pixels and ``classes`` are for
    torchvision, ``length`` in tokens and ``labels`` (``tokens`` or ``class``) for transformers."""

    library: str
    name: str
    side: int = 224
    classes: int = 1000
    length: int = 128
    labels: str = "tokens"


@dataclass(frozen=True)
class OwnLoop:
    """A run rebuilt as graphmem's own loop around a library's model."""

    model: ModelSpec
    step: Training | Inference
    batch: int
    iterations: int

    @property
    def words(self) -> str:
        """The run in words."""
        options = []
        if isinstance(self.step, Training):
            options += ["fp16 autocast"] if self.step.amp == "fp16" else []
            options += [f"{self.step.grad_accum} micro-batches"] if self.step.grad_accum > 1 else []
            options += ["checkpointing"] if self.step.checkpoint_activations else []
        step = self.step.optimizer if isinstance(self.step, Training) else "inference"
        return ", ".join([self.model.name, f"batch {self.batch}", step, *options])


@dataclass(frozen=True)
class Script:
    """A run rebuilt as a program of its own: the path of a Python file, and its arguments. The first of ``processes``
    is predicted, under the allocator's options ``alloc_conf``."""

    program: str
    arguments: tuple[str, ...] = ()
    iterations: int = 3
    processes: int = 1
    alloc_conf: str = ""

    @property
    def words(self) -> str:
        """The run in words."""
        together = [f"on {self.processes} cards"] if self.processes > 1 else []
        return " ".join([Path(self.program).stem, *self.arguments, *together])

    @property
    def step(self) -> Training:
        """As a launcher starts it, on machines of eight."""
        return Training(world_size=self.processes) if self.processes > 1 else Training()


@dataclass(frozen=True)
class PublishedCase:
    """A published measurement. ``level``: ``allocated``, ``reserved`` or ``device`` (all of a process, or of a card, of
    which others then hold ``others_bytes``). ``estimates`` are other estimators' bytes for this very run;
    ``context_bytes`` is the context that was published with it, and ``cuda_version`` that of the run, None where that
    is one of today. ``beyond_model``: reserved bytes were counted from an instrument's first sample, which was taken
    when the model lay on the card; ``grown_bytes``: what the process took beside its allocator after that sample, as
    its source measured it; ``rounded_bytes``: half of the last digit that was printed. ``why`` is what is known of the
    difference."""

    source: str
    run: OwnLoop | Script
    gpu: str
    torch_version: str
    level: str
    measured_bytes: int
    estimates: tuple[tuple[str, int], ...] = ()
    context_bytes: int | None = None
    others_bytes: int = 0
    cuda_version: tuple[int, int] | None = None
    beyond_model: bool = False
    grown_bytes: int = 0
    rounded_bytes: int = 0
    why: str = ""

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.run.words}, {self.gpu}"

    @property
    def level_name(self) -> str:
        """The level in words; the device level is of a process or of the whole card."""
        return self.level if self.level != "device" else "whole card" if self.others_bytes else "process"


@dataclass(frozen=True)
class Skipped:
    """Published figures that are not compared, and why."""

    source: str
    why: str


@dataclass(frozen=True)
class PublishedComparison:
    """A case and graphmem's bytes for it at the same level; ``peak_bytes`` None: ``error`` says why there are none.

    ``is_limited``: the card's end limits what the allocator caches. Not ``fits``: it is predicted to run out of memory,
    and the bytes are those it would want. ``asked_bytes``: the same with a real cuDNN asked for its workspaces, where
    there are any and one was given.
    """

    case: PublishedCase
    peak_bytes: int | None = None
    context_bytes: int = 0
    context_is_measured: bool = False
    estimated_buffer_bytes: int = 0
    unknown: int = 0
    is_limited: bool = False
    fits: bool = True
    error: str = ""
    asked_bytes: int | None = None
    doubts: Doubts = NO_DOUBTS

    def judged(self) -> Judged:
        """The measured bytes beside the interval of the prediction, widened by how they were rounded."""
        assert self.peak_bytes is not None
        interval, rounded = around(self.doubts, self.case.level, self.peak_bytes), self.case.rounded_bytes
        least = None if interval.least is None else interval.least - rounded
        most = None if interval.most is None else interval.most + rounded
        return Judged(replace(interval, least=least, most=most), self.case.measured_bytes, self.peak_bytes)

    def signed_error(self) -> float:
        """Of graphmem, relative to the measured bytes."""
        assert self.peak_bytes is not None
        return (self.peak_bytes - self.case.measured_bytes) / self.case.measured_bytes

    def asked_error(self) -> float | None:
        """The same with cuDNN asked; None where it was not."""
        if self.asked_bytes is None:
            return None
        return (self.asked_bytes - self.case.measured_bytes) / self.case.measured_bytes


def predict_published(case: PublishedCase, cudnn: str | None = None) -> PublishedComparison:
    """Predict one case, and where convolutions need workspaces once more with the library ``cudnn`` asked for them. An
    error of the analysis is part of the answer."""
    try:
        answer = _predict(case, NEVER)
        if cudnn is not None and answer.estimated_buffer_bytes:
            answer = replace(answer, asked_bytes=_predict(case, cudnn).peak_bytes)
    except GraphmemError as error:
        return PublishedComparison(case, error=str(error))
    except ImportError as error:
        return PublishedComparison(case, error=f"{error.name} is not installed")
    return answer


def predict_together(cases: Sequence[PublishedCase], cudnn: str | None = None) -> list[PublishedComparison]:
    """Predict the levels of one run, which is analysed once."""
    return [predict_published(case, cudnn) for case in cases]


def runs_of(cases: Sequence[PublishedCase]) -> list[list[PublishedCase]]:
    """The cases in their order, those of one run together where they follow each other."""
    return [list(same) for _, same in groupby(cases, _run)]


def _run(case: PublishedCase) -> PublishedCase:
    """The part of a case that an analysis depends on."""
    silent = replace(case, level="", measured_bytes=0, rounded_bytes=0, estimates=(), why="")
    return replace(silent, beyond_model=False, grown_bytes=0)


def _predict(case: PublishedCase, cudnn: str) -> PublishedComparison:
    """The peak of one published run at the level that was measured. A run that fits only once the cache
    is flushed is replayed within the card's memory; one that does not fit is marked so."""
    device = _device(case)
    estimate = _estimate(_run(case), cudnn)
    storages = estimate.trace.storages if estimate.trace is not None else ()
    answer = PublishedComparison(
        case,
        context_bytes=estimate.peak.device_bytes - estimate.peak.reserved_bytes,
        context_is_measured=device.context_measured or case.context_bytes is not None,
        estimated_buffer_bytes=max((s.bytes for s in storages if s.label in ESTIMATES), default=0),
        unknown=sum(item.count for item in estimate.diagnostics if item.kind == "unknown"),
        doubts=estimate.doubts,
    )
    if case.level == "allocated":
        return replace(answer, peak_bytes=estimate.peak.allocated_bytes)
    beside = answer.context_bytes + case.others_bytes if case.level == "device" else 0
    beside += case.grown_bytes
    beside -= _reserved_by_model(estimate, case.torch_version) if case.beyond_model else 0
    if estimate.fit is None or (estimate.fit.fits and not estimate.fit.needs_cache_flush):
        return replace(answer, peak_bytes=estimate.peak.reserved_bytes + beside)
    if not estimate.fit.fits:
        return replace(answer, peak_bytes=estimate.peak.reserved_bytes + beside, fits=False)
    limit = device.capacity_bytes - answer.context_bytes - case.others_bytes
    assert estimate.trace is not None
    reserved = _reserved_within(estimate.trace, limit, case.torch_version)
    end = end_of_card(estimate.trace, answer.doubts, limit, reserved, case.torch_version)
    doubts = Doubts((*answer.doubts.causes, *end))
    return replace(answer, peak_bytes=reserved + beside, is_limited=True, doubts=doubts)


def _device(case: PublishedCase) -> Device:
    device = replace(device_named(case.gpu), others_bytes=case.others_bytes, cuda_version=case.cuda_version)
    if case.context_bytes is not None:
        device = replace(device, context_bytes=case.context_bytes, context_measured=True)
    return device


@lru_cache(maxsize=1)
def _estimate(case: PublishedCase, cudnn: str) -> Estimate:
    """The analysis of graphmem's own loop, or of the source's program. Raises :class:`GraphmemError`, also where the
    program itself fails."""
    device = _device(case)
    if isinstance(case.run, OwnLoop):
        step = case.run.step
        model = factory_of(case.run.model, case.run.batch, training=isinstance(step, Training))
        return stages.estimate_of(_question(case, model, step, device, cudnn))
    let_torchvision_load()
    program = Program(case.run.program, case.run.arguments)
    estimate = stages.estimate_of(_question(case, program, case.run.step, device, cudnn))
    if estimate.details["program"]["code"]:
        raise SourceError(f"{Path(case.run.program).name}: {estimate.details['program']['words']}")
    return estimate


def _question(case: PublishedCase, model: Any, step: Training | Inference, device: Device, cudnn: str) -> Question:
    return Question(
        model,
        training=step,
        iterations=case.run.iterations,
        device=device,
        alloc_conf=case.run.alloc_conf if isinstance(case.run, Script) else "",
        torch_version=case.torch_version,
        top=0,
        cudnn=cudnn,
    )


def _reserved_by_model(estimate: Estimate, torch_version: str) -> int:
    """Bytes of the segments that the allocator has when the last parameter or buffer of the model lies on the card."""
    trace = estimate.trace
    assert trace is not None
    of_model = [at for at, item in enumerate(trace.storages) if item.category in (Category.PARAMETER, Category.BUFFER)]
    moved = np.flatnonzero((trace.kinds == EventKind.ALLOC) & np.isin(trace.subjects, of_model))
    allocator = pytorch.default_allocator("", None, version_named(torch_version))
    return int(replay(trace, allocator).reserved_bytes[moved[-1]]) if len(moved) else 0


def _reserved_within(trace: Trace, limit_bytes: int, torch_version: str) -> int:
    """Bytes that the allocator reserves where the card's end makes it give its cache back."""
    version = version_named(torch_version)
    return replay(trace, pytorch.default_allocator("", limit_bytes, version)).peak_reserved_bytes


#: At how many sizes of the context a run on a full card is replayed, evenly between the least and the most.
_SIZES_TRIED = 7


def end_of_card(
    trace: Trace, doubts: Doubts, limit_bytes: int, predicted_bytes: int, torch_version: str
) -> tuple[Cause, ...]:
    """The bytes other than ``predicted_bytes`` that the allocator reserves in ``limit_bytes``, where the context is
    another that its doubts allow: one cause, or none. The cache is given back as a whole when it no longer fits, and
    plans of cuDNN that find no workspace are passed over: what is reserved jumps by hundreds of MiB where the room
    changes by one, so a few sizes are tried, ends among them."""
    of_context = Doubts(tuple(cause for cause in doubts.causes if set(cause.spreads) == {"device"}))
    least, most = of_context.least("device"), of_context.most("device")
    if least is None or most is None:
        return ()
    rooms = np.linspace(limit_bytes - most, limit_bytes - least, _SIZES_TRIED)
    seen = [_reserved_within(trace, int(room), torch_version) - predicted_bytes for room in rooms]
    spread = bounded(min(seen), max(seen))
    if spread == EXACT:
        return ()
    return (Cause("the card's end", BOUNDS, "replayed with other sizes of the context", {"reserved": spread}),)
