"""Memory that kernels take besides their outputs: working buffers while they run, packed weights when a session loads.

The rules are those of 1.31.1 (the CPU provider's on x86-64), checked against recorded sessions; each names its source.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.onnxruntime.kernels import cuda_buffers
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries
from graphmem.runtimes.onnxruntime.kernels.tables import MICROSOFT
from graphmem.runtimes.onnxruntime.kernels.working_buffers import (
    FLOAT_BYTES,
    ONLY_OUTPUTS,
    OUTPUTS,
    WITHOUT_RULE,
    WORKING,
    Steps,
    attention_columns,
    symmetric_filter_bytes,
)

if TYPE_CHECKING:
    from graphmem.runtimes.onnxruntime.plan.session import SessionPlan

#: Columns of a packed matrix are padded to this (MLAS_SGEMM_STRIDEN_THREAD_ALIGN, ``MlasGemmPackBSize``).
PACKED_COLUMNS = 16
_CUBLAS = frozenset((
    ("", "MatMul"), ("", "Gemm"), ("", "Attention"), (MICROSOFT, "FusedMatMul"), (MICROSOFT, "GemmFastGelu"),
    (MICROSOFT, "Attention"), (MICROSOFT, "MultiHeadAttention"), (MICROSOFT, "GroupQueryAttention"),
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight rearranged for its kernel, or what a kernel keeps, in buffers of ``sizes`` bytes. ``reserved``: outside
    the arena's regions; ``dropped``: found to equal one that is there already, and given back; ``frees_weight``: no
    kernel needs the weight as it was any more."""

    node: str
    weight: str
    sizes: tuple[int, ...]
    reserved: bool
    dropped: bool = False
    frees_weight: bool = False

    @property
    def label(self) -> str:
        """What it is, for people."""
        return f"{self.weight} (packed)" if self.reserved or self.frees_weight else self.weight


@dataclass
class Weights:
    """The constants of a session while its kernels pack them: the readers left that need them as they are, in subgraphs
    too, and what was packed. Of those ``around`` a subgraph its kernels find the nearest scope's only
    (``SessionState::PrepackConstantInitializedTensors``)."""

    readers: Counter[str]
    around: frozenset[str] = frozenset()
    packed: set[tuple[Any, ...]] = field(default_factory=set)


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
        """What the kernel of ``node`` does with memory while it runs; ``on_host``: it is the CPU provider's."""
        kind = (node.domain, node.op_type)
        if on_host or self.libraries is None:
            rule = WORKING.get(kind)
            return ONLY_OUTPUTS if rule is None else rule(node, graph, self.threads)
        if self.cudnn_workspace_bytes is not None and kind in cuda_buffers.CONVOLUTIONS:
            return (OUTPUTS, self.cudnn_workspace_bytes) if self.cudnn_workspace_bytes else ONLY_OUTPUTS
        cuda = cuda_buffers.RULES.get(kind)
        steps = ONLY_OUTPUTS if cuda is None else cuda(node, graph, self.libraries)
        if steps is None:
            self.libraries.unmodelled.add((node.op_type, node.key))
        return steps or ONLY_OUTPUTS

    def label(self, node: Node) -> str:
        """What the working buffers of ``node`` are, for people: predicted plans of cuDNN are told apart."""
        is_predicted = self.libraries is not None and self.libraries.library is None
        return "cuDNN workspace" if is_predicted and (node.domain, node.op_type) in cuda_buffers.CONVOLUTIONS else ""

    def uses_cublas(self, nodes: Iterable[Node]) -> bool:
        """Whether any of ``nodes`` multiplies matrices on a GPU."""
        return self.libraries is not None and any((node.domain, node.op_type) in _CUBLAS for node in nodes)

    def unknown(self, plans: Iterable[SessionPlan]) -> dict[str, int]:
        """How many nodes, by operator, have kernels that take working buffers for which there is no rule; those that
        run on the CPU beside a card take none of its memory."""
        lacking = WITHOUT_RULE if self.libraries is None else cuda_buffers.WITHOUT_RULE
        nodes = [node for plan in plans for index, node in enumerate(plan.nodes) if index not in plan.host_nodes]
        count = Counter(node.op_type for node in nodes if (node.domain, node.op_type) in lacking)
        if self.libraries is not None:
            count.update(operator for operator, _ in self.libraries.unmodelled)
        return dict(count)

    def prepacked(self, graph: Graph, plan: SessionPlan, weights: Weights) -> Iterator[PackedWeight]:
        """What kernels of a session, or of a subgraph of one, take when they are made, in the order of the nodes: their
        packed weights first of all."""
        if self.libraries is not None:
            for index, node in enumerate(plan.nodes):
                if index in plan.host_nodes:
                    continue
                for label, size in cuda_buffers.made_with(node, graph, self.libraries):
                    yield PackedWeight(node.name, label, (size,), reserved=False)
                for label, size in cuda_buffers.reserved_with(node):
                    yield PackedWeight(node.name, label, (size,), reserved=True)
            return
        if plan.settings.disable_prepacking:
            return
        constants = weights.around.union(graph.initializers) - {*graph.inputs}
        for node in graph.nodes:
            for weight, sizes, layout in _packs(node, graph):
                if weight not in constants:
                    continue
                weights.readers[weight] -= 1
                key = (node.op_type, layout, graph.contents.get(weight, weight))
                is_dropped = layout == PASSING or (layout != NEVER_SHARED and key in weights.packed)
                weights.packed.add(key)
                is_last = not weights.readers[weight]
                yield PackedWeight(node.name, weight, sizes, layout != "transposed", is_dropped, is_last)


