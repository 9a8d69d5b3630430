"""The runtime ``onnxruntime``: its options, its plans of graphs, and what its arenas do with a trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from graphmem.allocators.base import SegmentView
from graphmem.allocators.onnxruntime_arena import ArenaConfig, BFCArena
from graphmem.base.figures import BOUNDS, EXACT, TRACE_LEVELS, Cause, Figure, bounded, unknown
from graphmem.devices import DEFAULT_DEVICE, Device, as_cuda, device_named
from graphmem.diagnostics import Code
from graphmem.graph.model import Graph
from graphmem.replay import Replay, replay
from graphmem.runtimes.base import GRAPH_RUNS, Change, Graphs, Runs, Runtime, Setting, Taken, within_card
from graphmem.runtimes.onnxruntime.arenas import (
    OnnxRuntimeSessions,
    default_allocator,
    reserved_allocations,
    session_count,
)
from graphmem.runtimes.onnxruntime.findings import findings
from graphmem.runtimes.onnxruntime.kernels.libraries import LEAST, MOST
from graphmem.runtimes.onnxruntime.options import UNFOLLOWED, WITHOUT_EFFECT, Options, parse_options
from graphmem.runtimes.onnxruntime.orders import LAYOUT_NAME, LAYOUT_SOURCE, cause, orders_of, typical
from graphmem.runtimes.onnxruntime.plan.pattern import BLOCK
from graphmem.runtimes.onnxruntime.plan.process import Planned, plan
from graphmem.runtimes.onnxruntime.plan.session import CALLER, SessionPlan, SessionPlans
from graphmem.trace import Place, Trace
from graphmem.units import format_bytes


def notes_of(options: Options, planned: Planned) -> list[str]:
    """Assumptions of a plan under the options, for the reader."""
    return [*_provider_notes(options, planned), *(f"{key}: {WITHOUT_EFFECT[key]}" for key in options.without_effect)]


def _provider_notes(options: Options, planned: Planned) -> list[str]:
    if options.session.provider == "cpu":
        return [
            f"CPU provider of ONNX Runtime 1.31 on x86-64, {options.session.intra_op_num_threads} intra-op thread(s): "
            "what is shown as the card's memory is its arena in host memory"
        ]
    notes = ["CUDA provider of ONNX Runtime 1.31"]
    if planned.host_nodes:
        notes.append(f"{planned.host_nodes} nodes run on the CPU")
    return [*notes, *planned.cudnn_notes]


def _cublas(options: Options, planned: Planned) -> tuple[Figure, ...]:
    """The workspace of the session's cuBLAS handle: the library's own, outside the arena; ONNX Runtime sets none."""
    if not planned.uses_cublas:
        return ()
    given = options.cublas_workspace_bytes
    if given is not None:
        return (Figure("cuBLAS workspace", given, given, given, "cublas_workspace_bytes"),) if given else ()
    size = as_cuda(options.card or device_named(DEFAULT_DEVICE)).limits.cublas_bytes
    return (Figure("cuBLAS workspace", size, 0, size, "cuBLAS's own default; nobody measured when it takes it"),)


def _bound_by_caller(options: Options, sessions: Sequence[Sequence[Graph]], planned: Planned) -> tuple[Figure, ...]:
    """The tensors on the card that sessions are bound to and that the caller holds: of every session those of its
    largest run. An ``OrtValue`` of Python lies in an arena of the process, with the options of a default one (1.31.1,
    on the stub driver)."""
    inputs, outputs = (where == CALLER for where in options.session.io_binding)
    if options.session.provider == "cpu" or not (inputs or outputs):
        return ()
    arena, size = BFCArena(), 0
    for graphs, made in zip(sessions, planned.plans, strict=True):
        results = [name for name in graphs[0].outputs if made.place(name) == Place.DEVICE]
        names = [*(made.inputs_on_device if inputs else ()), *(results if outputs else ())]
        tensors = max(([graph.tensors[name].nbytes for name in names] for graph in graphs), key=sum)
        size += sum(tensors)
        for tensor in tensors:
            arena.malloc(tensor)
    source = "at most as OrtValues of Python, whose arena grows by doubling; PyTorch's allocator has rules of its own"
    return (Figure("bound by the caller", size, size, arena.reserved_bytes, source),) if size else ()


def _unfollowed(options: Options, planned: Planned) -> Iterator[Cause]:
    """Doubts for the options that change kernels in a way that is not modelled, where the graph has such kernels."""
    present = {node.op_type for made in planned.plans for one in made.with_bodies for node in one.nodes}
    for key in options.unfollowed:
        operators, reason = UNFOLLOWED[key]
        if not operators or not present.isdisjoint(operators):
            yield unknown(key, reason, below=True)


#: Traces whose values are kept for the runs that follow.
_KEPT = 8
Value = TypeVar("Value")


class _OfTraces(Generic[Value]):
    """Values that belong to the traces planned last."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Trace, Value]] = {}

    def keep(self, trace: Trace, value: Value) -> None:
        self._kept[id(trace)] = (trace, value)
        for old in list(self._kept)[:-_KEPT]:
            del self._kept[old]

    def get(self, trace: Trace) -> Value | None:
        kept = self._kept.get(id(trace))
        return kept[1] if kept is not None and kept[0] is trace else None


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
    proven = "tests/golden/onnxruntime"

    def __init__(self) -> None:
        #: Of the last runs: their options and what was drawn, for further capacities.
        self._drawn: _OfTraces[tuple[Options, tuple[Trace, list[Replay]]]] = _OfTraces()
        #: The traces of other orders of the nodes.
        self._orders: _OfTraces[list[Trace]] = _OfTraces()
        #: The shapes whose plans were predicted, and the trace at either end of what they may take.
        self._ends: _OfTraces[tuple[int, list[Trace]]] = _OfTraces()
        self._plans = SessionPlans()

    def parse(self, text: str | None, setting: Setting) -> Options:
        """The options as :func:`parse_options` reads them, with what is assumed of libraries on the card."""
        return parse_options(text or "").on(setting.device, setting.cudnn)

    def describe(self, options: Options, setting: Setting) -> str:
        """The arena and the options as given."""
        return f"ONNX Runtime BFC arena ({options.text or 'default options'})"

    def plan(self, sessions: Sequence[Sequence[Graph]], options: Options, iterations: int | None) -> Taken:
        """Each session of one graph runs ``iterations`` times, each of several shapes once for every shape."""
        given = [tuple(graphs) * (iterations or GRAPH_RUNS) if len(graphs) == 1 else graphs for graphs in sessions]
        runs, *others = orders_of(given) if options.session.provider == "cpu" else [given]
        plans = [self._plans.of(graphs[0], options.session) for graphs in runs]
        planned, refused = _with_blocks_that_fit(runs, options, plans)
        assumptions = (
            *refused,
            *notes_of(options, planned),
            *(f"{key}: {value}" for key, value in planned.trace.notes),
        )
        diagnostics = tuple(
            Code.WORKING_BUFFERS.about(count=count, operator=name) for name, count in sorted(planned.unknown.items())
        )
        later = partial(findings, runs, planned=planned)
        if planned.predicted_plans:
            extremes = [replace(options, extreme=end) for end in (LEAST, MOST)]
            ends = [_with_blocks_that_fit(runs, one, planned.plans)[0].trace for one in extremes]
            self._ends.keep(planned.trace, (planned.predicted_plans, ends))
        if others:
            self._orders.keep(planned.trace, [plan(order, options).trace for order in others])
        outside = (*_cublas(options, planned), *_bound_by_caller(options, runs, planned))
        doubts = tuple(_unfollowed(options, planned))
        return Taken(planned.trace, assumptions, diagnostics, later, doubts, outside, self.proven)

    def plan_options(self, options: Options) -> Hashable:
        """Of the card what cuDNN looks at, all of it where a library is asked, and its room with the arena's options
        where a memory pattern's block may be refused; else nothing of the arena."""
        card, room = None, None
        if options.card is not None:
            like = as_cuda(options.card)
            facts = (like.compute_capability, like.sm_count, like.max_threads_per_sm)
            card = facts if options.cudnn is None else repr(like)
            if _may_be_refused(options):
                room = options.card.capacity_bytes, options.card.taken_bytes, repr(options.arena)
        return repr(replace(options, arena=ArenaConfig(), text="", card=None)), card, room

    def optimization(self, options: Options) -> tuple[str | None, str]:
        """The level, and the provider whose graph it is."""
        return options.fusion_level, options.session.provider

    def run(self, trace: Trace, options: Options, setting: Setting) -> Runs:
        """Replayed in the arenas of as many sessions as the trace holds."""
        make = _arenas(trace, options)
        if options.session.reserves_initializers:
            runs = within_card(trace, make, setting.device)
            others = self._orders.get(trace)
            if others is None:
                return runs
            drawn = [runs.main, *(replay(other, make(None)) for other in others)]
            of_order = cause(runs.main, drawn, LAYOUT_NAME, LAYOUT_SOURCE)
            return replace(runs, doubts=() if of_order is None else (of_order,))
        known = self._drawn.get(trace)
        if known is None or known[0] != options:
            known = (options, typical(trace, lambda: make(None)))
            self._drawn.keep(trace, known)
        chosen, drawn = known[1]
        runs = within_card(chosen, make, setting.device)
        doubts = (cause(runs.main, drawn), self._of_plans(trace, runs.main, make))
        return replace(
            runs,
            doubts=tuple(filter(None, doubts)),
            segments_at=partial(_segments_of_order, chosen, options, setting.device),
        )

    def _of_plans(self, trace: Trace, main: Replay, make: Callable[[int | None], OnnxRuntimeSessions]) -> Cause | None:
        """How far predicted plans of cuDNN may move the peaks of ``trace``; None where none is predicted."""
        shapes, ends = self._ends.get(trace) or (0, [])
        if not ends:
            return None
        peaks = [replay(end, make(None)) for end in ends]
        spreads = {}
        for level in TRACE_LEVELS:
            name = f"peak_{'reserved' if level == 'device' else level}_bytes"
            offsets = [getattr(peak, name) - getattr(main, name) for peak in peaks]
            spreads[level] = bounded(min(0, *offsets), max(0, *offsets))
        if all(spread == EXACT for spread in spreads.values()):
            return None
        source = (
            f"of {shapes} shapes predicted: between none and copies of all tensors, and a quarter more, where 955 of "
            "969 asked of cuDNN 9.20 lie; a library of it can be asked (--cudnn)"
        )
        return Cause("cuDNN's plans", BOUNDS, source, spreads)

    def changes(self, alloc_conf: str | None, device: Device) -> Iterator[Change]:
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


