"""Suggestions that save memory: every one is an analysis of its own, never a rule of thumb."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from graphmem.answering.runs import Progress, RunCache, counted, labelled, silent
from graphmem.base.spellings import also_named
from graphmem.devices import Device
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.documents import of_advice
from graphmem.planning.request import Request
from graphmem.reports import Answer
from graphmem.reports.document import Document
from graphmem.runtimes import runtime_named
from graphmem.training import Inference, Training
from graphmem.workers import Workers

if TYPE_CHECKING:
    from graphmem.workers.crew import Crew


_TOGETHER = "all of them that go together"


@dataclass(frozen=True)
class Advice:
    """One change: its words, the options that make it, and the step's memory with it.

    ``saved_bytes`` is the difference of the device peaks; ``reason`` says why there is no ``estimate``.
    """

    change: str
    options: str
    settings: dict[str, Any]
    estimate: Estimate | None
    saved_bytes: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The advice as plain values, memory in bytes."""
        return {
            "change": self.change,
            "options": self.options,
            "saved_bytes": self.saved_bytes if self.estimate else None,
            "device_bytes": self.estimate.device if self.estimate else None,
            "fits": self.estimate.fit.fits if self.estimate and self.estimate.fit else None,
            "verdict": self.estimate.fit.verdict if self.estimate and self.estimate.fit else None,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Advised(Answer):
    """The step as it is, and the changes, those that save most first; those that cannot be analysed come last.
    ``steps``: those that are taken together, each with all before it."""

    base: Estimate
    advice: tuple[Advice, ...]
    steps: tuple[Advice, ...] = ()

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem advise``."""
        return of_advice(self)

    def __repr__(self) -> str:
        return f"<Advised: {len(self.advice)} changes of {self.base.model}>"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document as Python values (schema ``graphmem.advice/1``; memory in bytes)."""
        return {
            "schema": "graphmem.advice/1",
            "base": self.base.to_dict(),
            "advice": [one.to_dict() for one in self.advice],
            "steps": [one.to_dict() for one in self.steps],
        }


@also_named("device", "gpu")
def advise(
    model: object,
    example_inputs: object = None,
    *,
    jobs: int = 1,
    engine: str = "",
    scheduler: str | None = None,
    say: Callable[[str], None] | None = None,
    steps: bool = False,
    **options: object,
) -> Advised:
    """Analyse the step as it is and with each change that could save memory, then with those that saved together; with
    ``steps`` these one after another, too.

    ``jobs`` workers make the captures of the changes side by side, by the ``engine`` (``processes``, ``dask``, ``ray``)
    at the address ``scheduler``, which needs a model that can be sent to them. ``options`` are those of
    :func:`graphmem.analyze`. Raises :class:`GraphmemError` where the step itself cannot be analysed.
    """
    crew = Workers(jobs, engine, scheduler).crew()
    request, captures = Request(model, example_inputs, options), RunCache()
    report = say or request.progress
    base = request.run(captures, labelled(report, "as it is"))
    changes = list(_changes(request, base))
    tried = dict(_all_tried(request, base, changes, captures, crew, report))
    found = [tried[number] for number in range(len(changes))]
    chosen = _chosen([one for one in found if one.saved_bytes > 0])
    tries = partial(_tried, request, base.device, captures=captures, report=report)
    last = tries(_all_of(chosen)) if len(chosen) > 1 else None
    if last is not None:
        chosen, last = _without_allocator(chosen, last, tries) or (chosen, last)
        found.append(last)
    path = [_up_to(chosen, count) for count in range(2, len(chosen) + 1)]
    between = [tries(one) for one in path[:-1]] if steps else []
    followed = (chosen[0], *between, replace(last, change=path[-1].change)) if steps and last else ()
    return Advised(base, tuple(sorted(found, key=lambda one: (one.estimate is None, -one.saved_bytes))), followed)


def _all_tried(
    request: Request, base: Estimate, changes: Sequence[Advice], captures: RunCache, crew: Crew | None, report: Progress
) -> Iterator[tuple[int, Advice]]:
    """Every change by its number: first those that the capture of the step as it is answers too, the others by the
    workers if there are any."""
    answered = [number for number, change in enumerate(changes) if _is_answered(request, change, captures)]
    others = [number for number in range(len(changes)) if number not in answered]
    for number in answered if crew else (*answered, *others):
        yield number, _tried(request, base.device, changes[number], captures, report)
    if crew is None:
        return
    report(f"{len(others)} changes side by side")
    with crew:
        function = partial(_tried, request.quiet, base.device)
        made = crew.results(function, [changes[number] for number in others])
        for done, (place, found) in enumerate(made, 1):
            number = others[place]
            yield number, replace(changes[number], reason=str(found)) if isinstance(found, GraphmemError) else found
            counted(report, done, len(others))


def _is_answered(request: Request, change: Advice, captures: RunCache) -> bool:
    """Whether a change needs no capture; one that is refused needs none."""
    try:
        return captures.serves(request.changed(**change.settings).question)
    except GraphmemError:
        return True


def _tried(
    request: Request, base_bytes: int, change: Advice, captures: RunCache | None = None, report: Progress = silent
) -> Advice:
    """The change, analysed; ``base_bytes``: what the step needs without it."""
    try:
        estimate = request.changed(**change.settings).run(captures, labelled(report, change.change))
    except GraphmemError as error:
        return replace(change, reason=str(error))
    return replace(change, estimate=estimate, saved_bytes=base_bytes - estimate.device)


def _chosen(saving: list[Advice]) -> list[Advice]:
    """The changes that saved something, the most first, of those that set the same thing only the best one."""
    chosen: list[Advice] = []
    for one in sorted(saving, key=lambda one: -one.saved_bytes):
        if not any(one.settings.keys() & other.settings.keys() for other in chosen):
            chosen.append(one)
    return chosen


def _without_allocator(
    chosen: list[Advice], together: Advice, tries: Callable[[Advice], Advice]
) -> tuple[list[Advice], Advice] | None:
    """The other changes and what they come to, where the allocator's, which saves alone, costs beside them."""
    rest = [one for one in chosen if one.settings.keys() != {"alloc_conf"}]
    if not 1 < len(rest) < len(chosen):
        return None
    found = tries(_all_of(rest))
    return (rest, found) if found.saved_bytes > together.saved_bytes else None


def _all_of(chosen: list[Advice]) -> Advice:
    return replace(_up_to(chosen, len(chosen)), change=_TOGETHER)


def _up_to(chosen: list[Advice], count: int) -> Advice:
    """The first ``count`` changes as one, called as the last of them."""
    settings = {name: value for one in chosen[:count] for name, value in one.settings.items()}
    options = " ".join(one.options for one in chosen[:count])
    return Advice(f"and {chosen[count - 1].change}", options, settings, None)


def _changes(request: Request, base: Estimate) -> Iterator[Advice]:
    """The settings to try: none that is set already, none that the runtime does not have."""
    step = request.step
    runtime, batch = runtime_named(base.runtime), request.options.get("batch")
    for change in runtime.changes(request.options.get("alloc_conf"), request.question.setting.device):
        yield Advice(change.words, f"--alloc-conf {change.alloc_conf}", {"alloc_conf": change.alloc_conf}, None)
    if runtime.step_advice and step.amp is None and step.dtype == "fp32":
        # Both set both, so that never the two are taken together.
        half = _half_of(request.question.setting.device)
        yield Advice(f"autocast to {half}", f"--amp {half}", {"amp": half, "dtype": "fp32"}, None)
        yield Advice(f"weights in {half}", f"--dtype {half}", {"dtype": half, "amp": None}, None)
    if isinstance(step, Inference):
        yield from _smaller_batch(batch)
    elif runtime.step_advice:
        yield from _changes_of_training(step, batch)


def _half_of(card: Device) -> str:
    """The type of 16 bits that a card computes in: some emulate bf16, without attention's fused kernels."""
    return "bf16" if card.compute_capability is None or card.limits.bfloat16 else "fp16"


def _changes_of_training(step: Training, batch: int | None) -> Iterator[Advice]:
    if not step.checkpoint_activations:
        settings: dict[str, Any] = {"checkpoint_activations": True}
        yield Advice("activation checkpointing", "--checkpoint-activations", settings, None)
    if step.optimizer in ("adam", "adamw"):
        name = f"{step.optimizer}8bit"
        settings = {"optimizer": name, "optimizer_args": ()}
        yield Advice("8-bit optimizer states", f"--optimizer {name}", settings, None)
        if not {"foreach", "fused"} & dict(step.optimizer_args).keys():
            settings = {"optimizer_args": (*step.optimizer_args, ("fused", True))}
            yield Advice("fused optimizer step", "--optimizer-arg fused=true", settings, None)
    if step.loop == "hold":
        yield Advice("drop the model's output before the backward pass", "--loop drop", {"loop": "drop"}, None)
    if step.zero_grad == "zeros":
        settings = {"zero_grad": "set_to_none"}
        yield Advice("drop gradients", "--zero-grad set_to_none", settings, None)
    if batch is not None and batch % 2 == 0:
        settings = {"batch": batch // 2, "grad_accum": step.grad_accum * 2}
        options = f"--batch {batch // 2} --grad-accum {step.grad_accum * 2}"
        yield Advice("half the micro-batch, twice as many", options, settings, None)


def _smaller_batch(batch: int | None) -> Iterator[Advice]:
    if batch is not None and batch > 1:
        yield Advice("half the batch", f"--batch {batch // 2}", {"batch": batch // 2}, None)