#: Layouts of what is packed for one kernel alone; of the second, what is needed only while another buffer is filled.
NEVER_SHARED, PASSING = "widened", "passing"


def _packs(node: Node, graph: Graph) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(weight, bytes of its buffers, layout) of what the CPU kernel of ``node`` packs, in the order of its inputs."""
    kind = (node.domain, node.op_type)
    for position in _WIDENED.get(kind, ()):
        name = node.inputs[position] if position < len(node.inputs) else ""
        if name and graph.tensors[name].dtype == "float16":
            yield name, (graph.tensors[name].elements * FLOAT_BYTES,), NEVER_SHARED
    if kind in _PACKED_GATES:
        for name, parts in zip(node.inputs[1:3], _PACKED_GATES[kind], strict=True):
            sizes = _packed_recurrence(graph.tensors[name], parts)
            if sizes:
                yield name, sizes, f"recurrence {parts}"
    if kind == (MICROSOFT, "Attention") and graph.tensors[node.inputs[1]].dtype == "float32":
        heads, rows = int(node.attributes["num_heads"]), int(graph.tensors[node.inputs[1]].shape[0])
        columns = attention_columns(node, graph)
        yield node.inputs[1], tuple(_padded(n // heads) * heads * rows * FLOAT_BYTES for n in columns), "heads"
    if node.op_type == "QLinearConv":
        yield from _quantized_filter(node, graph)
    rule = _PACKING.get(kind)
    position = _WEIGHT_POSITION.get(node.op_type, 1)
    weight = node.inputs[position] if len(node.inputs) > position else ""
    if rule is None or not weight:
        return
    if rule is _packed_int8 and graph.tensors[node.inputs[0]].dtype == "int8":
        return  # x86-64 has no kernel for signed left sides that packs
    size, layout = rule(node, graph.tensors[weight].shape, graph.tensors[weight].dtype)
    if size:
        yield weight, (size,), layout
        if node.op_type == "QGemm" and node.attributes.get("transB", 0):
            yield weight, (graph.tensors[weight].elements,), PASSING


def _packed_matrix(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``GemmPackBFp32`` (``core/providers/cpu/math/gemm_matmul_common.h``): 2-D float weights, columns padded."""
    if len(shape) != 2 or dtype != "float32" or 0 in shape:
        return 0, ""
    transposed = bool(node.attributes.get("transB", 0))
    rows, columns = (shape[1], shape[0]) if transposed else shape
    return _padded(columns) * rows * FLOAT_BYTES, f"packed {transposed}"


