"""The contents of the accuracy report: comparisons by kind of truth, summarised.

Kinds of truth stand in sections of their own and are never added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmem.accuracy.compare import Comparison
from graphmem.accuracy.coverage import Coverage, coverage
from graphmem.accuracy.published.section import PublishedSection
from graphmem.accuracy.record import GPU, ONNXRUNTIME_CPU, OUT_OF_MEMORY, STUB_DRIVER, TENSORFLOW_CPU
from graphmem.accuracy.statistics import ErrorSummary, summarize_errors
from graphmem.runtimes import runtime_named
from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.training import Training
from graphmem.units import format_bytes

WORST = 10
#: The kinds of records, in the order of their sections.
SOURCES = (GPU, STUB_DRIVER, ONNXRUNTIME_CPU, TENSORFLOW_CPU)

#: Columns of the table of verdicts: programs with each claim about the reserved peak, and those of them whose peaks lay
#: where they were said to lie.
VERDICTS = (
    "programs", "number", "equal in both peaks", "exact", "met", "interval", "interval met", "open", "open met",
    "likely", "though equal",
)  # fmt: skip

_INTRODUCTIONS = {
    GPU: "Peaks measured by graphmem measure on real cards. Device memory is what the run added to the card's use.",
    STUB_DRIVER: "Peaks of the real CUDA build of PyTorch on a driver that pretends to be a card: the allocator, the "
    "operators and cuDNN's plans are the real ones; what the driver and the context take is not there, so there is "
    "no device level.",
    ONNXRUNTIME_CPU: "Sessions of the real ONNX Runtime on a CPU, whose arena is the same code as a card's: the most "
    "it had in use (allocated) and what it held at the end (reserved). Predicted for the CPU provider, from the graph "
    "without its weights, by the optimizer of the installed onnxruntime.",
    TENSORFLOW_CPU: "Training steps of Keras models in the real TensorFlow on a CPU, whose memory came from the same "
    "allocator as a card's. The recorded allocations given to graphmem's allocator show what the allocator is worth; "
    "the prediction of the step runs the model on Keras's PyTorch backend as a card would, so kernels and the order "
    "of frees differ from TensorFlow's on a CPU.",
}
_TITLES = {
    GPU: "Real GPUs",
    STUB_DRIVER: "Stub driver",
    ONNXRUNTIME_CPU: "ONNX Runtime on the CPU",
    TENSORFLOW_CPU: "TensorFlow on the CPU",
}
_ARENA = ("allocated", "reserved")
_LEVELS = {
    GPU: ("allocated", "reserved", "device"),
    STUB_DRIVER: _ARENA,
    ONNXRUNTIME_CPU: _ARENA,
    TENSORFLOW_CPU: _ARENA,
}
_AWAITS = {
    GPU: "No record yet. graphmem measure --zoo on a machine with a CUDA GPU makes them; put the file under "
    "models_zoo/measured/<gpu>/.",
    STUB_DRIVER: "No record.",
    ONNXRUNTIME_CPU: "No record. graphmem measure --runtime onnxruntime model.onnx makes them, without a GPU.",
    TENSORFLOW_CPU: "No record.",
}


@dataclass(frozen=True)
class Group:
    """The errors of one level, or of one kind of case."""

    name: str
    summary: ErrorSummary


@dataclass(frozen=True)
class Section:
    """One kind of truth. ``levels`` summarises every level; ``groups`` reserved memory by what the cases are;
    ``covered``: how often each level lay in its interval."""

    title: str
    introduction: str
    comparisons: tuple[Comparison, ...]
    levels: tuple[Group, ...]
    groups: tuple[tuple[str, tuple[Group, ...]], ...]
    failures: int
    capped: tuple[Comparison, ...]
    not_compared: tuple[tuple[str, str], ...]
    worst: tuple[Comparison, ...]
    replayed: tuple[Comparison, ...] = ()
    covered: tuple[tuple[str, tuple[Coverage, ...]], ...] = ()


@dataclass(frozen=True)
class Contents:
    """The contents of a report: comparisons, graphmem on published runs, what others published of theirs, and which
    versions made the predictions. ``sources`` are the kinds of records that have a section; ``verdicts``: rows of
    :data:`VERDICTS`."""

    comparisons: Sequence[Comparison]
    runs: PublishedSection | None
    published: Any
    about: str
    sources: Sequence[str] = SOURCES
    verdicts: Sequence[Sequence[Any]] = ()


def section(source: str, comparisons: Sequence[Comparison]) -> Section:
    """The report's part on the records of one source."""
    mine = [item for item in comparisons if item.record.machine is not None and item.record.machine.source == source]
    free = [item for item in mine if item.is_comparable and item.record.cap_bytes is None]
    levels = [Group(level, _summary(free, level)) for level in _LEVELS[source]] if free else []
    return Section(
        title=_TITLES[source],
        introduction=_INTRODUCTIONS[source] if mine else _AWAITS[source],
        comparisons=tuple(free),
        levels=tuple(levels),
        groups=tuple((name, _groups(free, key)) for name, key in _KEYS[source].items()) if free else (),
        failures=sum(item.exceeds_cap for item in free),
        capped=tuple(item for item in mine if item.record.cap_bytes is not None),
        not_compared=tuple((item.record.case.name, _why_not(item)) for item in mine if not item.is_comparable),
        worst=tuple(sorted(free, key=lambda item: (-abs(item.error("reserved")), item.record.case.name))[:WORST]),
        replayed=tuple(item for item in mine if item.predicted.replayed is not None),
        covered=tuple(
            (level, coverage([item.judged(level) for item in free if level in item.predicted.intervals]))
            for level in _LEVELS[source]
        )
        if free
        else (),
    )


