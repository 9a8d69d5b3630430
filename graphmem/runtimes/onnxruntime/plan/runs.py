"""The trace of an ONNX Runtime session: what loading takes, then one run after another, each with its own shapes.

A run allocates a tensor when its kernel asks for it and gives its buffer back after the last reader. A run whose
pattern key is new traces its allocations; the next run with that key allocates the packed block first and places in it
every tensor whose size is the traced one (``core/framework/execution_frame.cc``). Where that block is refused the run
allocates its tensors one by one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from graphmem.base.records import dataclass
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.onnxruntime.kernels.context import OUTPUTS
from graphmem.runtimes.onnxruntime.kernels.memory import KernelMemory, Weights, weights_of
from graphmem.runtimes.onnxruntime.plan.bodies import run_bodies
from graphmem.runtimes.onnxruntime.plan.pattern import BLOCK, MemoryPattern, MemoryPatternPlanner, aligned, pattern_key
from graphmem.runtimes.onnxruntime.plan.reuse import AllocKind
from graphmem.runtimes.onnxruntime.plan.session import CALLER, RUN, SESSION, SessionPlan
from graphmem.trace import Category, EventKind, Place, TraceBuilder

#: Name of the phase in which a session is loaded, after the session's own prefix.
LOAD = "load"


#: The memory of a value: a tensor's, a sequence's, or None where it is somebody else's.
Held = int | tuple[int, ...] | None


@dataclass
class Runs:
    """Writes one session into a builder; ``patterns`` are kept by key for as long as the session lives."""

    plan: SessionPlan
    memory: KernelMemory
    builder: TraceBuilder
    stream: int = 0
    prefix: str = ""
    patterns: dict[int, MemoryPattern] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)  # inputs and outputs bound in the arena
    blocks: list[int] = field(default_factory=list)  # bytes of the pattern's block of each run, 0 without one
    released: set[str] = field(default_factory=set)  # weights that are gone, as kernels have them packed
    holders: Counter[int] = field(default_factory=Counter)  # of storages that several values share
    refused_bytes: int = sys.maxsize  # of the smallest block of a pattern that the card refuses

    def __post_init__(self) -> None:
        """The subgraphs, each with patterns of its own in the same arena."""
        self.bodies = {
            key: Runs(
                plan,
                self.memory,
                self.builder,
                self.stream,
                self.prefix,
                released=self.released,
                holders=self.holders,
                refused_bytes=self.refused_bytes,
            )
            for key, plan in self.plan.bodies.items()
        }

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, graph: Graph) -> None:
        """Initializers, then what kernels take when they are made; then those of subgraphs."""
        self._load(graph, self.builder.phase(0, f"{self.prefix}{LOAD}"), weights_of(graph), {})

    def _load(self, graph: Graph, phase: int, weights: Weights, around: dict[str, int]) -> None:
        """Record the loading of a graph's initializers and their prepacking, which may free weights; then of its
        subgraphs. ``around``: storages of the weights of the graphs around it."""
        graph = self.plan.with_copies(graph)
        operator = self.builder.operator("initializers", phase=phase)
        held = around | {
            label: self._alloc(size, operator, Category.PARAMETER, place, label)
            for label, size, place in self.plan.initializer_blocks(graph)
        }
        for block in self.memory.prepacked(graph, self.plan, weights):
            operator = self.builder.operator("prepacking", block.node, phase)
            on_cpu = self.plan.settings.provider == "cpu"
            reserved = Category.PARAMETER if on_cpu else Category.HELD
            category, label = (reserved if block.reserved else Category.BUFFER), block.label if on_cpu else block.weight
            taken = [self._alloc(size, operator, category, self.plan.home, label) for size in block.sizes]
            for storage in taken if block.dropped else ():
                self.builder.free(storage, operator)
            if block.frees_weight:
                self.released.add(block.weight)
            if block.frees_weight and block.weight in held:
                self.builder.free(held.pop(block.weight), operator)
        for key, bodies in reversed(list(graph.bodies.items())):  # a map of libstdc++ gives the newest first
            for body in bodies:
                weights.around = frozenset(graph.initializers)
                self.bodies[key, body.attribute]._load(body.graphs[0], phase, weights, held)

    def _alloc(self, size: int, operator: int, category: Category, place: Place, label: str) -> int:
        return self.builder.alloc(size, operator, category, stream=self.stream, place=place, label=label)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, graph: Graph, iteration: int) -> None:
        """One run of ``graph``, whose tensors have this run's shapes.

        With a CUDA graph the first is executed twice, the second time to capture it, and those that follow replay it
        (``InferenceSession::RunImpl``).
        """
        phase = self.builder.phase(iteration, f"{self.prefix}run")
        if self.plan.settings.enable_cuda_graph and iteration > 1:
            self.builder.operator("replay of the CUDA graph", phase=phase)
            return
        self._bind(graph, phase)
        for _ in range(2 if self.plan.settings.enable_cuda_graph else 1):
            frame = Frame(self, graph, phase)
            frame.execute_all()
            frame.end()

    def _bind(self, graph: Graph, phase: int) -> None:
        """Bind inputs and outputs anew: an input is there before the one in whose place it comes goes."""
        operator = self.builder.operator("binding", phase=phase)
        before, self.bound = self.bound, {}
        if self.plan.settings.io_binding[0] == SESSION:
            for name in self.plan.inputs_on_device:
                size = graph.tensors[name].nbytes
                self.bound[name] = self._alloc(size, operator, Category.INPUT, self.plan.place(name), name)
                if name in before:
                    self.builder.free(before.pop(name), operator)
        for storage in before.values():
            self.builder.free(storage, operator)


@dataclass
class Frame:
    """``ExecutionFrame``: the memory of one run of a graph or of a subgraph.

    Of a subgraph, ``given`` are the storages of inputs that its node holds, and ``elsewhere`` makes the outputs that
    live in the memory of its node.
    """

    session: Runs
    graph: Graph
    phase: int
    given: Mapping[str, Held] = field(default_factory=dict)
    elsewhere: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    outer: Frame | None = None
    sequences: dict[str, tuple[int, ...]] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)  # buffer -> storage
    present: set[str] = field(default_factory=set)  # buffers that exist, in the block or by themselves
    pattern: MemoryPattern | None = None
    tracer: MemoryPatternPlanner | None = None
    key: int = 0
    block: int | None = None
    operator: int = 0

    def __post_init__(self) -> None:
        """The graph with the tensors that copies between host and device make."""
        self.graph = self.session.plan.with_copies(self.graph)
        is_callers = self.session.plan.settings.io_binding[1] == CALLER
        self.bound_outputs = frozenset(self.graph.outputs if is_callers else self.session.bound)

    def execute_all(self) -> None:
        """Begin, and run every node."""
        self.begin()
        plan = self.session.plan
        for step, index in enumerate(plan.reuse.order):
            self.execute(index, plan.reuse.releases[step])

    def begin(self) -> None:
        """Copy the inputs to the device; then find or start the pattern of these shapes."""
        session, plan = self.session, self.session.plan
        if plan.inputs_on_device and plan.settings.io_binding[0] == RUN:
            self.operator = session.builder.operator("inputs", phase=self.phase)
            for name in plan.inputs_on_device:
                self.live[name] = self._alloc(name, self._bytes(name), Category.INPUT, plan.place(name))
        size = 0
        is_fed = session.released.isdisjoint(self.graph.captured)  # a weight that is gone is no tensor
        is_fed = is_fed and all(self.graph.tensors[name].items is None for name in plan.feeds)
        if plan.settings.enable_mem_pattern and not plan.pattern_forbidden and is_fed:
            self.key = pattern_key([plan.shape(self.graph, name) for name in plan.feeds])
            self.pattern = session.patterns.get(self.key)
            if self.pattern is None:
                self.tracer = MemoryPatternPlanner()
            elif self.pattern.peak_bytes >= session.refused_bytes:
                self.pattern = None
            elif self.pattern.peak_bytes:
                size = self.pattern.peak_bytes
                self.operator = session.builder.operator("memory pattern", phase=self.phase)
                self.block = session._alloc(size, self.operator, Category.ACTIVATION, plan.home, BLOCK)
        session.blocks.append(size)
        constants = frozenset(plan.initializers)
        for name in self.graph.outputs:  # a constant that is an output is copied for the caller
            if name in constants and name not in self.elsewhere and name not in self.bound_outputs:
                self.operator = self.operator or session.builder.operator("constant outputs", phase=self.phase)
                self.live[name] = self._alloc(name, self._bytes(name), Category.ACTIVATION, plan.place(name))

    def execute(self, index: int, releases: Sequence[str]) -> None:
        """Outputs and working buffers of one kernel, and what is given back after it."""
        session = self.session
        node = session.plan.nodes[index]
        self.operator = session.builder.operator(node.operator, node.name, self.phase)
        if node.key in self.graph.bodies:
            run_bodies(self, node)
        elif self.graph.tensors[node.key].items is not None:
            _make_sequence(self, node)
        else:
            self._run_kernel(node, index in session.plan.host_nodes)
        for name in releases:
            if self.tracer is not None and self._is_traced(name):
                self.tracer.trace_free(name)
            self.present.discard(name)
            self.drop(self.sequences.pop(name, None))
            storage = self.live.pop(name, None)
            if storage is not None:
                session.builder.free(storage, self.operator)

    def _run_kernel(self, node: Node, on_host: bool) -> None:
        session = self.session
        place = Place.HOST if on_host else session.plan.home
        taken: list[int | None] = []
        label = session.memory.label(node)
        for step in session.memory.steps(node, self.graph, on_host):
            if step > 0:
                taken.append(session._alloc(step, self.operator, Category.WORKSPACE, place, label))
            elif step == OUTPUTS:
                for name in filter(None, node.outputs):
                    self.output(name)
            else:
                self._give_back(taken, -step - 1)
        for position in reversed(range(len(taken))):
            self._give_back(taken, position)

    def _give_back(self, taken: list[int | None], position: int) -> None:
        storage = taken[position]
        if storage is not None:
            self.session.builder.free(storage, self.operator)
            taken[position] = None

    def output(self, name: str) -> None:
        """Allocate an output of a kernel, unless its buffer is there."""
        reuse = self.session.plan.reuse
        kind = reuse.kind[name]
        if kind is AllocKind.kReuse:
            name = reuse.buffer[name]
            if reuse.kind[name] is not AllocKind.kAllocate or name in self.present:
                return
            # a tensor without readers took over a buffer that went after its own last reader: it is allocated again
            # (AllocateReusedOrtValueIfNotAllocatedHelper)
            kind = AllocKind.kAllocate
        if kind is AllocKind.kShare or name in self.bound_outputs:
            return
        if name in self.elsewhere:
            self.elsewhere[name]()
            return
        size = self._bytes(name)
        self.present.add(name)
        if kind is AllocKind.kAllocate and self._is_traced(name):
            if self.tracer is not None:
                self.tracer.trace_allocation(name, size)
            elif self.pattern is not None and self.pattern.blocks.get(name, (0, -1))[1] == aligned(size):
                return
        self.live[name] = self._alloc(name, size, Category.ACTIVATION, self.session.plan.place(name))

    def _is_traced(self, name: str) -> bool:
        return self.graph.tensors[name].dtype != "string" and (self.session.plan.place(name) == self.session.plan.home)

    def _bytes(self, name: str) -> int:
        return self.graph.tensors[name].nbytes

    def _alloc(self, name: str, size: int, category: Category, place: Place) -> int:
        return self.session._alloc(size, self.operator, category, place, name)

    def take(self, size: int, label: str, *, of_cpu: bool = False) -> int:
        """Allocate something of a kernel's own; ``of_cpu``: from the CPU provider's allocator, whichever it runs on."""
        plan = self.session.plan
        place = Place.HOST if of_cpu and plan.settings.provider != "cpu" else plan.home
        return self._alloc(label, size, Category.WORKSPACE, place)

    def free(self, storage: int) -> None:
        """Give back what was taken."""
        self.session.builder.free(storage, self.operator)

    def sequence(self, name: str) -> tuple[int, ...]:
        """The storages of the tensors of a sequence that is seen here."""
        if name in self.sequences:
            return self.sequences[name]
        held = self.given.get(name)
        if isinstance(held, tuple):
            return held
        return () if self.outer is None else self.outer.sequence(name)

    def hold(self, held: Held) -> None:
        """One value more that shares storages."""
        self.session.holders.update(_storages(held))

    def drop(self, held: Held) -> None:
        """One value less: what nobody shares any more is given back."""
        for storage in _storages(held):
            self.session.holders[storage] -= 1
            if not self.session.holders[storage]:
                del self.session.holders[storage]
                self.free(storage)

    def results(self) -> dict[str, Held]:
        """End the run of a subgraph: the storages of its outputs, which live on; None for what its node does not
        hold."""
        builder, reuse = self.session.builder, self.session.plan.reuse
        self._keep_pattern()
        outputs: dict[str, Held] = {}
        for name in self.graph.outputs:
            is_shared = name in self.given or reuse.kind.get(name) is AllocKind.kShare
            if is_shared:
                outputs[name] = self.given.get(reuse.buffer.get(name, name))
            elif name in self.sequences:
                outputs[name] = self.sequences.pop(name)
                continue  # it holds them already
            else:
                outputs[name] = self.live.pop(name, None)
            self.hold(outputs[name])
        for items in self.sequences.values():
            self.drop(items)
        for storage in (*self.live.values(), *([] if self.block is None else [self.block])):
            builder.free(storage, self.operator)
        return outputs

    def _keep_pattern(self) -> None:
        if self.tracer is not None:
            self.session.patterns[self.key] = self.tracer.pattern()

    def end(self) -> None:
        """Everything that is still there goes, the outputs because the caller drops them before the next run."""
        builder = self.session.builder
        self.operator = builder.operator("end of run", phase=self.phase)
        self._keep_pattern()
        ended = {name: self.live.pop(name) for name in self.graph.outputs if name in self.live}
        if self.session.plan.settings.io_binding[1] == SESSION:
            self.session.bound |= ended
            ended = {}
        outputs = ended.values()
        block = [] if self.block is None else [self.block]
        for items in self.sequences.values():
            self.drop(items)
        is_copied = self.session.plan.settings.provider != "cpu"  # the caller gets copies in host memory
        for storage in (*self.live.values(), *block, *(outputs if is_copied else ())):
            builder.free(storage, self.operator)
        if self.session.plan.settings.stream_aware:
            builder.event(EventKind.SYNCHRONIZE, self.operator)
        if self.session.plan.settings.enable_memory_arena_shrinkage:
            builder.event(EventKind.EMPTY_CACHE, self.operator)
        for storage in () if is_copied else outputs:
            builder.free(storage, self.operator)


def _storages(held: Held) -> tuple[int, ...]:
    return () if held is None else held if isinstance(held, tuple) else (held,)


def _make_sequence(frame: Frame, node: Node) -> None:
    """The sequence that a node makes. A tensor that is put into it is copied, those that are in it already are shared
    with the sequence before (``core/providers/cpu/sequence/sequence_ops.cc``)."""
    name = node.key
    spec = frame.graph.tensors[name]
    shapes = spec.items or ()
    kept: tuple[int, ...] = ()
    if node.op_type == "SequenceInsert":
        kept = frame.sequence(node.inputs[0])
        shapes = (frame.graph.tensors[node.inputs[1]].shape,)
    elif node.op_type == "SequenceErase":
        kept, shapes = frame.sequence(node.inputs[0])[: len(shapes)], ()
    taken = [frame.take(TensorSpec(name, spec.dtype, shape).nbytes, name) for shape in shapes]
    frame.sequences[name] = (*kept, *taken)
    frame.hold(frame.sequences[name])
