"""The trace of an ONNX Runtime session: what loading takes, then one run after another, each with its own shapes.

A run allocates a tensor when its kernel asks for it and gives its buffer back after the last reader. A run whose
pattern key is new traces its allocations; the next run with that key allocates the packed block first and places in it
every tensor whose size is the traced one (``core/framework/execution_frame.cc``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphmem.graph.model import Graph, Node
from graphmem.runtimes.onnxruntime.kernels.memory import KernelMemory
from graphmem.runtimes.onnxruntime.kernels.working_buffers import OUTPUTS
from graphmem.runtimes.onnxruntime.plan.pattern import MemoryPattern, MemoryPatternPlanner, aligned, pattern_key
from graphmem.runtimes.onnxruntime.plan.reuse import AllocKind
from graphmem.runtimes.onnxruntime.plan.session import SessionPlan
from graphmem.trace import Category, EventKind, Place, TraceBuilder

#: Name of the phase in which a session is loaded, after the session's own prefix.
LOAD = "load"


@dataclass
class Runs:
    """Writes one session into a builder; ``patterns`` are kept by key for as long as the session lives."""

    plan: SessionPlan
    memory: KernelMemory
    builder: TraceBuilder
    stream: int = 0
    prefix: str = ""
    patterns: dict[int, MemoryPattern] = field(default_factory=dict)
    bound: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # bytes of the pattern's block of each run, 0 without one

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, graph: Graph) -> None:
        """Initializers, then what kernels take when they are made."""
        graph = self.plan.with_copies(graph)
        phase = self.builder.phase(0, f"{self.prefix}{LOAD}")
        operator = self.builder.operator("initializers", phase=phase)
        held = {
            label: self._alloc(size, operator, Category.PARAMETER, place, label)
            for label, size, place in self.plan.initializer_blocks(graph)
        }
        for block in self.memory.prepacked(graph, self.plan):
            operator = self.builder.operator("prepacking", block.node, phase)
            category = Category.PARAMETER if block.reserved else Category.BUFFER
            storage = self._alloc(block.bytes, operator, category, self.plan.home, block.label)
            if block.dropped:
                self.builder.free(storage, operator)
            if block.frees_weight and block.weight in held:
                self.builder.free(held.pop(block.weight), operator)

    def _alloc(self, size: int, operator: int, category: Category, place: Place, label: str) -> int:
        return self.builder.alloc(size, operator, category, stream=self.stream, place=place, label=label)

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self, graph: Graph, iteration: int) -> None:
        """One run of ``graph``, whose tensors have this run's shapes."""
        phase = self.builder.phase(iteration, f"{self.prefix}run")
        frame = _Frame(self, self.plan.with_copies(graph), phase)
        frame.begin()
        for step, index in enumerate(self.plan.reuse.order):
            frame.execute(index, self.plan.reuse.releases[step])
        frame.end()


@dataclass
class _Frame:
    """``ExecutionFrame``: the memory of one run."""

    session: Runs
    graph: Graph
    phase: int
    live: dict[str, int] = field(default_factory=dict)  # buffer -> storage
    present: set[str] = field(default_factory=set)  # buffers that exist, in the block or by themselves
    pattern: MemoryPattern | None = None
    tracer: MemoryPatternPlanner | None = None
    key: int = 0
    block: int | None = None
    operator: int = 0

    def begin(self) -> None:
        """Copy the inputs to the device; then find or start the pattern of these shapes."""
        session, plan = self.session, self.session.plan
        if plan.copied_inputs:
            self.operator = session.builder.operator("inputs", phase=self.phase)
            for name in plan.copied_inputs:
                self.live[name] = self._alloc(name, self._bytes(name), Category.INPUT, plan.place(name))
        size = 0
        if plan.settings.enable_mem_pattern and not plan.pattern_forbidden:
            self.key = pattern_key([plan.shape(self.graph, name) for name in self.graph.inputs])
            self.pattern = session.patterns.get(self.key)
            if self.pattern is None:
                self.tracer = MemoryPatternPlanner()
            elif self.pattern.peak_bytes:
                size = self.pattern.peak_bytes
                self.operator = session.builder.operator("memory pattern", phase=self.phase)
                label = "memory pattern block"
                self.block = session._alloc(size, self.operator, Category.ACTIVATION, plan.home, label)
        session.blocks.append(size)
        constants = frozenset(plan.initializers)
        for name in self.graph.outputs:  # a constant that is an output is copied for the caller
            if name in constants:
                self.operator = self.operator or session.builder.operator("constant outputs", phase=self.phase)
                self.live[name] = self._alloc(name, self._bytes(name), Category.ACTIVATION, plan.place(name))

    def execute(self, index: int, releases: Sequence[str]) -> None:
        """Outputs and working buffers of one kernel, and what is given back after it."""
        session = self.session
        node, on_host = session.plan.nodes[index], index in session.plan.host_nodes
        place = Place.HOST if on_host else session.plan.home
        self.operator = session.builder.operator(operator_name(node), node.name, self.phase)
        taken: list[int | None] = []
        label = session.memory.label(node)
        for step in session.memory.steps(node, self.graph, on_host):
            if step > 0:
                taken.append(session._alloc(step, self.operator, Category.WORKSPACE, place, label))
            elif step == OUTPUTS:
                for name in filter(None, node.outputs):
                    self._output(name)
            else:
                self._give_back(taken, -step - 1)
        for position in reversed(range(len(taken))):
            self._give_back(taken, position)
        for name in releases:
            if self.tracer is not None and self._is_traced(name):
                self.tracer.trace_free(name)
            self.present.discard(name)
            storage = self.live.pop(name, None)
            if storage is not None:
                session.builder.free(storage, self.operator)

    def _give_back(self, taken: list[int | None], position: int) -> None:
        storage = taken[position]
        if storage is not None:
            self.session.builder.free(storage, self.operator)
            taken[position] = None

    def _output(self, name: str) -> None:
        reuse = self.session.plan.reuse
        kind = reuse.kind[name]
        if kind is AllocKind.kReuse:
            name = reuse.buffer[name]
            if reuse.kind[name] is not AllocKind.kAllocate or name in self.present:
                return
            # a tensor without readers took over a buffer that went after its own last reader: it is allocated again
            # (AllocateReusedOrtValueIfNotAllocatedHelper)
            kind = AllocKind.kAllocate
        if name in self.session.plan.bound_outputs:
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

    def end(self) -> None:
        """Everything that is still there goes, the outputs because the caller drops them before the next run."""
        builder = self.session.builder
        self.operator = builder.operator("end of run", phase=self.phase)
        if self.tracer is not None:
            self.session.patterns[self.key] = self.tracer.pattern()
        outputs = [self.live.pop(name) for name in self.graph.outputs if name in self.live]
        block = [] if self.block is None else [self.block]
        is_copied = self.session.plan.settings.provider != "cpu"  # the caller gets copies in host memory
        for storage in (*self.live.values(), *block, *(outputs if is_copied else ())):
            builder.free(storage, self.operator)
        if self.session.plan.settings.stream_aware:
            builder.event(EventKind.SYNCHRONIZE, self.operator)
        if self.session.plan.settings.enable_memory_arena_shrinkage:
            builder.event(EventKind.EMPTY_CACHE, self.operator)
        for storage in () if is_copied else outputs:
            builder.free(storage, self.operator)


def operator_name(node: Node) -> str:
    """``domain.Operator``, the domain left out for ONNX's own."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type
