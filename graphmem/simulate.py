"""The stages of an analysis, each from plain values to plain values: the step, the card, the trace, the replay."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphmem.allocators.base import Allocator
from graphmem.cudnn.library import Cudnn, find_library
from graphmem.devices import DEFAULT_DEVICE, Device, device_named
from graphmem.errors import SourceError, UsageError
from graphmem.estimate import Diagnostic, Estimate
from graphmem.graph.tensorflow_executor import plan_executor
from graphmem.replay import replay
from graphmem.runtimes import mxnet, onnxruntime, pytorch, runtime_named, tensorflow
from graphmem.runtimes.onnxruntime_findings import findings
from graphmem.runtimes.onnxruntime_options import parse_options
from graphmem.sources import OnnxModel, Sizes, TorchModel
from graphmem.sources.base import Built
from graphmem.summarize import Target, fits_without_retry, summarize
from graphmem.trace import Place, Trace
from graphmem.training import DTYPES, Inference, Training

_OWN_STEP = "custom step function"

#: Runs of an ONNX session: the second finds the arena that the first one left.
SESSION_RUNS = 2


@dataclass(frozen=True)
class RunsOn:
    """Where a run happens: the card, the runtime (None: natural to the model), its options and PyTorch's version."""

    device: Device
    device_was_assumed: bool
    runtime: str | None
    alloc_conf: str | None
    torch_version: tuple[int, int]
    torch_version_was_given: bool
    #: The cuDNN to ask for the plans of convolutions: a path, or ``installed``; None: they are predicted.
    cudnn: str | None = None


@dataclass(frozen=True)
class Traced:
    """A trace with what is known about how it came to be."""

    trace: Trace
    model: str
    runtime: str
    step: str
    assumptions: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    alloc_conf: str | None = None
    details: tuple[tuple[str, Any], ...] = ()


def step_for(model: Any, training: Training | Inference | bool | None) -> Training | Inference:
    """The step asked for; by default inference for ONNX files and training for everything else."""
    if isinstance(training, bool):
        return Training() if training else Inference()
    if training is not None:
        if not isinstance(training, (Training, Inference)):
            raise UsageError(f"training is a graphmem.Training, a graphmem.Inference or a bool, not {training!r}")
        return training
    return Inference() if _is_onnx(model) else Training()


def _is_onnx(model: Any) -> bool:
    """Whether the model is an ONNX file, or a list of them."""
    names = model if isinstance(model, (list, tuple)) else [model]
    return all(isinstance(name, (str, Path)) and Path(name).suffix.lower() == ".onnx" for name in names)


def target_for(
    runtime: str | None,
    device: str | Device | None,
    alloc_conf: str | None,
    torch_version: str | None,
    cudnn: str | Path | None = None,
) -> RunsOn:
    """Read the names the user gave. Raises :class:`UsageError` for any that is unknown."""
    card = device if isinstance(device, Device) else device_named(device or DEFAULT_DEVICE)
    if cudnn is not None:
        find_library(cudnn)  # before a model is loaded in vain
    return RunsOn(
        device=card,
        device_was_assumed=device is None,
        runtime=None if runtime is None else runtime_named(runtime, ""),
        alloc_conf=alloc_conf,
        torch_version=pytorch.version_named(torch_version),
        torch_version_was_given=torch_version is not None,
        cudnn=None if cudnn is None else str(cudnn),
    )


# --- traces -----------------------------------------------------------------------------------------------------------


def trace_of(
    loaded: OnnxModel | TorchModel,
    step: Training | Inference,
    target: RunsOn,
    sizes: Sizes,
    iterations: int | None,
    build_on: str,
) -> Traced:
    """The trace of the step: planned for a graph, captured for a PyTorch model."""
    if isinstance(loaded, OnnxModel):
        if not isinstance(step, Training) and runtime_named(target.runtime, "onnxruntime") != "pytorch":
            return _planned(loaded, step, target, iterations)
        return _captured(_onnx_under_pytorch(loaded, step, target), step, target, sizes, iterations, build_on)
    if runtime_named(target.runtime, loaded.runtime) == "onnxruntime":
        raise UsageError(
            f"{loaded.name} is a {loaded.framework} model; export it to ONNX for ONNX Runtime, "
            "or use --runtime pytorch or tensorflow"
        )
    return _captured(loaded, step, target, sizes, iterations, build_on)


def _onnx_under_pytorch(loaded: OnnxModel, step: Training | Inference, target: RunsOn) -> TorchModel:
    """The graph as PyTorch operators. Raises :class:`UsageError` for what such a graph cannot do."""
    from graphmem.sources.onnx_training import as_torch_model

    if runtime_named(target.runtime, "pytorch") != "pytorch":
        raise UsageError(f"{loaded.name}: an ONNX graph is trained under --runtime pytorch, not {target.runtime}")
    if step.dtype != "fp32":
        raise UsageError(f"{loaded.name}: an ONNX graph has its own precision; drop --dtype")
    if isinstance(step, Training) and step.checkpoint_activations:
        raise UsageError(f"{loaded.name}: an ONNX graph has no blocks to recompute; drop --checkpoint-activations")
    return as_torch_model(loaded)