def _packed_int8(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``MlasGemmPackBSize`` for 8-bit matrices (``core/mlas/lib/qgemm.cpp``): sums of columns, then the matrix with
    columns padded to 16 and rows to 4 (x86-64 kernels), the whole to 64 bytes."""
    if len(shape) != 2 or dtype not in ("int8", "uint8") or 0 in shape:
        return 0, ""
    rows, columns = (shape[1], shape[0]) if node.attributes.get("transB", 0) else shape
    return _packed_bytes(rows, columns), "packed"


def _packed_bytes(rows: int, columns: int) -> int:
    size = _padded(columns) * FLOAT_BYTES + _padded(columns) * (-(-rows // 4) * 4)
    return -(-size // 64) * 64


def _padded(columns: int) -> int:
    return -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS


def _quantized_filter(node: Node, graph: Graph) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """``QLinearConv::PrePack``: the filter for a kernel without sums, or as a matrix of each group, laid out anew in a
    buffer that passes; as it was, but in another order, where neither is possible."""
    name, group = node.inputs[3], int(node.attributes.get("group", 1))
    filters, channels, *kernel = (int(d) for d in graph.tensors[name].shape)
    symmetric = symmetric_filter_bytes(node, graph)
    is_depthwise = channels == 1 and filters == group
    depth, columns = channels * math.prod(kernel), filters // group
    if symmetric:
        yield name, (symmetric,), "symmetric"
    elif is_depthwise or graph.tensors[node.inputs[0]].dtype == "int8":
        yield name, (filters * depth,), "reordered"
    else:
        yield name, (group * _packed_bytes(depth, columns),), "packed"
        yield name, (columns * depth,), PASSING


def _transposed_filter(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``ConvTranspose<float>::PrePack``: the filter transposed, where that moves anything."""
    group = int(node.attributes.get("group", 1))
    rows, columns = shape[0] // group, math.prod(shape[1:])
    if dtype != "float32" or len(shape) <= 2 or rows == 1 or columns == 1:
        return 0, ""
    return math.prod(shape) * FLOAT_BYTES, "transposed"


#: Gates of a recurrence's two weights as they are packed: a GRU's last gate is multiplied by itself
#: (``TryPackWeights``, ``rnn/*.cc``, ``contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc``).
_PACKED_GATES: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {
    ("", "LSTM"): ((4,), (4,)),
    ("", "GRU"): ((3,), (2, 1)),
    (MICROSOFT, "DynamicQuantizeLSTM"): ((4,), (4,)),
}
#: Inputs of normalizations that are kept in fp32 where they are float16 (``PrePack`` of ``layer_norm_impl.cc`` and
#: ``skip_layer_norm.cc``).
_WIDENED = {("", "LayerNormalization"): (1, 2), (MICROSOFT, "SkipLayerNormalization"): (2, 3, 4)}


def _packed_recurrence(spec: TensorSpec, parts: tuple[int, ...]) -> tuple[int, ...]:
    """Of [directions, gates, inputs] in float32, or [directions, inputs, gates] in 8 bits."""
    directions, first, second = (int(d) for d in spec.shape)
    if spec.dtype == "float32":
        state = first // sum(parts)
        return tuple(directions * _padded(count * state) * second * FLOAT_BYTES for count in parts)
    return (directions * _packed_bytes(first, second),) if spec.dtype in ("int8", "uint8") else ()


_PACKING: dict[tuple[str, str], Callable[[Node, Any, str], tuple[int, str]]] = {
    ("", "MatMul"): _packed_matrix,
    ("", "Gemm"): _packed_matrix,
    (MICROSOFT, "FusedMatMul"): _packed_matrix,
    (MICROSOFT, "FusedGemm"): _packed_matrix,
    ("", "ConvTranspose"): _transposed_filter,
    ("", "MatMulInteger"): _packed_int8,
    ("", "QLinearMatMul"): _packed_int8,
    (MICROSOFT, "DynamicQuantizeMatMul"): _packed_int8,
    (MICROSOFT, "MatMulIntegerToFloat"): _packed_int8,
    (MICROSOFT, "QGemm"): _packed_int8,
}
_WEIGHT_POSITION = {"QLinearMatMul": 3, "QGemm": 3}
