"""Plan a bound graph by plain liveness: a tensor is born when its node runs and dies after its last reader.

This is what any executor needs at least when it frees as early as it can, TensorFlow's for one, whose kernels may also
write over an input that nobody else needs (``forwards``). It is not ONNX Runtime's planner: no buffer is reused for
another tensor, and no memory pattern is laid out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphmem.graph.model import Graph, Node
from graphmem.graph.order import execution_order
from graphmem.graph.placement import Placement, place
from graphmem.trace import Category, Place, Trace, TraceBuilder

#: Output 0 is input 0 under another shape: ``Alias(0, 0)`` of the CUDA kernels (reshape.cc, identity_op.cc, ...).
ALIASING = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"))
PLAN_NOTE = (
    "plan",
    "plain liveness plan, not ONNX Runtime's planner: no in-place or reused buffers, no memory pattern",
)

Key = tuple[str, Place]  # a tensor in one place
#: Operator -> the inputs its kernel may write its first output over, once nobody else needs them.
Forwards = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LivePlan:
    """Which tensor owns the storage of which (``owner``), and the step after which an owner's storage is free.

    ``last_step`` has no entry for storages that live to the end of a run; steps index ``order``.
    """

    graph: Graph
    order: tuple[int, ...]
    placement: Placement
    owner: dict[Key, Key]
    last_step: dict[Key, int]


def live_plan(graph: Graph, forwards: Forwards | None = None) -> LivePlan:
    """Find the live range of every storage of one run of ``graph``.

    With ``forwards``, as TensorFlow's executor: nodes in the order of the file, kernels write over inputs, and what
    nobody reads is freed at once. Without, nodes in ONNX Runtime's order, and what nobody reads stays to the end.
    """
    order = tuple(execution_order(graph.nodes) if forwards is None else range(len(graph.nodes)))
    placement = place(graph, order)
    owner: dict[Key, Key] = {}
    for name in (*graph.inputs, *graph.initializers):
        owner.update((key, key) for key in _keys(name, placement))
    pinned = {*graph.inputs, *graph.initializers}
    last: dict[Key, int] = {}
    reads = _reads(graph, placement)  # still to come, of every storage
    for step, index in enumerate(order):
        node = graph.nodes[index]
        here = [owner[n, placement.read_at(index, node, position)] for position, n in enumerate(node.inputs) if n]
        last.update(dict.fromkeys(here, step))
        reads.subtract(here)
        for name in filter(None, node.outputs):
            shared = None
            if forwards is not None or name not in graph.outputs:  # ONNX Runtime gives outputs buffers of their own
                shared = _shared_storage(graph, node, index, name, placement)
            candidates = _may_forward(graph, node, index, name, placement, forwards or {})
            shared = shared or next((key for key in candidates if _is_free(owner, key, reads, here, pinned)), None)
            if shared is not None:
                reads[owner[shared]] += reads.pop((name, placement.home[name]), 0)
            elif forwards is not None:  # an executor drops what nobody will read
                last.update(dict.fromkeys(_keys(name, placement), step))
            for key in _keys(name, placement):
                owner[key] = owner[shared] if shared is not None and key == (name, placement.home[name]) else key
            if name in placement.copies:  # the copy is made at once, which is a read of the original
                last[owner[name, placement.home[name]]] = step
    for key in _kept(graph, placement, owner):
        last.pop(key, None)
    return LivePlan(graph, order, placement, owner, last)


def _keys(name: str, placement: Placement) -> list[Key]:
    home = placement.home[name]
    other = Place.HOST if home == Place.DEVICE else Place.DEVICE
    return [(name, home), (name, other)] if name in placement.copies else [(name, home)]


def _reads(graph: Graph, placement: Placement) -> Counter[Key]:
    """How often every tensor is read in every place, an output once more by the caller."""
    reads = Counter((name, placement.home[name]) for name in graph.outputs)
    for index, node in enumerate(graph.nodes):
        reads.update((name, placement.read_at(index, node, i)) for i, name in enumerate(node.inputs) if name)
    return reads


def _may_forward(
    graph: Graph, node: Node, index: int, output: str, placement: Placement, forwards: Forwards
) -> list[Key]:
    """The inputs that ``output`` could be written over: forwarded by the kernel, and of its place, type and shape."""
    if node.domain or output != node.outputs[0]:
        return []
    new, found = graph.tensors[output], []
    for position in forwards.get(node.op_type, ()):
        name = node.inputs[position] if position < len(node.inputs) else ""
        if name and (graph.tensors[name].dtype, graph.tensors[name].shape) == (new.dtype, new.shape):
            found.append((name, placement.read_at(index, node, position)))
    return [key for key in found if key[1] == placement.home[output]]


def _is_free(owner: dict[Key, Key], key: Key, reads: Counter[Key], here: list[Key], pinned: set[str]) -> bool:
    """Whether the storage of ``key`` has one reference left: that of one of the inputs ``here``."""
    storage = owner[key]
    return reads[storage] == 0 and here.count(storage) == 1 and storage[0] not in pinned


def _shared_storage(graph: Graph, node: Node, index: int, output: str, placement: Placement) -> Key | None:
    """The input whose storage ``output`` shares."""
    if node.domain or node.op_type not in ALIASING or output != node.outputs[0]:
        return None
    source = (node.inputs[0], placement.read_at(index, node, 0))
    same_size = graph.tensors[source[0]].nbytes == graph.tensors[output].nbytes
    return source if same_size and source[1] == placement.home[output] else None


def _kept(graph: Graph, placement: Placement, owner: dict[Key, Key]) -> list[Key]:
    """Storages that outlive their last reader: inputs and outputs to the end of the run, initializers for ever."""
    names = dict.fromkeys((*graph.inputs, *graph.initializers, *graph.outputs))
    return [owner[key] for name in names for key in _keys(name, placement)]


@dataclass
class _Writer:
    plan: LivePlan
    builder: TraceBuilder
    phase: int = 0
    live: dict[Key, int] = field(default_factory=dict)  # owner -> storage index, of this run

    def alloc(self, name: str, category: Category, operator: int) -> None:
        """Allocate the storages that ``name`` owns, in its home and as a copy."""
        spec = self.plan.graph.tensors[name]
        for key in _keys(name, self.plan.placement):
            if self.plan.owner[key] == key:
                where = Place.HOST if spec.dtype == "string" else key[1]
                label = name if key[1] == self.plan.placement.home[name] else f"{name} (copy)"
                self.live[key] = self.builder.alloc(spec.nbytes, operator, category, place=where, label=label)

    def run(self, iteration: int) -> None:
        """One run: copy the inputs, execute every node, give everything back."""
        graph, plan = self.plan.graph, self.plan
        self.phase = self.builder.phase(iteration, "run")
        self.live = {}
        if graph.inputs:
            operator = self.builder.operator("inputs", phase=self.phase)
            for name in graph.inputs:
                self.alloc(name, Category.INPUT, operator)
        dying: dict[int, list[Key]] = {}
        for key, step in plan.last_step.items():
            dying.setdefault(step, []).append(key)
        operator = 0
        for step, index in enumerate(plan.order):
            node = graph.nodes[index]
            operator = self.builder.operator(node.operator, node.name, self.phase)
            for name in filter(None, node.outputs):
                self.alloc(name, Category.ACTIVATION, operator)
            for key in dying.get(step, ()):
                if key in self.live:
                    self.builder.free(self.live.pop(key), operator)
        if self.live:
            operator = self.builder.operator("end of run", phase=self.phase)
        for storage in self.live.values():
            self.builder.free(storage, operator)


def plan_liveness(
    graph: Graph,
    *,
    iterations: int = 2,
    notes: Sequence[tuple[str, str]] = (PLAN_NOTE,),
    forwards: Forwards | None = None,
) -> Trace:
    """The trace of loading ``graph`` and running it ``iterations`` times; all sizes are unrounded bytes.

    Initializers are allocated in phase 0 ``load`` and stay; each run is a phase ``run``. Device copies of the inputs,
    the outputs, and tensors nobody reads live to the end of their run.
    """
    builder = TraceBuilder(source=graph.name, notes=[*graph.notes, *notes])
    writer = _Writer(live_plan(graph, forwards), builder)
    phase = builder.phase(0, "load")
    if graph.initializers:
        operator = builder.operator("initializers", phase=phase)
        for name in graph.initializers:
            writer.alloc(name, Category.PARAMETER, operator)
    for iteration in range(1, iterations + 1):
        writer.run(iteration)
    return builder.build()