def _planned(loaded: OnnxModel, step: Inference, target: RunsOn, iterations: int | None) -> Traced:
    if target.cudnn is not None:
        raise UsageError(f"{loaded.name}: --cudnn is for PyTorch operators; drop it, or use --runtime pytorch")
    if step.dtype != "fp32" or step.amp:
        raise UsageError(f"{loaded.name}: an ONNX graph has its own precision; drop --dtype and --amp")
    if step.data_dependent is not None:
        raise UsageError(f"{loaded.name}: --data-dependent is for PyTorch operators; drop it, or use --runtime pytorch")
    runtime = runtime_named(target.runtime, "onnxruntime")
    if runtime == "tensorflow":
        return _planned_for_tensorflow(loaded, iterations)
    if runtime != "onnxruntime":
        raise UsageError(
            f"{loaded.name}: ONNX graphs run under --runtime onnxruntime, tensorflow or pytorch, not {runtime}"
        )
    options = parse_options(target.alloc_conf or "").on(target.device.compute_capability)
    sessions = [graphs * (iterations or SESSION_RUNS) if len(graphs) == 1 else graphs for graphs in loaded.sessions]
    planned = onnxruntime.plan(sessions, options)
    said, details = findings(sessions, options, planned)
    assumptions = [*onnxruntime.notes_of(options, planned), *(f"{key}: {value}" for key, value in planned.trace.notes)]
    unknown = [
        Diagnostic("unknown", f"working buffers of {name}", count) for name, count in sorted(planned.unknown.items())
    ]
    diagnostics = (*unknown, *(Diagnostic("note", sentence) for sentence in said))
    figures = tuple(details.items())
    return Traced(planned.trace, loaded.name, runtime, "inference", tuple(assumptions), diagnostics, details=figures)


def optimization_for(model: Any, step: Training | Inference, target: RunsOn) -> tuple[str | None, str]:
    """The (level, provider) to optimize an ONNX file for while it is loaded; no level for other runtimes."""
    if isinstance(step, Training) or not _is_onnx(model):
        return None, "cpu"
    if runtime_named(target.runtime, "onnxruntime") != "onnxruntime":
        return None, "cpu"
    options = parse_options(target.alloc_conf or "")
    return options.fusion_level, options.session.provider


def _planned_for_tensorflow(loaded: OnnxModel, iterations: int | None) -> Traced:
    if len(loaded.sessions) != 1 or len(loaded.sessions[0]) != 1:
        raise UsageError("several ONNX files, or runs of several shapes (--shapes), are for --runtime onnxruntime")
    trace = plan_executor(loaded.graph, iterations=iterations or SESSION_RUNS)
    assumptions = (*(f"{key}: {value}" for key, value in trace.notes), tensorflow.XLA_ASSUMED)
    return Traced(tensorflow.with_eigen_scratch(trace), loaded.name, "tensorflow", "inference", assumptions)


def operator_graph(
    loaded: OnnxModel | TorchModel, step: Training | Inference, target: RunsOn, sizes: Sizes, iterations: int | None
) -> Any:
    """The ``torch.fx.Graph`` of the operators of a captured step. Raises :class:`UsageError` for an ONNX graph."""
    if isinstance(loaded, OnnxModel):
        raise UsageError(f"{loaded.name} is an ONNX graph already; only PyTorch models are recorded as torch.fx graphs")
    return _capture(loaded, step, target, sizes, iterations, "host", record_graph=True).graph


def _capture(
    loaded: TorchModel,
    step: Training | Inference,
    target: RunsOn,
    sizes: Sizes,
    iterations: int | None,
    build_on: str,
    *,
    record_graph: bool = False,
) -> Any:
    pytorch.installed_version()  # one that is too old is refused before it is imported
    from graphmem.capture.device.pretend_device import pretended
    from graphmem.capture.session.run import capture_model

    wanted = replace(sizes, training=isinstance(step, Training), iterations=iterations)
    with contextlib.ExitStack() as stack:
        cudnn = stack.enter_context(Cudnn(target.cudnn, target.device)) if target.cudnn is not None else None
        return capture_model(
            loaded.build,
            wanted,
            step,
            name=loaded.name,
            device=pretended(target.device),
            torch_version=target.torch_version,
            iterations=iterations,
            build_on=build_on,
            record_graph=record_graph,
            cudnn=cudnn,
        )


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


