"""The decisions of a session before any shape is bound: providers, memory places, copies, order, buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from graphmem.base.records import dataclass
from graphmem.errors import UsageError
from graphmem.graph.model import Graph, Node
from graphmem.graph.order import execution_order
from graphmem.graph.placement import insert_copies, place
from graphmem.runtimes.onnxruntime.kernels.cuda_provider import takes
from graphmem.runtimes.onnxruntime.kernels.tables import TABLES
from graphmem.runtimes.onnxruntime.plan.pattern import MemoryPatternPlanner
from graphmem.runtimes.onnxruntime.plan.reuse import ReusePlan, Value, reuse_plan
from graphmem.trace import Place

#: Initializers up to this size are copied into the CPU arena; larger ones stay in the mapped file (1.31.1, measured).
SMALL_INITIALIZER_BYTES = 127

#: Where an input or an output lies: in the arena for one run, and the caller's copy in host memory; in memory of the
#: caller's on the card; in the arena until another is bound in its place (``IOBinding``).
RUN, CALLER, SESSION = "run", "caller", "session"


@dataclass(frozen=True)
class SessionSettings:
    """The user's settings of a session's memory, by ONNX Runtime's own names.

    ``io_binding`` is the owner of the memory on the card that inputs and outputs are bound to: :data:`RUN`,
    :data:`CALLER` or :data:`SESSION`. With ``use_env_allocators`` the sessions of a process share one arena. A captured
    CUDA graph (``enable_cuda_graph``) is replayed without asking the arena. ``intra_op_num_threads`` sizes working
    buffers of CPU kernels."""

    provider: str = "cuda"
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    disable_prepacking: bool = False
    use_device_allocator_for_initializers: bool = False
    enable_memory_arena_shrinkage: bool = False
    io_binding: tuple[str, str] = (RUN, RUN)
    use_env_allocators: bool = False
    enable_cuda_graph: bool = False
    intra_op_num_threads: int = 1

    @property
    def reserves_initializers(self) -> bool:
        """Whether initializers lie outside the arena's regions (1.31.1, ``NumReserves``): on the CPU always, on CUDA if
        the session's option asks for it, or packs them into one block."""
        packed = self.disable_prepacking and self.enable_mem_pattern
        return self.provider == "cpu" or self.use_device_allocator_for_initializers or packed

    @property
    def stream_aware(self) -> bool:
        """Whether the arena tags chunks with streams (``StreamAwareBFCArena``)."""
        return self.provider == "cuda"


@dataclass(frozen=True)
class SessionPlan:
    """``nodes`` include the copies between host and device; ``original`` maps the tensors these make to what they
    copy. ``home`` is where the provider's arena is; ``host_nodes`` are indices of the nodes that run on the CPU.
    ``inputs_on_device`` are those that a run finds or copies there. ``feeds`` are the inputs and, of a subgraph, what
    it reads from around it; where the rank of an input of the model is not known no pattern is kept
    (``SessionState::ResolveMemoryPatternFlag``, which is not asked for subgraphs: 1.32.0, measured). ``bodies`` are the
    plans of subgraphs, which ONNX Runtime makes as for sessions of their own, by :attr:`Node.key` and attribute."""

    settings: SessionSettings
    nodes: tuple[Node, ...]
    reuse: ReusePlan
    places: Mapping[str, Place]
    original: Mapping[str, str]
    inputs_on_device: tuple[str, ...]
    initializers: tuple[str, ...]
    host_nodes: frozenset[int] = frozenset()
    feeds: tuple[str, ...] = ()
    pattern_forbidden: bool = False
    bodies: Mapping[tuple[str, str], SessionPlan] = field(default_factory=dict)
    home: Place = Place.DEVICE

    @property
    def with_bodies(self) -> Iterator[SessionPlan]:
        """The plan, and those of subgraphs."""
        yield self
        for body in self.bodies.values():
            yield from body.with_bodies

    def place(self, name: str) -> Place:
        """The memory of a tensor."""
        return self.places.get(name, self.home)

    def with_copies(self, graph: Graph) -> Graph:
        """``graph`` with the tensors that copies between host and device make."""
        copies = {name: graph.tensors[known] for name, known in self.original.items()}
        return replace(graph, tensors={**graph.tensors, **copies}) if copies else graph

    def shape(self, graph: Graph, name: str) -> tuple[int, ...]:
        """The bound shape of a tensor."""
        return tuple(int(d) for d in graph.tensors[name].shape)

    def initializer_blocks(self, graph: Graph) -> Iterator[tuple[str, int, Place]]:
        """(label, bytes, place) of the device allocations that hold the initializers.

        One each; or, without prepacking but with memory patterns, all of a device packed into one block.
        """
        held = [(name, graph.tensors[name].nbytes) for name in self.initializers]
        if self.settings.provider == "cpu":
            held = [(name, size) for name, size in held if size <= SMALL_INITIALIZER_BYTES or self.is_contiguous]
        if not self.is_contiguous:
            yield from ((name, size, self.place(name)) for name, size in held)
            return
        for where in (Place.DEVICE, Place.HOST):
            planner = MemoryPatternPlanner()
            for name, size in held:
                if self.place(name) == where and graph.tensors[name].dtype != "string":
                    planner.trace_allocation(name, size)
            if planner.peak_bytes:
                yield "all initializers", planner.peak_bytes, where

    @property
    def is_contiguous(self) -> bool:
        """Whether the initializers are packed into one block (1.31.1, measured on the CPU)."""
        return self.settings.disable_prepacking and self.settings.enable_mem_pattern


