"""Memory that kernels take besides their outputs: working buffers while they run, packed weights when a session loads.

The rules are those of 1.31.1 (the CPU provider's on x86-64), checked against recorded sessions; each names its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import TYPE_CHECKING

from graphmem.base.records import dataclass
from graphmem.graph.model import Graph, Node
from graphmem.runtimes.onnxruntime.kernels import cuda_buffers
from graphmem.runtimes.onnxruntime.kernels.context import ONLY_OUTPUTS, OUTPUTS, Context, Steps
from graphmem.runtimes.onnxruntime.kernels.cuda_attention import RULES
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries
from graphmem.runtimes.onnxruntime.kernels.packing import NEVER_SHARED, PASSING, PackedWeight, packed_by
from graphmem.runtimes.onnxruntime.kernels.tables import TABLES
from graphmem.runtimes.onnxruntime.kernels.working_buffers import WORKING

if TYPE_CHECKING:
    from graphmem.runtimes.onnxruntime.plan.session import SessionPlan


@dataclass
class Weights:
    """The constants of a session while its kernels pack them: the readers left that need them as they are, in subgraphs
    too, and what was packed. Of those ``around`` a subgraph its kernels find the nearest scope's only
    (``SessionState::PrepackConstantInitializedTensors``)."""

    readers: Counter[str]
    around: frozenset[str] = frozenset()
    packed: set[tuple[str, str, str]] = field(default_factory=set)


def weights_of(graph: Graph) -> Weights:
    """The weights of a session of ``graph``, before any is packed."""
    return Weights(Counter(_readers(graph)))


def _readers(graph: Graph) -> Iterator[str]:
    yield from (name for node in graph.nodes for name in node.inputs)
    yield from graph.outputs
    for bodies in graph.bodies.values():
        for body in bodies:
            yield from _readers(body.graphs[0])


@dataclass(frozen=True)
class KernelMemory:
    """The rules of one provider; ``libraries``: what cuDNN takes for those of the CUDA provider, whose convolutions
    take ``cudnn_workspace_bytes`` each where that is given."""

    provider: str
    threads: int = 1
    libraries: Libraries | None = None
    cudnn_workspace_bytes: int | None = None

    def steps(self, node: Node, graph: Graph, on_host: bool) -> Steps:
        """The steps of the kernel of ``node`` in memory while it runs; ``on_host``: it is the CPU provider's."""
        if on_host or self.libraries is None:
            rule = WORKING.get(node.operator)
            return ONLY_OUTPUTS if rule is None else rule(Context(node, graph), self.threads)
        if self.cudnn_workspace_bytes is not None and node.operator in cuda_buffers.CONVOLUTIONS:
            return (OUTPUTS, self.cudnn_workspace_bytes) if self.cudnn_workspace_bytes else ONLY_OUTPUTS
        cuda = RULES.get(node.operator)
        steps = ONLY_OUTPUTS if cuda is None else cuda(Context(node, graph), self.libraries)
        if steps is None:
            self.libraries.unmodelled.add((node.op_type, node.key))
        return steps or ONLY_OUTPUTS

    def label(self, node: Node) -> str:
        """The name of the working buffers of ``node`` in reports: those of predicted plans of cuDNN have one of their
        own."""
        is_predicted = self.libraries is not None and self.libraries.library is None
        return "cuDNN workspace" if is_predicted and node.operator in cuda_buffers.CONVOLUTIONS else ""

    def uses_cublas(self, nodes: Iterable[Node]) -> bool:
        """Whether any of ``nodes`` multiplies matrices on a GPU."""
        return any(node.operator in TABLES[self.provider].uses_cublas for node in nodes)

    def unknown(self, plans: Iterable[SessionPlan]) -> dict[str, int]:
        """How many nodes, by operator, have kernels that take working buffers for which there is no rule; those that
        run on the CPU beside a card take none of its memory."""
        lacking = TABLES[self.provider].without_rule
        nodes = [node for plan in plans for index, node in enumerate(plan.nodes) if index not in plan.host_nodes]
        count = Counter(node.op_type for node in nodes if node.operator in lacking)
        if self.libraries is not None:
            count.update(operator for operator, _ in self.libraries.unmodelled)
        return dict(count)

    def prepacked(self, graph: Graph, plan: SessionPlan, weights: Weights) -> Iterator[PackedWeight]:
        """The buffers that kernels of a session, or of a subgraph of one, take when they are made, in the order of the
        nodes: packed weights first of all."""
        if self.libraries is not None:
            for index, node in enumerate(plan.nodes):
                made = cuda_buffers.made_with(Context(node, graph), self.libraries)
                for label, size, reserved in () if index in plan.host_nodes else made:
                    yield PackedWeight(node.name, label, (size,), reserved)
            return
        if plan.settings.disable_prepacking:
            return
        constants = weights.around.union(graph.initializers) - {*graph.inputs}
        for node in graph.nodes:
            for weight, sizes, layout in packed_by(Context(node, graph)):
                if weight not in constants:
                    continue
                weights.readers[weight] -= 1
                key = (node.op_type, layout, graph.contents.get(weight, weight))
                is_dropped = layout == PASSING or (layout != NEVER_SHARED and key in weights.packed)
                weights.packed.add(key)
                is_last = not weights.readers[weight]
                yield PackedWeight(node.name, weight, sizes, layout != "transposed", is_dropped, is_last)
