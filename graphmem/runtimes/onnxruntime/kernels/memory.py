"""Memory that kernels take besides their outputs: working buffers while they run, packed weights when a session loads.

The CPU provider's rules are those of 1.31.1 on x86-64, checked against recorded sessions; each names its source. The
CUDA provider's workspaces come from cuDNN and cuBLAS, for which there is no rule; see ``runtimes/onnxruntime.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphmem.graph.model import Graph, Node
from graphmem.runtimes.onnxruntime.kernels.tables import MICROSOFT
from graphmem.runtimes.onnxruntime.kernels.working_buffers import (
    FLOAT_BYTES,
    ONLY_OUTPUTS,
    OUTPUTS,
    WITHOUT_CUDA_RULE,
    WITHOUT_RULE,
    WORKING,
    Steps,
)

if TYPE_CHECKING:
    from graphmem.runtimes.onnxruntime.plan.session import SessionPlan

#: Columns of a packed matrix are padded to this (MLAS_SGEMM_STRIDEN_THREAD_ALIGN, ``MlasGemmPackBSize``).
PACKED_COLUMNS = 16
#: AlgoSearchWorkspaceSize of ``core/providers/cuda/nn/conv.cc``: what ONNX Runtime lets cuDNN 8 take while it searches.
#: With cuDNN 9 the chosen plan's own size is taken, which only cuDNN knows; this stands in for it.
ASSUMED_CUDNN_WORKSPACE_BYTES = 32 << 20
_CUDNN_CONVOLUTIONS = frozenset((("", "Conv"), ("", "ConvTranspose"), (MICROSOFT, "FusedConv")))

_CUBLAS = frozenset((
    ("", "MatMul"), ("", "Gemm"), ("", "Attention"), (MICROSOFT, "FusedMatMul"), (MICROSOFT, "GemmFastGelu"),
    (MICROSOFT, "Attention"), (MICROSOFT, "MultiHeadAttention"), (MICROSOFT, "GroupQueryAttention"),
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight rearranged for its kernel. ``reserved``: outside the arena's regions; ``dropped``: found to equal one
    that is there already, and given back; ``frees_weight``: no kernel needs the weight as it was any more."""

    node: str
    weight: str
    bytes: int
    reserved: bool
    dropped: bool = False
    frees_weight: bool = False


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
    """The rules of one provider."""

    provider: str
    threads: int = 1
    cudnn_workspace_bytes: int | None = None
    cublas_workspace_bytes: int = 0

    @property
    def convolution_workspace(self) -> int:
        """Bytes each convolution of the CUDA provider is assumed to take: a guess, unless it was given."""
        given = self.cudnn_workspace_bytes
        return ASSUMED_CUDNN_WORKSPACE_BYTES if given is None else given

    def steps(self, node: Node, graph: Graph) -> Steps:
        """What the kernel of ``node`` does with memory while it runs."""
        kind = (node.domain, node.op_type)
        if self.provider == "cpu":
            rule = WORKING.get(kind)
            return ONLY_OUTPUTS if rule is None else rule(node, graph, self.threads)
        if kind in _CUDNN_CONVOLUTIONS and self.convolution_workspace:
            return (OUTPUTS, self.convolution_workspace)
        return ONLY_OUTPUTS

    def uses_cublas(self, nodes: Iterable[Node]) -> bool:
        """Whether any of ``nodes`` multiplies matrices on a GPU."""
        return self.provider != "cpu" and any((node.domain, node.op_type) in _CUBLAS for node in nodes)

    def unknown(self, nodes: Iterable[Node]) -> dict[str, int]:
        """How many of ``nodes``, by operator, have kernels that take working buffers for which there is no rule."""
        lacking = WITHOUT_RULE if self.provider == "cpu" else WITHOUT_CUDA_RULE
        return dict(Counter(node.op_type for node in nodes if (node.domain, node.op_type) in lacking))

    def prepacked(self, graph: Graph, plan: SessionPlan, weights: Weights) -> Iterator[PackedWeight]:
        """The packed weights of a session, or of a subgraph of one, in the order of the nodes."""
        if self.provider != "cpu" or plan.settings.disable_prepacking:
            return
        constants = weights.around.union(graph.initializers) - {*graph.inputs}
        for node in graph.nodes:
            rule = _PACKING.get((node.domain, node.op_type))
            position = _WEIGHT_POSITION.get(node.op_type, 1)
            weight = node.inputs[position] if len(node.inputs) > position else ""
            if rule is None or weight not in constants:
                continue
            if rule is _packed_int8 and graph.tensors[node.inputs[0]].dtype == "int8":
                continue  # x86-64 has no kernel for signed left sides that packs
            size, layout = rule(node, graph.tensors[weight].shape, graph.tensors[weight].dtype)
            if not size:
                continue
            key = (node.op_type, layout, plan.settings.equal_weights.get(weight, weight))
            weights.readers[weight] -= 1
            is_last = not weights.readers[weight]
            yield PackedWeight(node.name, weight, size, layout != "transposed", key in weights.packed, is_last)
            weights.packed.add(key)


def _packed_matrix(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``GemmPackBFp32`` (``core/providers/cpu/math/gemm_matmul_common.h``): 2-D float weights, columns padded."""
    if len(shape) != 2 or dtype != "float32" or 0 in shape:
        return 0, ""
    transposed = bool(node.attributes.get("transB", 0))
    rows, columns = (shape[1], shape[0]) if transposed else shape
    return -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS * rows * FLOAT_BYTES, f"packed {transposed}"


def _packed_int8(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``MlasGemmPackBSize`` for 8-bit matrices (``core/mlas/lib/qgemm.cpp``): sums of columns, then the matrix with
    columns padded to 16 and rows to 4 (x86-64 kernels), the whole to 64 bytes."""
    if len(shape) != 2 or dtype not in ("int8", "uint8") or 0 in shape:
        return 0, ""
    columns = -(-shape[1] // PACKED_COLUMNS) * PACKED_COLUMNS
    size = columns * FLOAT_BYTES + columns * (-(-shape[0] // 4) * 4)
    return -(-size // 64) * 64, "packed"


def _transposed_filter(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``ConvTranspose<float>::PrePack``: the filter transposed, where that moves anything."""
    group = int(node.attributes.get("group", 1))
    rows, columns = shape[0] // group, math.prod(shape[1:])
    if dtype != "float32" or len(shape) <= 2 or rows == 1 or columns == 1:
        return 0, ""
    return math.prod(shape) * FLOAT_BYTES, "transposed"


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
}
_WEIGHT_POSITION = {"QLinearMatMul": 3}