def _captured(
    loaded: TorchModel,
    step: Training | Inference,
    target: RunsOn,
    sizes: Sizes,
    iterations: int | None,
    build_on: str,
) -> Traced:
    if loaded.framework == "Keras" and (step.dtype != "fp32" or step.amp):
        raise UsageError(f"{loaded.name}: set the precision with keras.config.set_dtype_policy; drop --dtype and --amp")
    built = _BuiltWith(loaded.build)
    captured = _capture(replace(loaded, build=built), step, target, sizes, iterations, build_on)
    assumptions = [*loaded.notes, *captured.notes]
    if target.device.compute_capability is None:
        name = target.device.name
        assumptions.append(f"{name} is no CUDA card: kernels are assumed to behave as on {DEFAULT_DEVICE}")
    assumptions.extend(pytorch.version_notes(target.torch_version, captured.installed_version))
    if captured.custom_step and not any(s.place == Place.DEVICE for s in captured.trace.storages):
        raise SourceError(
            f"{loaded.name} returned nothing and put nothing on the GPU; let it return (model, inputs), or run the "
            "whole step itself on the device 'cuda'"
        )
    diagnostics = [Diagnostic("unknown", message, count) for message, count in captured.unknown.items()]
    if captured.cudnn is not None:
        assumptions.extend(captured.cudnn.notes())
        refused = captured.cudnn.refused()
        diagnostics.extend(Diagnostic("warning", message, count) for message, count in refused.items())
    words = step.describe(built.weights(step)) if not captured.custom_step else loaded.step_words or _OWN_STEP
    runtime, trace = runtime_named(target.runtime, loaded.runtime), captured.trace
    if runtime == "tensorflow":
        assumptions += [tensorflow.CAPTURED_ASSUMED, tensorflow.XLA_ASSUMED]
        trace = tensorflow.with_eigen_scratch(trace)
    if runtime == "mxnet":
        assumptions.append(mxnet.CAPTURED_ASSUMED)
    details = (("cudnn", captured.cudnn.details()),) if captured.cudnn is not None else ()
    return Traced(trace, loaded.name, runtime, words, tuple(assumptions), tuple(diagnostics), details=details)


def recorded(trace: Trace, target: RunsOn) -> Traced:
    """A trace that comes from elsewhere; it replays under its own settings unless others are asked for."""
    notes = dict(trace.notes)
    settings = notes.get("allocator settings", "")
    details: list[tuple[str, Any]] = []
    if "recorded peak reserved" in notes:
        details.append(("recorded", {"reserved_bytes": int(notes["recorded peak reserved"])}))
    runtime = runtime_named(target.runtime, "pytorch")
    remarks = tuple(f"{key}: {value}" for key, value in trace.notes if key != "recorded peak reserved" and value)
    return Traced(trace, trace.source, runtime, "recorded run", remarks, (), settings, tuple(details))


# --- replay -----------------------------------------------------------------------------------------------------------


def replay_on(traced: Traced, target: RunsOn, top: int) -> Estimate:
    """Replay the trace without a limit and, where that exceeds the card, once more within the card."""
    device = target.device
    card = Target(device.name, device.capacity_bytes, device.context_bytes)
    diagnostics, details = traced.diagnostics, dict(traced.details)
    if traced.runtime == "tensorflow":
        options = tensorflow.options_of(target.alloc_conf)
        allocator = tensorflow.describe(options, device)
        runs = tensorflow.run_on_card(traced.trace, options, device)
        free, limited = runs.main, runs.limited
        diagnostics, details = (*diagnostics, *runs.notes), {**details, **dict(runs.details)}
    else:
        make, allocator = _allocator_factory(traced, target)
        free, limited = replay(traced.trace, make(None)), None
        if free.out_of_memory is not None:  # a limit of the allocator's own, such as gpu_mem_limit
            limited = free
        elif not fits_without_retry(free, card):
            limited = replay(traced.trace, make(max(0, device.capacity_bytes - device.context_bytes)))
    return summarize(
        traced.trace,
        free,
        card,
        model=traced.model,
        runtime=traced.runtime,
        allocator=allocator,
        step=traced.step,
        limited=limited,
        top=top,
        assumptions=(*_device_notes(target), *traced.assumptions),
        diagnostics=diagnostics,
        details=details,
    )


def _allocator_factory(traced: Traced, target: RunsOn) -> tuple[Callable[[int | None], Allocator], str]:
    """(capacity in bytes or None -> fresh allocator, its description)."""
    if traced.runtime == "onnxruntime":
        options = target.alloc_conf or ""
        reserved = onnxruntime.reserved_allocations(traced.trace)
        sessions = onnxruntime.session_count(traced.trace)
        described = f"ONNX Runtime BFC arena ({options or 'default options'})"
        make = onnxruntime.default_allocator
        return lambda limit: make(options, limit, reserved=reserved, sessions=sessions), described
    if traced.runtime == "mxnet":
        pool, card = mxnet.options_of(target.alloc_conf), target.device
        return lambda limit: mxnet.default_allocator(pool, None if limit is None else card), mxnet.describe(pool)
    given = target.alloc_conf if target.alloc_conf is not None else traced.alloc_conf
    text = pytorch.configuration_text(given)
    version = ".".join(map(str, target.torch_version))
    described = f"PyTorch {version} caching allocator ({text or 'default configuration'})"
    return lambda limit: pytorch.default_allocator(text, limit, target.torch_version), described


def _device_notes(target: RunsOn) -> list[str]:
    device, notes = target.device, []
    if target.device_was_assumed:
        notes.append(f"no GPU was named: {device.name} (give --gpu)")
    if not device.context_measured:
        notes.append(f"context of {device.name}: {device.context_source}")
    if device.capacity_assumed:
        notes.append(f"capacity of {device.name}: {device.capacity_source}")
    return notes
