"""The stages of an answer, each from plain values to plain values: loaded, recorded, traced, replayed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from graphmem.capture.threads import turn
from graphmem.captures import Captures, Recorded
from graphmem.cudnn.library import AUTO, NEVER
from graphmem.devices import DEFAULT_DEVICE, Device
from graphmem.errors import TraceError, UsageError
from graphmem.estimate import Diagnostic, Estimate, found_later
from graphmem.figures import Figure, Loads
from graphmem.question import Question
from graphmem.replay import Replay
from graphmem.runtimes import all_runtimes
from graphmem.runtimes.base import Graphs, Runs, Runtime, Setting, Taken
from graphmem.sources import OnnxModel, TorchModel
from graphmem.summarize import fits_card, summarize
from graphmem.trace import Trace
from graphmem.training import Training
from graphmem.units import format_bytes
from graphmem.versions import beyond_known, version_notes, workspace_variables


@dataclass(frozen=True)
class Traced:
    """A trace with what is known about how it came to be."""

    taken: Taken
    model: str
    step: str
    details: Mapping[str, Any] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)


def answer(
    question: Question, captures: Captures | None = None, say: Callable[[str], None] = lambda _: None
) -> Estimate:
    """The whole flow: load, trace, replay, summarize. Raises :class:`GraphmemError`.

    ``captures`` holds what was captured for other questions about the same model, and takes what is captured for this.
    What another thread loads and traces is waited for.
    """
    shelf = Captures() if captures is None else captures
    estimate, may_go_on = _answer(question, shelf, say)
    if may_go_on and (estimate.fit is None or not estimate.fit.fits):
        with turn():
            shelf.forget()
        estimate, _ = _answer(question, shelf, say)
    return estimate


#: Shares of the reserved bytes: an output smaller than the first cannot matter, a difference above the second is told.
_SMALL_OUTPUT, _TOLD_DIFFERENCE = 1 / 1000, 1 / 100


def beside_other_loop(estimate: Estimate, question: Question, say: Callable[[str], None] = lambda _: None) -> Estimate:
    """The estimate with the figures of the other loop in ``details["loop"]``, where the two differ by more than 1 %.

    One holds the model's output in a variable and one drops it (:data:`graphmem.training.LOOPS`); the other one is an
    analysis of its own. Raises :class:`GraphmemError`.
    """
    step = question.step
    if not isinstance(step, Training):
        return estimate
    loop = estimate.details.get("loop")
    if loop is None or loop["output_bytes"] < _SMALL_OUTPUT * estimate.reserved:
        return estimate
    other = "drop" if step.loop == "hold" else "hold"
    say(f"the same with --loop {other}")
    theirs = answer(replace(question, training=replace(step, loop=other), top=0), say=say)
    levels = ("allocated", "reserved", "device")
    if all(abs(getattr(theirs, n) - getattr(estimate, n)) <= _TOLD_DIFFERENCE * getattr(estimate, n) for n in levels):
        return estimate
    told = {f"other_{level}_bytes": getattr(theirs, level) for level in levels}
    return replace(estimate, details={**estimate.details, "loop": {**loop, "other": other, **told}})


def _is_torch_loop(loaded: OnnxModel | TorchModel) -> bool:
    return isinstance(loaded, OnnxModel) or loaded.framework != "Keras"


def _answer(question: Question, shelf: Captures, say: Callable[[str], None]) -> tuple[Estimate, bool]:
    """The estimate, and whether the program, run within the card of the question, may do otherwise."""
    with turn():
        say("loading")
        loaded = shelf.loaded(question)
        runtime = runtime_for(question, loaded)
        options = runtime.parse(question.alloc_conf, question.setting)
        say("tracing")
        recorded = shelf.recorded(question, loaded, say)
    say("replaying")
    estimate = replay_on(_traced(question, loaded, runtime, recorded), runtime, options, question)
    return estimate, recorded.could_go_on(question)


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
    if question.cudnn not in (AUTO, NEVER):
        raise _for_captures_only(loaded, "--cudnn")
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


def _traced(question: Question, loaded: OnnxModel | TorchModel, runtime: Runtime[Any], recorded: Recorded) -> Traced:
    """What was recorded, as the runtime takes it on the card of the question."""
    made = recorded.made
    if isinstance(made, Taken):
        loads = _loads(made.trace, (), question.setting.device, _loads_eagerly())
        return Traced(made, loaded.name, recorded.words, loads=loads)
    setting, taken = question.setting, runtime.take(made.trace)
    assumptions = [*recorded.notes, *made.notes]
    assumptions.extend(version_notes(setting.torch_version, made.installed_version))
    assumptions.extend(f"{name}={text} of the environment" for name, text in workspace_variables(os.environ))
    diagnostics = [Diagnostic("headline", message) for message in beyond_known(setting.torch_version)]
    diagnostics += [Diagnostic("assumed", message, count) for message, count in made.decided.items()]
    diagnostics.extend(Diagnostic("note", message) for message in made.refusals)
    diagnostics.extend(Diagnostic("unknown", message, count) for message, count in made.unknown.items())
    details: dict[str, Any] = {}
    if made.ending is not None:
        details["program"] = {**asdict(made.ending), "words": made.ending.words()}
        if made.ending.failed:
            diagnostics.append(
                Diagnostic("warning", f"{made.ending.words()}; the figures are of what it did until then")
            )
    if isinstance(question.step, Training) and not made.custom_step and _is_torch_loop(loaded):
        details["loop"] = {"loop": question.step.loop, "output_bytes": made.output_bytes}
    if made.cudnn is not None:
        assumptions.extend(made.cudnn.notes())
        refused = made.cudnn.refused()
        diagnostics.extend(Diagnostic("warning", message, count) for message, count in refused.items())
        details["cudnn"] = made.cudnn.details()
    assumptions.extend(taken.assumptions)
    whole = replace(taken, assumptions=tuple(assumptions), diagnostics=(*diagnostics, *taken.diagnostics))
    loads = _loads(made.trace, made.communicators, setting.device, _loads_eagerly())
    return Traced(whole, loaded.name, recorded.words, details, loads)


def replay_recorded(trace: Trace, question: Question) -> Estimate:
    """A trace that comes from elsewhere; it replays under its own settings unless others are asked for."""
    notes, runtime = dict(trace.notes), question.runtime_by_default(TorchModel.runtime)
    settings = runtime.recorded_options(notes) if question.alloc_conf is None else question.alloc_conf
    details: dict[str, Any] = {}
    if "recorded peak reserved" in notes:
        details["recorded"] = {"reserved_bytes": _recorded_bytes(notes["recorded peak reserved"])}
    remarks = tuple(f"{key}: {value}" for key, value in trace.notes if key != "recorded peak reserved" and value)
    loads = _loads(trace, (), question.setting.device, eager=False)  # the environment was another machine's
    traced = Traced(Taken(trace, remarks), trace.source, "recorded run", details, loads)
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
    context = question.setting.device.outside(loads)
    setting = _holding(question.setting, sum(figure.bytes for figure in context))
    runs = runtime.run(taken.trace, options, setting)
    diagnostics: Any = (*_headlines(setting.device), *taken.diagnostics, *_plans_told(runs.limited), *runs.diagnostics)
    if not traced.details.get("cudnn", {}).get("plans_asked"):
        diagnostics = (*diagnostics, *_workspaces_told(taken.trace, runs.main.peak_reserved_bytes))
    details: Mapping[str, Any] = {**traced.details, **runs.details}
    if taken.findings is not None:
        diagnostics, details = found_later(diagnostics, details, partial(taken.findings, options))
    return summarize(
        taken.trace,
        runs.main,
        setting.device,
        model=traced.model,
        runtime=runtime.name,
        allocator=runtime.describe(options, setting),
        step=traced.step,
        limited=runs.limited,
        top=question.top,
        assumptions=(*_device_notes(question, context), *taken.assumptions),
        diagnostics=diagnostics,
        details=details,
        context=context,
        loads=loads,
        sure=refused
        or _is_sure(runs, context, lambda size: runtime.run(taken.trace, options, _holding(setting, size)), setting),
    )


def _plans_told(limited: Replay | None) -> tuple[Diagnostic, ...]:
    """What there is to say of a card that refuses libraries their workspaces."""
    if limited is None or not limited.later_plans:
        return ()
    words = "cuDNN runs convolutions of this shape with a later plan, because the first one's workspace does not fit"
    return (Diagnostic("note", words, limited.later_plans),)


#: The share of the reserved peak from which on a predicted workspace is worth a remark.
_NOTABLE = 0.02


def _workspaces_told(trace: Trace, peak: int) -> tuple[Diagnostic, ...]:
    """How much of the answer may be workspaces that cuDNN could tell."""
    sizes = [storage.bytes for storage in trace.storages if storage.label.startswith("cuDNN workspace")]
    largest = max(sizes, default=0)
    if not largest or largest < _NOTABLE * peak:
        return ()
    words = (
        f"workspaces of convolutions are predicted, the largest of {format_bytes(largest)}, {largest / peak:.0%} of "
        "the reserved peak; with graphmem[cudnn] installed cuDNN tells them itself"
    )
    return (Diagnostic("note", words),)


def _holding(setting: Setting, context_bytes: int) -> Setting:
    """The setting with a context of this size."""
    return replace(setting, device=replace(setting.device, context_bytes=context_bytes))


def _is_sure(runs: Runs, context: Sequence[Figure], run: Callable[[int], Runs], setting: Setting) -> bool:
    """Whether the run fits, or does not, with the least and the most context too; ``run`` runs it with one of a size.

    It runs again only where the sizes leave it open: where it fits as it is with the most there is nothing to try, nor
    where what is live at once exceeds the card with the least.
    """
    device = setting.device
    room = device.capacity_bytes - device.others_bytes
    if fits_card(runs.main, runs.limited, device):
        size = sum(figure.most_bytes for figure in context)
        if runs.limited is None and runs.main.peak_reserved_bytes + size <= room:
            return True
    else:
        size = sum(figure.least_bytes for figure in context)
        if runs.main.peak_requested_bytes + size > room:
            return True
    if size == device.context_bytes:
        return True
    other = run(size)
    return fits_card(runs.main, runs.limited, device) == fits_card(
        other.main, other.limited, _holding(setting, size).device
    )


#: Operators of PyTorch, of ONNX and of Keras for which cuDNN loads its engines. Attention loads none of those that
#: were measured.
_ASKS_CUDNN = re.compile(
    r"convolution|_conv_|(?<![A-Za-z])conv[123]d|Conv(Transpose|2D|3D)?$|cudnn_(rnn|conv)|_rnn|LSTM|GRU"
)


def _loads(trace: Trace, ranks: tuple[int, ...], card: Device, eager: bool) -> Loads:
    """What a run of this trace makes a process load."""
    uses_cudnn = any(_ASKS_CUDNN.search(operator.name) for operator in trace.operators)
    return Loads(uses_cudnn, ranks, eager, card.cuda_version)


def _loads_eagerly() -> bool:
    return os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def _headlines(device: Device) -> Iterator[Diagnostic]:
    """What must be read before any figure for this card."""
    if device.compute_capability is None:
        yield Diagnostic(
            "headline",
            f"{device.name} is no NVIDIA card: operators are assumed to take what they take on an {DEFAULT_DEVICE}, "
            "in PyTorch's allocator, which ROCm shares. The workspaces of hipBLASLt (80 MiB in the ROCm release of "
            "PyTorch 2.13, pull request 197201) and of MIOpen are not modelled",
        )


def _device_notes(question: Question, context: Sequence[Figure]) -> list[str]:
    device, notes = question.setting.device, []
    if question.device is None:
        notes.append(f"no GPU was named: {device.name} (give --gpu)")
    if not device.context_measured:
        notes.extend(f"{figure.name} of {device.name}: {figure.source}" for figure in context)
    if device.capacity_assumed:
        notes.append(f"capacity of {device.name}: {device.capacity_source}")
    return notes
