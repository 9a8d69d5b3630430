"""Memory that kernels take besides their outputs: working buffers while they run, packed weights when a session loads.

The CPU provider's rules are those of 1.31.1 on x86-64, checked against recorded sessions; each names its source. The
CUDA provider's workspaces come from cuDNN and cuBLAS, for which there is no rule; see ``runtimes/onnxruntime.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from graphmem.graph.kernel_tables import MICROSOFT
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.graph.reuse_plan import element_size

if TYPE_CHECKING:
    from graphmem.graph.session_plan import SessionPlan

FLOAT_BYTES = 4
#: Floats of im2col a thread works on: MLAS_SGEMM_STRIDEN x MLAS_SGEMM_STRIDEK (``core/mlas/lib/mlasi.h``).
CONV_BUFFER_FLOATS = 128 * 128
#: Columns of a packed matrix are padded to this (MLAS_SGEMM_STRIDEN_THREAD_ALIGN, ``MlasGemmPackBSize``).
PACKED_COLUMNS = 16
#: AlgoSearchWorkspaceSize of ``core/providers/cuda/nn/conv.cc``: what ONNX Runtime lets cuDNN 8 take while it searches.
#: With cuDNN 9 the chosen plan's own size is taken, which only cuDNN knows; this stands in for it.
ASSUMED_CUDNN_WORKSPACE_BYTES = 32 << 20
_CUDNN_CONVOLUTIONS = frozenset((("", "Conv"), ("", "ConvTranspose"), (MICROSOFT, "FusedConv")))


@dataclass(frozen=True, slots=True)
class WorkingBuffers:
    """Bytes of the buffers a kernel takes: ``before`` and ``after`` its outputs are allocated, each given back at once;
    ``around``: all before the outputs, and given back after them; ``together``: all after the outputs."""

    before: tuple[int, ...] = ()
    around: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    together: tuple[int, ...] = ()


NONE = WorkingBuffers()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight rearranged for its kernel. ``reserved``: outside the arena's regions; ``dropped``: found to equal one
    that is there already, and given back."""

    node: str
    weight: str
    bytes: int
    reserved: bool
    dropped: bool = False


@dataclass(frozen=True)
class KernelMemory:
    """The rules of one provider."""

    provider: str
    threads: int = 1
    cudnn_workspace_bytes: int | None = None

    @property
    def convolution_workspace(self) -> int:
        """Bytes each convolution of the CUDA provider is assumed to take: a guess, unless it was given."""
        given = self.cudnn_workspace_bytes
        return ASSUMED_CUDNN_WORKSPACE_BYTES if given is None else given

    def working_buffers(self, node: Node, graph: Graph) -> WorkingBuffers:
        """What the kernel of ``node`` takes while it runs."""
        kind = (node.domain, node.op_type)
        if self.provider == "cpu":
            rule = _WORKING.get(kind)
            return NONE if rule is None else rule(node, graph, self.threads)
        if kind in _CUDNN_CONVOLUTIONS and self.convolution_workspace:
            return WorkingBuffers(after=(self.convolution_workspace,))
        return NONE

    def prepacked(self, graph: Graph, plan: SessionPlan) -> Iterator[PackedWeight]:
        """The packed weights of a session, in the order of the nodes."""
        if self.provider != "cpu" or plan.settings.disable_prepacking:
            return
        constants = frozenset(graph.initializers)
        seen: set[tuple[Any, ...]] = set()
        for node in graph.nodes:
            rule = _PACKING.get((node.domain, node.op_type))
            weight = node.inputs[1] if len(node.inputs) > 1 else ""
            if rule is None or weight not in constants or weight in graph.inputs:
                continue
            size, layout = rule(node, graph.tensors[weight].shape, graph.tensors[weight].dtype)
            if not size:
                continue
            key = (node.op_type, layout, plan.settings.equal_weights.get(weight, weight))
            yield PackedWeight(node.name, weight, size, layout != "transposed", key in seen)
            seen.add(key)