def _may_be_refused(options: Options) -> bool:
    return options.card is not None and options.session.provider != "cpu" and options.session.enable_mem_pattern


def _with_blocks_that_fit(
    runs: Sequence[Sequence[Graph]], options: Options, plans: Sequence[SessionPlan]
) -> tuple[Planned, tuple[str, ...]]:
    """The plan in which every memory pattern's block fits the card, and a remark where one was refused: the session
    logs it and goes on, with tensors one by one (``ExecutionFrame``, core/framework/execution_frame.cc)."""
    planned, remarks = plan(runs, options, plans=plans), tuple[str, ...]()
    while _may_be_refused(options) and (size := _refused_block(planned.trace, options)):
        planned = plan(runs, options, plans=plans, refused_bytes=size)
        remarks = (
            f"the card refuses a memory pattern's block of {format_bytes(size)}; ONNX Runtime goes on, and allocates "
            "the tensors of such a run one by one, as in a first run",
        )
    return planned, remarks


def _refused_block(trace: Trace, options: Options) -> int:
    """Bytes of the memory pattern's block for which the card has no room; 0 where there is none."""
    assert options.card is not None
    blocks = trace.labelled.get(BLOCK, ())
    if not len(blocks):
        return 0
    limited = within_card(trace, _arenas(trace, options), options.card).limited
    if limited is None or limited.out_of_memory is None:
        return 0
    storage = int(trace.subjects[limited.out_of_memory.event])
    return int(trace.columns.bytes[storage]) if storage in blocks else 0


def _arenas(trace: Trace, options: Options) -> Callable[[int | None], OnnxRuntimeSessions]:
    """What makes the arenas of the sessions of a trace on a card of so many bytes."""
    reserved, sessions = reserved_allocations(trace, options), session_count(trace)
    return lambda capacity: default_allocator(options, capacity, reserved=reserved, sessions=sessions)


def _segments_of_order(trace: Trace, options: Options, device: Device, event: int) -> tuple[SegmentView, ...]:
    """The arenas' regions after an event of a trace in its own order."""
    return within_card(trace.until(event), _arenas(trace, options), device).on_card.segments


RUNTIME = OnnxRuntime()