def reason(comparison: Comparison) -> str:
    """The known reasons for a difference, from both sides' figures."""
    words = []
    if comparison.error("reserved") == 0 and comparison.error("allocated") == 0:
        return "equal to the byte"
    if comparison.error("allocated") == 0:
        words.append("allocated peak equal: the segments differ")
    if comparison.predicted.estimated_buffer_bytes:
        words.append(
            f"cuDNN workspaces are estimates, up to {format_bytes(comparison.predicted.estimated_buffer_bytes)}"
        )
    if comparison.predicted.unknown:
        words.append(f"{comparison.predicted.unknown} times something not modelled")
    measured = comparison.record.measured
    if measured is not None and measured.retries:
        words.append(f"{measured.retries} retries with an emptied cache")
    if comparison.predicted.replayed is not None:
        words.append("recorded with a CPU's kernels and executor, predicted with a card's")
        words.append(f"a card's workspaces take {format_bytes(comparison.predicted.workspace_bytes)} at the peak")
    return "; ".join(words) or "not explained"


# --- groups -----------------------------------------------------------------------------------------------------------


def _family(comparison: Comparison) -> str:
    from graphmem.errors import SourceError
    from graphmem.sources.zoo import zoo_entry

    model = comparison.record.case.model
    if model in _VARIANTS:
        return _VARIANTS[model]
    try:
        return str(zoo_entry(model.removeprefix("zoo:")).family)
    except SourceError:
        return "other"


#: Families of the zoo's variants, which have no entry of their own.
_VARIANTS = {
    "models_zoo.variants:resnet50_channels_last": "ResNet",
    "models_zoo.variants:llama_small": "Llama",
    "models_zoo.variants:llama_small_lora": "Llama",
}


def _model(comparison: Comparison) -> str:
    return Path(comparison.record.case.model).stem


def _level(comparison: Comparison) -> str:
    return parse_options(comparison.record.case.alloc_conf).level


def _runs(comparison: Comparison) -> str:
    case = comparison.record.case
    runs = len(set(case.shapes.split(";")))
    return "runs of several sizes" if runs > 1 else "runs of one size"


def _optimizer(comparison: Comparison) -> str:
    step = comparison.record.case.step
    return step.optimizer if isinstance(step, Training) else "inference"


def _precision(comparison: Comparison) -> str:
    step = comparison.record.case.step
    return f"{step.amp} autocast" if step.amp else step.dtype


def _options(comparison: Comparison) -> str:
    step, case = comparison.record.case.step, comparison.record.case
    words = [case.alloc_conf] if case.alloc_conf else []
    if isinstance(step, Training):
        words += ["activation checkpointing"] if step.checkpoint_activations else []
        words += ["micro-batches"] if step.grad_accum > 1 else []
        words += ["clipped gradients"] if step.clip_grad_norm is not None else []
    return ", ".join(words) or "none"


def _card(comparison: Comparison) -> str:
    machine = comparison.record.machine
    assert machine is not None
    runtime = comparison.record.case.runtime
    package = {"pytorch": "torch"}.get(runtime, runtime)
    return f"{machine.gpu}, {runtime_named(runtime).title} {machine.versions.get(package, '?')}"


_Keys = Mapping[str, Callable[[Comparison], str]]
_PYTORCH_KEYS: _Keys = {
    "family": _family,
    "optimizer": _optimizer,
    "precision": _precision,
    "options": _options,
    "card": _card,
}
_KEYS: Mapping[str, _Keys] = {
    GPU: _PYTORCH_KEYS,
    STUB_DRIVER: _PYTORCH_KEYS,
    ONNXRUNTIME_CPU: {"model": _model, "graph level": _level, "sizes": _runs, "machine": _card},
    TENSORFLOW_CPU: {"optimizer": _optimizer, "machine": _card},
}


def _groups(comparisons: Sequence[Comparison], key: Callable[[Comparison], str]) -> tuple[Group, ...]:
    found: dict[str, list[Comparison]] = {}
    for item in comparisons:
        found.setdefault(key(item), []).append(item)
    return tuple(Group(name, _summary(items, "reserved")) for name, items in sorted(found.items()))


def _summary(comparisons: Sequence[Comparison], level: str) -> ErrorSummary:
    return summarize_errors([item.error(level) for item in comparisons])


def _why_not(comparison: Comparison) -> str:
    if comparison.predicted.error:
        return f"no prediction: {comparison.predicted.error}"
    if comparison.record.status == OUT_OF_MEMORY:
        return "ran out of memory"
    return comparison.record.error or comparison.record.status