def _conv(node: Node, graph: Graph, threads: int) -> WorkingBuffers:
    """``Conv<float>`` (``core/providers/cpu/nn/conv.cc``) asks ``MlasConvPrepare`` (``core/mlas/lib/convolve.cpp``)."""
    image, weight = graph.tensors[node.inputs[0]].shape, graph.tensors[node.inputs[1]].shape
    output = graph.tensors[node.outputs[0]]
    if output.dtype != "float32" or not output.elements:
        return NONE
    kernel = weight[2:]
    depth = int(weight[1]) * math.prod(map(int, kernel))
    pixels = math.prod(map(int, output.shape[2:]))
    group = int(node.attributes.get("group", 1))
    filters = int(weight[0]) // group
    strides = node.attributes.get("strides", (1,) * len(kernel))
    dilations = node.attributes.get("dilations", (1,) * len(kernel))
    if all(s == 1 for s in strides) and _unpadded(image[2:], kernel, dilations, output.shape[2:]):
        if depth == weight[1]:
            return NONE  # pointwise: GEMM on the input as it is
        is_plane = len(kernel) == 2 and all(d == 1 for d in dilations) and weight[1] == 1
        if is_plane and (kernel[1] == image[3] or (kernel[0] == image[2] and kernel[1] == 1)):
            return NONE  # the kernel spans the image
    if filters > pixels:
        return WorkingBuffers(after=(pixels * depth * FLOAT_BYTES,))
    return WorkingBuffers(after=(CONV_BUFFER_FLOATS * FLOAT_BYTES * threads,))


def _unpadded(image: Any, kernel: Any, dilations: Any, output: Any) -> bool:
    """Whether a convolution of stride 1 has no padding: its output is as small as the kernel makes it."""
    return all(o == i - (k - 1) * d for i, k, d, o in zip(image, kernel, dilations, output, strict=True))


def _conv_transpose(node: Node, graph: Graph, threads: int) -> WorkingBuffers:
    """The column buffer of ``ConvTranspose<float>`` (``core/providers/cpu/nn/conv_transpose.cc``)."""
    image, weight = graph.tensors[node.inputs[0]].shape, graph.tensors[node.inputs[1]].shape
    depth = int(weight[1]) * math.prod(map(int, weight[2:]))
    return WorkingBuffers(after=(depth * math.prod(map(int, image[2:])) * FLOAT_BYTES,))


def _where(node: Node, graph: Graph, threads: int) -> WorkingBuffers:
    """``Where`` (``core/providers/cpu/tensor/where_op.cc``): what is selected of either side, each as a tensor."""
    condition, first, second = (graph.tensors[name] for name in node.inputs)
    size = element_size(graph.tensors[node.outputs[0]].dtype)
    return WorkingBuffers(around=tuple(_broadcast(condition, side) * size for side in (first, second)))


def _broadcast(first: TensorSpec, second: TensorSpec) -> int:
    """Elements of two tensors broadcast together."""
    pairs = zip_longest(reversed(first.shape), reversed(second.shape), fillvalue=1)
    return math.prod(int(b) if a == 1 else int(a) for a, b in pairs)


_WORKING: dict[tuple[str, str], Callable[[Node, Graph, int], WorkingBuffers]] = {
    ("", "Conv"): _conv,
    (MICROSOFT, "FusedConv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "Where"): _where,
}


def _packed_matrix(node: Node, shape: Any, dtype: str) -> tuple[int, str]:
    """``GemmPackBFp32`` (``core/providers/cpu/math/gemm_matmul_common.h``): 2-D float weights, columns padded."""
    if len(shape) != 2 or dtype != "float32" or 0 in shape:
        return 0, ""
    transposed = bool(node.attributes.get("transB", 0))
    rows, columns = (shape[1], shape[0]) if transposed else shape
    return -(-columns // PACKED_COLUMNS) * PACKED_COLUMNS * rows * FLOAT_BYTES, f"packed {transposed}"


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
}
