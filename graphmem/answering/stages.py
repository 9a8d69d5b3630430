"""The stages of an answer, each from plain values to plain values: loaded, recorded, traced, replayed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from graphmem.answering.causes import (
    Outcome,
    cause_of_version,
    causes_of_context,
    causes_of_trace,
    neighbours,
    together,
)
from graphmem.answering.question import Question
from graphmem.answering.remarks import device_notes, headlines, plans_told, workspaces_told
from graphmem.answering.runs import RunCache, could_go_on, labelled
from graphmem.answering.summarize import fits_card, summarize
from graphmem.answering.verdict import holding, loads_eagerly, loads_of, probability
from graphmem.base.figures import Cause, Loads
from graphmem.base.textbook import Sharded, compared
from graphmem.base.versions import Version, beyond_known, other_compiler, version_notes, words, workspace_variables
from graphmem.capture.threads import turn
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic, counted
from graphmem.errors import CaptureError, GraphmemError, TraceError, UsageError
from graphmem.estimate import Estimate, Peak, found_later
from graphmem.replay import Replay
from graphmem.run import Run
from graphmem.runtimes import all_runtimes
from graphmem.runtimes.base import Graphs, Runs, Runtime, Taken, doubts_of
from graphmem.sources import OnnxModel, TorchModel
from graphmem.trace import Trace
from graphmem.training import Inference, Training, other_loop
from graphmem.units import format_bytes


@dataclass(frozen=True)
class Traced:
    """A trace with what is known about how it came to be."""

    taken: Taken
    model: str
    step: str
    details: Mapping[str, Any] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)
    sharded: Sharded | None = None
    optimizer: str = ""
    doubt_of_version: Callable[[Peak], Cause | None] = lambda _: None
    tried: Mapping[str, Outcome] = field(default_factory=dict)


def estimate_of(
    question: Question,
    captures: RunCache | None = None,
    say: Callable[[str], None] = lambda _: None,
    *,
    figures_only: bool = False,
) -> Estimate:
    """The whole flow: load, trace, replay, summarize. Raises :class:`GraphmemError`.

    ``captures`` holds what was captured for other questions about the same model, and takes what is captured for this.
    What another thread loads and traces is waited for. With ``figures_only`` nobody asks how sure they are where that
    takes analyses of their own. Where tokens are drafted and it is not said how many are right, all and none are tried,
    and the answer is the one that needs more.
    """
    step = question.step
    if not isinstance(step, Inference) or step.generate is None or not step.generate.is_open:
        return _within_its_card(question, captures, say, figures_only)
    shelf = captures or RunCache()
    none_right = replace(question, training=replace(step, generate=replace(step.generate, accepted=0)))
    say("drafted tokens: all are right, then none")
    all_right, in_vain = (_within_its_card(one, shelf, say, figures_only) for one in (question, none_right))
    more = max((all_right, in_vain), key=lambda estimate: estimate.device)
    said = (
        f"how many drafted tokens are right is data: {format_bytes(all_right.reserved)} are reserved if all are, "
        f"{format_bytes(in_vain.reserved)} if none is; the larger one is shown (--accepted N: so many of a round)"
    )
    return replace(more, assumptions=(said, *more.assumptions))


def _within_its_card(
    question: Question, captures: RunCache | None, say: Callable[[str], None], figures_only: bool
) -> Estimate:
    shelf = captures or RunCache()
    estimate, may_go_on = _once(question, shelf, say, figures_only)
    if may_go_on and (estimate.fit is None or not estimate.fit.fits):
        with turn():
            shelf.forget()
        estimate, _ = _once(question, shelf, say, figures_only)
    return estimate


#: Shares of the reserved bytes: an output smaller than the first cannot matter, a difference above the second is told.
_SMALL_OUTPUT, _TOLD_DIFFERENCE = 1 / 1000, 1 / 100


def beside_other_loop(
    estimate: Estimate,
    question: Question,
    say: Callable[[str], None] = lambda _: None,
    captures: RunCache | None = None,
) -> Estimate:
    """The estimate with the figures of the other loop in ``details["loop"]``, where the two differ by more than 1 %.

    One holds the model's output in a variable and one drops it (:data:`graphmem.training.LOOPS`); where ``captures``,
    which answered the question, do not know the other one, it is a capture of its own. Raises :class:`GraphmemError`.
    """
    step = question.step
    if not isinstance(step, Training):
        return estimate
    loop = estimate.details.get("loop")
    if loop is None or loop["output_bytes"] < _SMALL_OUTPUT * estimate.reserved:
        return estimate
    other = other_loop(step.loop)
    question = replace(question, training=replace(step, loop=other), top=0)
    theirs = estimate_of(question, captures, labelled(say, f"with --loop {other}"), figures_only=True)
    levels = ("allocated", "reserved", "device")
    if all(abs(getattr(theirs, n) - getattr(estimate, n)) <= _TOLD_DIFFERENCE * getattr(estimate, n) for n in levels):
        return estimate
    told = {f"other_{level}_bytes": getattr(theirs, level) for level in levels}
    return replace(estimate, details={**estimate.details, "loop": {**loop, "other": other, **told}})


def _is_torch_loop(loaded: OnnxModel | TorchModel) -> bool:
    return isinstance(loaded, OnnxModel) or loaded.framework != "Keras"


def _once(question: Question, shelf: RunCache, say: Callable[[str], None], figures_only: bool) -> tuple[Estimate, bool]:
    """The estimate, and whether the program, run within the card of the question, may do otherwise."""
    with turn():
        say("loading")
        loaded = shelf.loaded(question)
        runtime = runtime_for(question, loaded)
        options = runtime.parse(question.alloc_conf, question.setting)
        say("tracing")
        run = shelf.recorded(question, loaded, say)
    traced = _traced(question, loaded, runtime, run)
    if run.planned is None and not figures_only:
        version, beside = question.setting.torch_version, _of_neighbours(question, say)
        traced = replace(traced, doubt_of_version=lambda peak: cause_of_version(version, peak, beside.get))
        if question.bounds and run.decided:
            traced = replace(traced, tried=_of_other_values(question, run.decided, say))
    say("replaying")
    estimate = replay_on(traced, runtime, options, question)
    return estimate, could_go_on(question, run)


def _of_neighbours(question: Question, say: Callable[[str], None]) -> dict[Version, Peak]:
    """The peak under the rules of the recorded versions beside one that was not, each an analysis of its own. Those
    that cannot be analysed are left out."""
    peaks = {}
    for version in neighbours(question.setting.torch_version):
        with contextlib.suppress(GraphmemError):
            other = replace(question, torch_version=words(version), top=0)
            heard = labelled(say, f"with PyTorch {words(version)}")
            peaks[version] = estimate_of(other, say=heard, figures_only=True).peak
    return peaks


#: Analyses with other values than those that were assumed, at most.
_MOST_TRIED = 8


def _of_other_values(
    question: Question, decided: Collection[Diagnostic], say: Callable[[str], None]
) -> dict[str, Outcome]:
    """What lines that read assumed values lead to with others, each an analysis of its own. A line is left out where
    nothing says how far its values go, where an analysis fails, and where it assumes something at other lines."""
    from graphmem.capture.values.assumed_values import alternatives  # only captures assume values

    found: dict[str, Outcome] = {}
    for place, values in alternatives(decided).items():
        if not values or sum(len(one.peaks) for one in found.values()) + len(values) > _MOST_TRIED:
            continue
        with contextlib.suppress(GraphmemError):
            peaks = []
            for value in values:
                step = replace(question.step, assume=(*question.step.assume, (place, value)))
                other = replace(question, training=step, bounds=False, top=0)
                theirs = estimate_of(other, say=labelled(say, f"{place} read as {value:g}"), figures_only=True)
                if _lines_assumed(theirs.diagnostics) - _lines_assumed(decided):
                    raise CaptureError("other lines decide then")
                peaks.append(theirs.peak)
            found[place] = Outcome(" and ".join(f"{value:g}" for value in values), tuple(peaks))
    return found


def _lines_assumed(diagnostics: Iterable[Diagnostic]) -> set[str]:
    return {one.place for one in diagnostics if one.kind == "assumed"}


# --- what runs it -----------------------------------------------------------------------------------------------------


def runtime_for(question: Question, loaded: OnnxModel | TorchModel) -> Runtime[Any]:
    """The runtime of a question. Raises :class:`UsageError` where it cannot run the step, or not with these options."""
    if isinstance(loaded, TorchModel):
        return _capturing(question.runtime_by_default(loaded.runtime), loaded)
    step, is_training = question.step, isinstance(question.step, Training)
    runtime = question.runtime_by_default(OnnxModel.trained_by if is_training else OnnxModel.runtime)
    accepted = (Graphs.CAPTURED,) if is_training else (Graphs.CAPTURED, Graphs.PLANNED)
    if runtime.graphs not in accepted:
        names = _one_of([other.name for other in all_runtimes() if other.graphs in accepted])
        done = "an ONNX graph is trained" if is_training else "ONNX graphs run"
        raise UsageError(f"{loaded.name}: {done} under --runtime {names}, not {runtime.name}")
    own = f"{loaded.name}: an ONNX graph has its own precision; drop --dtype"
    if runtime.graphs is Graphs.CAPTURED:
        if step.dtype != "fp32":
            raise UsageError(own)
        if isinstance(step, Training) and step.checkpoint_activations:
            raise UsageError(f"{loaded.name}: an ONNX graph has no blocks to recompute; drop --checkpoint-activations")
        return runtime
    if step.dtype != "fp32" or step.amp:
        raise UsageError(f"{own} and --amp")
    return runtime


def _for_captures_only(loaded: OnnxModel, option: str) -> UsageError:
    names = _one_of([runtime.name for runtime in all_runtimes() if runtime.graphs is Graphs.CAPTURED])
    return UsageError(f"{loaded.name}: {option} is for PyTorch operators; drop it, or use --runtime {names}")


def _capturing(runtime: Runtime[Any], loaded: TorchModel) -> Runtime[Any]:
    if not runtime.captures:
        names = _one_of([other.name for other in all_runtimes() if other.captures])
        raise UsageError(
            f"{loaded.name} is a {loaded.framework} model; export it to ONNX for {runtime.title}, or use --runtime "
            f"{names}"
        )
    return runtime


def _one_of(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# --- traces -----------------------------------------------------------------------------------------------------------


def _traced(question: Question, loaded: OnnxModel | TorchModel, runtime: Runtime[Any], run: Run) -> Traced:
    """What was recorded, as the runtime takes it on the card of the question."""
    if run.planned is not None:
        loads = loads_of(run.trace, question.setting.device, eager=loads_eagerly())
        return Traced(run.planned, loaded.name, run.step, loads=loads)
    setting, taken = question.setting, runtime.take(run.trace)
    assumptions = [*run.notes, *version_notes(setting.torch_version, run.installed_version)]
    assumptions.extend(f"{name}={text} of the environment" for name, text in workspace_variables(os.environ))
    newer = beyond_known(setting.torch_version)
    if question.step.compile is not None:
        newer += other_compiler(setting.torch_version, run.installed_version)
    diagnostics = [*newer, *counted(run.decided), *run.refusals, *counted(run.assumed)]
    details: dict[str, Any] = {}
    if run.groups and isinstance(question.step, Training) and question.step.processes is not None:
        processes = question.step.processes
        details["processes"] = {
            "world_size": processes.world_size,
            "rank": processes.rank,
            "nproc_per_node": processes.on_node,
            "groups": sorted({len(group) for group in run.groups}),
        }
    if run.ending is not None:
        details["program"] = {**asdict(run.ending), "words": run.ending.words()}
        if run.sandbox:
            details["sandbox"] = run.sandbox
        if run.ending.failed:
            diagnostics.append(Code.PROGRAM_FAILED.about(ending=run.ending.words()))
    if isinstance(question.step, Training) and not run.is_own_step and _is_torch_loop(loaded):
        details["loop"] = {"loop": question.step.loop, "output_bytes": run.output_bytes}
    if run.cudnn is not None:
        assumptions.extend(run.cudnn.notes())
        diagnostics.extend(run.cudnn.refused())
        details["cudnn"] = run.cudnn.details()
    assumptions.extend(taken.assumptions)
    whole = replace(taken, assumptions=tuple(assumptions), diagnostics=(*diagnostics, *taken.diagnostics))
    loads = loads_of(
        run.trace,
        setting.device,
        eager=loads_eagerly(),
        communicators=run.communicators,
        torch_version=setting.torch_version,
    )
    return Traced(whole, loaded.name, run.step, details, loads, run.sharded, run.optimizer)


def replay_recorded(trace: Trace, question: Question) -> Estimate:
    """A trace that comes from elsewhere; it replays under its own settings unless others are asked for."""
    notes, runtime = dict(trace.notes), question.runtime_by_default(TorchModel.runtime)
    settings = runtime.recorded_options(notes) if question.alloc_conf is None else question.alloc_conf
    details: dict[str, Any] = {}
    if "recorded peak reserved" in notes:
        details["recorded"] = {"reserved_bytes": _recorded_bytes(notes["recorded peak reserved"])}
    remarks = tuple(f"{key}: {value}" for key, value in trace.notes if key != "recorded peak reserved" and value)
    loads = loads_of(trace, question.setting.device, eager=False)  # the environment was another machine's
    taken = Taken(trace, remarks, proven="the recording itself")
    traced = Traced(taken, trace.source, "recorded run", details, loads)
    return replay_on(traced, runtime, runtime.parse(settings, question.setting), question)


def _recorded_bytes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text):
        raise TraceError(f"the note 'recorded peak reserved' of the trace is {text!r}, not a number of bytes")
    return int(text)


# --- replay -----------------------------------------------------------------------------------------------------------


def replay_on(traced: Traced, runtime: Runtime[Any], options: Any, question: Question) -> Estimate:
    """The trace in the runtime's allocator on the card of the question, with what the run makes a process load."""
    taken = traced.taken
    refused = bool(taken.trace.refused)
    # Who was refused memory was so on a card that had loaded nothing yet: else it would be judged by another limit.
    loads = Loads(cuda=traced.loads.cuda, eager=traced.loads.eager) if refused else traced.loads
    context = (*question.setting.device.outside(loads), *taken.outside)
    setting = holding(question.setting, sum(figure.bytes for figure in context))
    runs = runtime.run(taken.trace, options, setting)
    said = (*headlines(setting.device), *taken.diagnostics)
    doubts = together(
        _doubts_of_trace(traced, said, runs, setting.device, lambda one: runtime.run(one, options, setting)),
        doubts_of(runtime, taken),
        runs.doubts,
        causes_of_context(context),
    )
    diagnostics: Any = (*said, *plans_told(runs.limited), *runs.diagnostics)
    if not traced.details.get("cudnn", {}).get("plans_asked"):
        diagnostics = (*diagnostics, *workspaces_told(taken.trace, runs.main.peak_reserved_bytes))
    details: Mapping[str, Any] = {**traced.details, **runs.details}
    if taken.findings is not None:
        diagnostics, details = found_later(diagnostics, details, partial(taken.findings, options))
    estimate = summarize(
        taken.trace,
        runs.main,
        setting.device,
        model=traced.model,
        runtime=runtime.name,
        allocator=runtime.describe(options, setting),
        step=traced.step,
        limited=runs.limited,
        top=question.top,
        assumptions=(*device_notes(question, context), *taken.assumptions),
        diagnostics=diagnostics,
        details=details,
        context=context,
        loads=loads,
        doubts=doubts,
        probability=float(fits_card(runs.main, runs.limited, setting.device))
        if refused  # with another limit it would have asked for something else
        else probability(
            taken.trace, runs, doubts, lambda size: runtime.run(taken.trace, options, holding(setting, size)), setting
        ),
        margin=question.margin_share,
        levels=runtime.levels,
    )
    return estimate if traced.sharded is None else _beside_formulas(estimate, traced.sharded, traced.optimizer)