def _ranks(graph: Graph, count: int) -> Sequence[int]:
    """Indices of the nodes in ONNX Runtime, the copies' behind all others. Those of an optimized graph are not in its
    file, which has the nodes as they are executed; of two producers the one with the higher index goes first."""
    known = len(graph.nodes)
    own = range(-1, -known - 1, -1) if graph.is_ordered else range(known)
    return (*own, *range(known, count))


def _check_capture(graph: Graph, copies: Sequence[Node], host_nodes: frozenset[int]) -> None:
    """Refuse to capture what ONNX Runtime refuses (``InferenceSession::Initialize``). Raises ``UsageError``."""
    if graph.bodies:
        raise UsageError("enable_cuda_graph: ONNX Runtime captures no model with If, Loop or Scan")
    if copies and host_nodes:
        names = ", ".join(sorted({graph.nodes[index].op_type for index in host_nodes}))
        raise UsageError(f"enable_cuda_graph: ONNX Runtime captures no model with nodes on the CPU, here {names}")


#: Plans that are kept for the graphs that follow.
_KEPT = 8


class SessionPlans:
    """The plans of sessions, which know no sizes: one serves the graph of a file with whatever is bound."""

    def __init__(self) -> None:
        self._kept: list[tuple[Hashable, Graph, SessionPlan]] = []

    def of(self, graph: Graph, settings: SessionSettings) -> SessionPlan:
        """The plan of a graph, made now, or for one that :func:`plan_session` cannot tell from it."""
        key = settings, _planned_by(graph)
        for other, _, made in self._kept:
            if other == key:
                return made
        made = plan_session(graph, settings)
        self._kept = [(key, graph, made), *self._kept[: _KEPT - 1]]
        return made


def _planned_by(graph: Graph) -> Hashable:
    """All that :func:`plan_session` looks at. Nodes are those of a file, whose graph is kept with the key."""
    return (
        tuple(map(id, graph.nodes)),
        (graph.inputs, graph.outputs, graph.captured, graph.opsets, graph.is_ordered),
        tuple(graph.tensors[name] for name in graph.initializers),
        tuple((name, spec.dtype, graph.symbolic_shape(name)) for name, spec in graph.tensors.items()),
        tuple(
            (key, body.attribute, _planned_by(body.graphs[0]))
            for key, bodies in graph.bodies.items()
            for body in bodies
        ),
    )


def plan_session(
    graph: Graph, settings: SessionSettings, parent: str = "", around: Mapping[str, Place] | None = None
) -> SessionPlan:
    """Plan a session of ``graph``, of which only names, types, and symbolic shapes are looked at; of a subgraph
    ``parent`` is the operator that runs it, and ``around`` where the tensors are that it captures."""
    places: Mapping[str, Place] = {}
    original: Mapping[str, str] = {}
    order: Sequence[int]
    host_nodes: frozenset[int] = frozenset()
    if settings.provider == "cpu":
        nodes = graph.nodes
        order = range(len(nodes)) if graph.is_ordered else execution_order(nodes)
        initializers = graph.initializers
    else:
        order = range(len(graph.nodes)) if graph.is_ordered else execution_order(graph.nodes)
        copied = insert_copies(graph, place(graph, order, takes))
        if len(copied.nodes) > len(graph.nodes):
            order = execution_order(copied.nodes, _ranks(graph, len(copied.nodes)))
        nodes, places, original = copied.nodes, copied.places, copied.original
        initializers = (*graph.initializers, *copied.initializers)
        host_nodes = copied.host_nodes
    values = {}
    for name in {*graph.tensors, *original}:
        known = original.get(name, name)
        where = places.get(name, Place.DEVICE)
        values[name] = Value(graph.tensors[known].dtype, graph.symbolic_shape(known), int(where))
    inputs = (*graph.inputs, *graph.captured)
    reuse = reuse_plan(
        nodes,
        order,
        values,
        inputs=inputs,
        initializers=initializers,
        outputs=graph.outputs,
        table=TABLES[settings.provider],
        enable_mem_reuse=settings.enable_mem_reuse,
        shared=inputs[1:] if parent == "Loop" else (),
    )
    given_at = {**(around or {}), **dict.fromkeys(graph.inputs[:2] if parent == "Loop" else (), Place.HOST)}
    fed = [name for name in inputs if not parent or given_at.get(name) == Place.HOST]
    on_device = settings.provider != "cpu"
    if settings.enable_cuda_graph and not parent:
        _check_capture(graph, nodes[len(graph.nodes) :], host_nodes)
    operators = {node.key: node.op_type for node in nodes}
    inside = replace(settings, io_binding=(RUN, RUN))
    return SessionPlan(
        settings,
        nodes,
        reuse,
        places,
        original,
        tuple(name for name in fed if places.get(name, Place.DEVICE) == Place.DEVICE) if on_device else (),
        tuple(initializers),
        host_nodes,
        inputs,
        not parent and any(values[name].shape is None for name in inputs),
        {
            (key, body.attribute): plan_session(body.graphs[0], inside, operators[key], places)
            for key, bodies in graph.bodies.items()
            for body in bodies
        },
    )
