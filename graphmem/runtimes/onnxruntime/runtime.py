"""ONNX Runtime as a runtime."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from graphmem.allocators.onnxruntime_arena import ArenaConfig
from graphmem.estimate import Diagnostic
from graphmem.figures import Cause, unknown
from graphmem.graph.model import Graph
from graphmem.runtimes.base import GRAPH_RUNS, Change, Graphs, Runs, Runtime, Setting, Taken, within_card
from graphmem.runtimes.onnxruntime.arenas import (
    OnnxRuntimeSessions,
    default_allocator,
    reserved_allocations,
    session_count,
)
from graphmem.runtimes.onnxruntime.findings import findings
from graphmem.runtimes.onnxruntime.options import Options, parse_options
from graphmem.runtimes.onnxruntime.plan.process import Planned, plan
from graphmem.runtimes.onnxruntime.plan.runs import CUBLAS_LABEL, CUDNN_LABEL
from graphmem.trace import Category, Trace
from graphmem.units import format_bytes

#: Options that are read and change nothing, and why.
WITHOUT_EFFECT = {
    "session.use_device_allocator_for_initializers": "1.31.1 reserves initializers one by one whatever it says "
    "(measured on the CPU provider)",
    "cudnn_conv_use_max_workspace": "with cuDNN 9 the chosen plan's own workspace is taken",
}


def notes_of(options: Options, planned: Planned) -> list[str]:
    """What the options assume of a plan, for the reader."""
    return [*_provider_notes(options, planned), *(f"{key}: {WITHOUT_EFFECT[key]}" for key in options.without_effect)]


def _provider_notes(options: Options, planned: Planned) -> list[str]:
    if options.session.provider == "cpu":
        return [
            f"CPU provider of ONNX Runtime 1.31 on x86-64, {options.session.intra_op_num_threads} intra-op thread(s): "
            "what is shown as the card's memory is its arena in host memory"
        ]
    notes = [
        "CUDA provider: in-place kernels, host copies and the stream-tagged arena are read in ONNX Runtime's source "
        "and were never compared with a GPU"
    ]
    if planned.host_nodes:
        notes.append(
            f"{planned.host_nodes} nodes run on the CPU: ONNX Runtime then plans buffers for two streams; they are "
            "planned here as for one"
        )
    labels = {storage.label for storage in planned.trace.storages if storage.category == Category.WORKSPACE}
    memory = options.kernel_memory()
    if CUDNN_LABEL in labels:
        notes.append(
            f"cuDNN ({options.cudnn_conv_algo_search} search): the workspace of a convolution has no rule; each is "
            f"assumed to take {format_bytes(memory.convolution_workspace)} while it runs (set cudnn_workspace_bytes)"
        )
    if CUBLAS_LABEL in labels:
        notes.append(
            f"cuBLAS: the workspace of a session's handle, outside the arena, is assumed to be "
            f"{format_bytes(memory.cublas_workspace_bytes)} (set cublas_workspace_bytes)"
        )
    return notes


def _doubts(options: Options, planned: Planned) -> Iterator[Cause]:
    """What no recording holds: sessions on a card. Those on a CPU were recorded."""
    if options.session.provider == "cpu":
        return
    yield unknown("the CUDA provider", "read in ONNX Runtime's source, never compared with a card", below=True)
    labels = {storage.label for storage in planned.trace.storages}
    if CUDNN_LABEL in labels and options.cudnn_workspace_bytes is None:
        yield unknown("cuDNN's workspaces", "assumed; set cudnn_workspace_bytes", below=True)


class OnnxRuntime(Runtime[Options]):
    """Sessions of ONNX Runtime, each with an arena of its own."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    spellings = ("ort",)
    levels = (
        ("requested", "what the tensors asked for"),
        ("allocated", "chunks of the arena in use (MaxInUse)"),
        ("reserved", "regions the arena holds (TotalAllocated)"),
        ("device", "nvidia-smi's line of the process: reserved plus context"),
    )
    graphs = Graphs.PLANNED
    captures = False

    def parse(self, text: str | None, setting: Setting) -> Options:
        """The options as :func:`parse_options` reads them, with what is assumed of libraries on the card."""
        return parse_options(text or "").on(setting.device)

    def describe(self, options: Options, setting: Setting) -> str:
        """The arena and the options as given."""
        return f"ONNX Runtime BFC arena ({options.text or 'default options'})"

    def plan(self, sessions: Sequence[Sequence[Graph]], options: Options, iterations: int | None) -> Taken:
        """Each session of one graph runs ``iterations`` times, each of several shapes once for every shape."""
        runs = [tuple(graphs) * (iterations or GRAPH_RUNS) if len(graphs) == 1 else graphs for graphs in sessions]
        planned = plan(runs, options)
        assumptions = (*notes_of(options, planned), *(f"{key}: {value}" for key, value in planned.trace.notes))
        unknown = sorted(planned.unknown.items())
        diagnostics = tuple(Diagnostic("unknown", f"working buffers of {name}", count) for name, count in unknown)
        later = partial(findings, runs, planned=planned)
        return Taken(planned.trace, assumptions, diagnostics, later, tuple(_doubts(options, planned)))

    def plan_options(self, options: Options) -> Hashable:
        """All but the arena's own."""
        return repr(replace(options, arena=ArenaConfig(), text=""))

    def optimization(self, options: Options) -> tuple[str | None, str]:
        """The level, and the provider whose graph it is."""
        return options.fusion_level, options.session.provider

    def run(self, trace: Trace, options: Options, setting: Setting) -> Runs:
        """Replayed in the arenas of as many sessions as the trace holds."""
        reserved, sessions = reserved_allocations(trace, options), session_count(trace)

        def make(capacity: int | None) -> OnnxRuntimeSessions:
            return default_allocator(options, capacity, reserved=reserved, sessions=sessions)

        return within_card(trace, make, setting.device)

    def changes(self, alloc_conf: str | None) -> Iterator[Change]:
        """Options that trade time or reuse for memory; as they are settings of one string, the pair is a change of its
        own."""
        given = alloc_conf or ""
        known = {
            "arena_extend_strategy:kSameAsRequested": "grow the arena by what is asked for",
            "enable_mem_pattern:0": "no memory pattern block",
        }
        free = [option for option in known if option.partition(":")[0] not in given]
        for options in [*([option] for option in free), *([free] if len(free) > 1 else [])]:
            words = ", ".join(known[option] for option in options)
            yield Change(words, ",".join(filter(None, (given, *options))))


RUNTIME = OnnxRuntime()