#: The largest storages that no formula counts, named beside it.
_NAMED = 3
_UNCOUNTED = ("TEMPORARY", "COMMUNICATION", "WORKSPACE", "KV_CACHE", "HELD", "UNKNOWN")


def _beside_formulas(estimate: Estimate, model: Sharded, optimizer: str) -> Estimate:
    """The estimate with the usual formulas in ``details["formulas"]``."""
    peaks = {"allocated_bytes": estimate.allocated, "reserved_bytes": estimate.reserved}
    uncounted = [one for one in estimate.top if one.category in _UNCOUNTED][:_NAMED]
    told = compared(model, optimizer, estimate.breakdown, peaks, uncounted)
    return replace(estimate, details={**estimate.details, "formulas": told})


def _doubts_of_trace(
    traced: Traced, diagnostics: Sequence[Diagnostic], runs: Runs, device: Device, run: Callable[[Trace], Runs]
) -> list[Cause]:
    """Why the figures of a trace may be others; ``run`` runs it with other sizes."""
    peak = _peak(runs.main)
    version = traced.doubt_of_version(peak)
    found = causes_of_trace(
        traced.taken.trace, peak, diagnostics, lambda other: _peak(run(other).main), device, traced.tried
    )
    return [*found, *([] if version is None else [version])]


def _peak(run: Replay) -> Peak:
    """The levels of a run without its context."""
    return Peak(run.peak_requested_bytes, run.peak_allocated_bytes, run.peak_reserved_bytes, run.peak_reserved_bytes)
