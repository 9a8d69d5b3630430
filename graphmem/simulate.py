"""The stages of an analysis, each from plain values to plain values: loaded, recorded, traced, replayed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from graphmem import sources
from graphmem.cudnn.library import Cudnn
from graphmem.devices import DEFAULT_DEVICE, Device
from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.estimate import Diagnostic, Estimate, found_later
from graphmem.question import Question, capture_key
from graphmem.runtimes import all_runtimes
from graphmem.runtimes.base import Graphs, Runtime, Taken
from graphmem.sources import OnnxModel, Sizes, TorchModel
from graphmem.sources.base import Built
from graphmem.summarize import Target, summarize
from graphmem.trace import Place, Trace
from graphmem.training import DTYPES, Inference, Training
from graphmem.versions import installed_version, version_notes

if TYPE_CHECKING:
    from graphmem.capture.session.run import CapturedModel
    from graphmem.sources.onnx_file import OnnxFile

Made = TypeVar("Made")

_OWN_STEP = "custom step function"


@dataclass(frozen=True)
class Recorded:
    """What a capture, or a plan, gives; it serves every question of its key.

    ``words`` describe the step. ``card_told`` is what the step's own code asked the card about itself, and was told.
    """

    made: CapturedModel | Taken
    words: str
    notes: tuple[str, ...] = ()
    card_told: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Traced:
    """A trace with what is known about how it came to be."""

    taken: Taken
    model: str
    step: str
    details: Mapping[str, Any] = field(default_factory=dict)


def answer(
    question: Question, captures: Captures | None = None, say: Callable[[str], None] = lambda _: None
) -> Estimate:
    """The whole flow: load, trace, replay, summarize. Raises :class:`GraphmemError`.

    ``captures`` holds what was captured for other questions about the same model, and takes what is captured for this.
    """
    shelf = Captures() if captures is None else captures
    say("loading")
    loaded = shelf.loaded(question)
    runtime = runtime_for(question, loaded)
    options = runtime.parse(question.alloc_conf, question.setting)
    say("tracing")
    recorded = shelf.recorded(question, loaded)
    say("replaying")
    return replay_on(_traced(question, loaded, runtime, recorded), runtime, options, question)


# --- what is loaded, what runs it -------------------------------------------------------------------------------------


def load(question: Question, files: dict[Any, OnnxFile] | None = None) -> OnnxModel | TorchModel:
    """The model, with every dimension of an ONNX file bound; ``files`` keeps ONNX files that were read."""
    return sources.load(
        question.model,
        question.example_inputs,
        batch=question.batch,
        dims=question.dims,
        input_shapes=question.input_shapes,
        shapes=question.shapes,
        optimization=question.optimization,
        files=files,
    )


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
    if question.cudnn is not None:
        raise _for_captures_only(loaded, "--cudnn")
    if step.dtype != "fp32" or step.amp:
        raise UsageError(f"{own} and --amp")
    if step.data_dependent is not None:
        raise _for_captures_only(loaded, "--data-dependent")
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


# --- captures ---------------------------------------------------------------------------------------------------------


class _Slot:
    """The last of what was made, or why it could not be, with what it was made for."""

    def __init__(self) -> None:
        self._key: object = None
        self._made: Any = None
        self._error: GraphmemError | None = None

    @property
    def made(self) -> Any:
        """What it holds; None for nothing, and for what could not be made."""
        return self._made

    def clear(self) -> None:
        """Hold nothing."""
        self._key = self._made = self._error = None

    def get(self, key: object, make: Callable[[], Made]) -> Made:
        """What was made for an equal ``key``, else what ``make`` makes now; errors too are kept."""
        if self._key is None or self._key != key:
            self.clear()  # before the next is made
            try:
                self._made = make()
            except GraphmemError as error:
                self._error = error
            self._key = key
        if self._error is not None:
            raise self._error.with_traceback(None)
        made: Made = self._made
        return made


class Captures:
    """What was captured last for one model, kept for the next question: one with an equal :class:`CaptureKey` takes it.

    A step's own code may ask the card for its name or its memory; what such a step gave serves only cards that would
    have said the same. One capture is kept at a time, so questions are best asked key by key.
    """

    def __init__(self) -> None:
        self._files: dict[Any, OnnxFile] = {}
        self._models, self._records = _Slot(), _Slot()

    def loaded(self, question: Question) -> OnnxModel | TorchModel:
        """The model of a question. An ONNX file is read once; a factory is made anew for every capture, as its code may
        keep a state."""
        recorded: Recorded | None = self._records.made
        card = question.setting.device
        if recorded is not None and any(_card_says(card, fact) != told for fact, told in recorded.card_told.items()):
            self._models.clear()
            self._records.clear()
        key = capture_key(question)
        return self._models.get(key.loading if question.is_onnx else key, lambda: load(question, self._files))

    def recorded(self, question: Question, loaded: OnnxModel | TorchModel) -> Recorded:
        """The capture or the plan for a question, whose model :meth:`loaded` gave."""
        return self._records.get(capture_key(question), lambda: record(question, loaded))


def record(question: Question, loaded: OnnxModel | TorchModel) -> Recorded:
    """Plan the graph, or capture the step. Raises :class:`GraphmemError`."""
    if isinstance(loaded, OnnxModel):
        if question.planner is None:
            from graphmem.sources.onnx_training import as_torch_model

            return _record_step(question, as_torch_model(loaded))
        options = question.planner.parse(question.alloc_conf, question.setting)
        return Recorded(question.planner.plan(loaded.sessions, options, question.iterations), "inference")
    if loaded.framework == "Keras" and (question.step.dtype != "fp32" or question.step.amp):
        raise UsageError(f"{loaded.name}: set the precision with keras.config.set_dtype_policy; drop --dtype and --amp")
    return _record_step(question, loaded)


def _record_step(question: Question, loaded: TorchModel) -> Recorded:
    built = _BuiltWith(loaded.build)
    captured, told = _capture(replace(loaded, build=built), question)
    if captured.custom_step and not any(s.place == Place.DEVICE for s in captured.trace.storages):
        raise SourceError(
            f"{loaded.name} returned nothing and put nothing on the GPU; let it return (model, inputs), or run the "
            "whole step itself on the device 'cuda'"
        )
    step = question.step
    words = step.describe(built.weights(step)) if not captured.custom_step else loaded.step_words or _OWN_STEP
    return Recorded(captured, words, loaded.notes, told)


def _capture(
    loaded: TorchModel, question: Question, *, record_graph: bool = False
) -> tuple[CapturedModel, dict[str, Any]]:
    """The captured step, and what its code was told of the card."""
    installed_version()  # one that is too old is refused before it is imported
    from graphmem.capture.device.pretend_device import pretended
    from graphmem.capture.session.run import capture_model

    card = question.setting.device
    device = pretended(card)
    with contextlib.ExitStack() as stack:
        cudnn = stack.enter_context(Cudnn(str(question.cudnn), card)) if question.cudnn is not None else None
        captured = capture_model(
            loaded.build,
            question.sizes,
            question.step,
            name=loaded.name,
            device=device,
            torch_version=question.setting.torch_version,
            iterations=question.iterations,
            build_on=question.build_on,
            record_graph=record_graph,
            cudnn=cudnn,
        )
    return captured, {fact: _card_says(card, fact) for fact in sorted(device.told)}


def _card_says(card: Device, fact: str) -> Any:
    return {"name": card.name, "total_bytes": card.capacity_bytes}[fact]


def operator_graph(question: Question) -> Any:
    """The ``torch.fx.Graph`` of the operators of a captured step. Raises :class:`UsageError` for an ONNX graph."""
    loaded = load(question)
    if isinstance(loaded, OnnxModel):
        raise UsageError(f"{loaded.name} is an ONNX graph already; only PyTorch models are recorded as torch.fx graphs")
    return _capture(loaded, question, record_graph=True)[0].graph


class _BuiltWith:
    """Builds a model and remembers the precisions that its weights were given, those of the most bytes first."""

    def __init__(self, build: Callable[[Sizes], Built | None]) -> None:
        self._build = build
        self._types: tuple[str, ...] = ()

    def __call__(self, sizes: Sizes) -> Built | None:
        built = self._build(sizes)
        if built is not None:
            counts: Counter[str] = Counter()
            for parameter in getattr(built.model, "parameters", tuple)():
                is_lazy = hasattr(parameter, "materialize")  # its shape is not known yet
                size = 0 if is_lazy else parameter.numel() * parameter.itemsize
                counts[str(parameter.dtype).removeprefix("torch.")] += size
            self._types = tuple(name for name, _ in counts.most_common())
        return built

    def weights(self, step: Training | Inference) -> str | None:
        """The precisions in words, ``bf16 and fp32``; None where ``--dtype`` said what they are, or nothing has any."""
        if step.dtype != "fp32" or not self._types:
            return None
        short = {spelling: name for name, spellings in DTYPES.items() for spelling in spellings}
        return " and ".join(short.get(name, name) for name in self._types)


# --- traces -----------------------------------------------------------------------------------------------------------


def _traced(question: Question, loaded: OnnxModel | TorchModel, runtime: Runtime[Any], recorded: Recorded) -> Traced:
    """What was recorded, as the runtime takes it on the card of the question."""
    made = recorded.made
    if isinstance(made, Taken):
        return Traced(made, loaded.name, recorded.words)
    setting, taken = question.setting, runtime.take(made.trace)
    assumptions = [*recorded.notes, *made.notes]
    if setting.device.compute_capability is None:
        assumptions.append(
            f"{setting.device.name} is no CUDA card: kernels are assumed to behave as on {DEFAULT_DEVICE}"
        )
    assumptions.extend(version_notes(setting.torch_version, made.installed_version))
    diagnostics = [Diagnostic("unknown", message, count) for message, count in made.unknown.items()]
    details: dict[str, Any] = {}
    if made.cudnn is not None:
        assumptions.extend(made.cudnn.notes())
        refused = made.cudnn.refused()
        diagnostics.extend(Diagnostic("warning", message, count) for message, count in refused.items())
        details["cudnn"] = made.cudnn.details()
    assumptions.extend(taken.assumptions)
    whole = replace(taken, assumptions=tuple(assumptions), diagnostics=(*diagnostics, *taken.diagnostics))
    return Traced(whole, loaded.name, recorded.words, details)


def replay_recorded(trace: Trace, question: Question) -> Estimate:
    """A trace that comes from elsewhere; it replays under its own settings unless others are asked for."""
    notes, runtime = dict(trace.notes), question.runtime_by_default(TorchModel.runtime)
    settings = runtime.recorded_options(notes) if question.alloc_conf is None else question.alloc_conf
    details: dict[str, Any] = {}
    if "recorded peak reserved" in notes:
        details["recorded"] = {"reserved_bytes": int(notes["recorded peak reserved"])}
    remarks = tuple(f"{key}: {value}" for key, value in trace.notes if key != "recorded peak reserved" and value)
    traced = Traced(Taken(trace, remarks), trace.source, "recorded run", details)
    return replay_on(traced, runtime, runtime.parse(settings, question.setting), question)


# --- replay -----------------------------------------------------------------------------------------------------------


def replay_on(traced: Traced, runtime: Runtime[Any], options: Any, question: Question) -> Estimate:
    """The trace in the runtime's allocator on the card of the question."""
    device, taken = question.setting.device, traced.taken
    runs = runtime.run(taken.trace, options, question.setting)
    diagnostics: Any = (*taken.diagnostics, *runs.diagnostics)
    details: Mapping[str, Any] = {**traced.details, **runs.details}
    if taken.findings is not None:
        diagnostics, details = found_later(diagnostics, details, partial(taken.findings, options))
    return summarize(
        taken.trace,
        runs.main,
        Target(device.name, device.capacity_bytes, device.context_bytes),
        model=traced.model,
        runtime=runtime.name,
        allocator=runtime.describe(options, question.setting),
        step=traced.step,
        limited=runs.limited,
        top=question.top,
        assumptions=(*_device_notes(question), *taken.assumptions),
        diagnostics=diagnostics,
        details=details,
    )


def _device_notes(question: Question) -> list[str]:
    device, notes = question.setting.device, []
    if question.device is None:
        notes.append(f"no GPU was named: {device.name} (give --gpu)")
    if not device.context_measured:
        notes.append(f"context of {device.name}: {device.context_source}")
    if device.capacity_assumed:
        notes.append(f"capacity of {device.name}: {device.capacity_source}")
    return notes
