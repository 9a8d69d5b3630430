"""Weights that kernels of the CPU provider rearrange when a session loads (``PrePack``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from graphmem.base.numbers import round_up
from graphmem.base.records import dataclass
from graphmem.graph.model import TensorSpec
from graphmem.runtimes.onnxruntime.kernels.context import FLOAT_BYTES, Context, Rules, integers
from graphmem.runtimes.onnxruntime.kernels.working_buffers import attention_columns, symmetric_filter_bytes

#: Columns of a packed matrix are padded to this (MLAS_SGEMM_STRIDEN_THREAD_ALIGN, ``MlasGemmPackBSize``).
PACKED_COLUMNS = 16
#: Layouts of buffers that are packed for one kernel alone; of the second, those needed only while another is filled.
NEVER_SHARED, PASSING = "widened", "passing"
_BYTES = ("int8", "uint8")

#: A weight's name, the bytes of its buffers, their layout.
Packed = tuple[str, tuple[int, ...], str]
PACKING: Rules[Callable[[Context], Iterator[Packed]]] = Rules()


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
        """Its name in reports."""
        return f"{self.weight} (packed)" if self.reserved or self.frees_weight else self.weight


def packed_by(kernel: Context) -> Iterator[Packed]:
    """The weights that a kernel packs, in the order of its inputs."""
    rule = PACKING.get(kernel.node.operator)
    return iter(()) if rule is None else rule(kernel)


@PACKING.of("LayerNormalization", "com.microsoft.SkipLayerNormalization")
def _widened(kernel: Context) -> Iterator[Packed]:
    """Float16 scales and biases, kept in fp32 (``layer_norm_impl.cc``, ``skip_layer_norm.cc``)."""
    for position in (2, 3, 4) if kernel.node.domain else (1, 2):
        if kernel.name(position) and kernel.input(position).dtype == "float16":
            yield kernel.name(position), (kernel.input(position).elements * FLOAT_BYTES,), NEVER_SHARED


@PACKING.of("MatMul", "Gemm", "com.microsoft.FusedMatMul", "com.microsoft.FusedGemm")
def _matrix(kernel: Context) -> Iterator[Packed]:
    """``GemmPackBFp32`` (``core/providers/cpu/math/gemm_matmul_common.h``): 2-D float weights, columns padded."""
    weight = kernel.input(1)
    if len(weight.shape) == 2 and weight.dtype == "float32" and weight.elements:
        transposed = bool(kernel.number("transB"))
        rows, columns = kernel.shape(1)[::-1] if transposed else kernel.shape(1)
        yield kernel.name(1), (_padded(columns) * rows * FLOAT_BYTES,), f"packed {transposed}"


@PACKING.of(
    "MatMulInteger", "QLinearMatMul", "com.microsoft.DynamicQuantizeMatMul", "com.microsoft.MatMulIntegerToFloat",
    "com.microsoft.QGemm",
)  # fmt: skip
def _bytes_matrix(kernel: Context) -> Iterator[Packed]:
    """8-bit matrices; x86-64 has no kernel for signed left sides that packs. QGemm turns a transposed one first."""
    name = kernel.name(3 if kernel.node.op_type in ("QLinearMatMul", "QGemm") else 1)
    if not name or kernel.input().dtype == "int8":
        return
    weight, transposed = kernel.graph.tensors[name], kernel.number("transB")
    if len(weight.shape) == 2 and weight.dtype in _BYTES and weight.elements:
        rows, columns = integers(weight)[::-1] if transposed else integers(weight)
        yield name, (_packed_bytes(rows, columns),), "packed"
        if kernel.node.op_type == "QGemm" and transposed:
            yield name, (weight.elements,), PASSING


@PACKING.of("QLinearConv", "com.microsoft.QLinearConv")
def _quantized_filter(kernel: Context) -> Iterator[Packed]:
    """``QLinearConv::PrePack``: the filter for a kernel without sums, or as a matrix of each group, laid out anew in a
    buffer that passes; as it was, but in another order, where neither is possible."""
    name, group = kernel.name(3), kernel.number("group", 1)
    filters, channels, *window = kernel.shape(3)
    symmetric = symmetric_filter_bytes(kernel)
    is_depthwise = channels == 1 and filters == group
    depth, columns = channels * math.prod(window), filters // group
    if symmetric:
        yield name, (symmetric,), "symmetric"
    elif is_depthwise or kernel.input().dtype == "int8":
        yield name, (filters * depth,), "reordered"
    else:
        yield name, (group * _packed_bytes(depth, columns),), "packed"
        yield name, (columns * depth,), PASSING


@PACKING.of("ConvTranspose")
def _transposed_filter(kernel: Context) -> Iterator[Packed]:
    """``ConvTranspose<float>::PrePack``: the filter transposed, where that moves anything."""
    shape = kernel.shape(1)
    rows, columns = shape[0] // kernel.number("group", 1), math.prod(shape[1:])
    if kernel.input(1).dtype == "float32" and len(shape) > 2 and rows != 1 and columns != 1 and 0 not in shape:
        yield kernel.name(1), (math.prod(shape) * FLOAT_BYTES,), "transposed"


@PACKING.of("com.microsoft.Attention")
def _attention(kernel: Context) -> Iterator[Packed]:
    """``bert/attention.cc``: queries, keys and values by heads."""
    if kernel.input(1).dtype == "float32":
        heads, rows = kernel.number("num_heads"), kernel.shape(1)[0]
        sizes = (_padded(columns // heads) * heads * rows * FLOAT_BYTES for columns in attention_columns(kernel))
        yield kernel.name(1), tuple(sizes), "heads"


@PACKING.of("LSTM", "GRU", "com.microsoft.DynamicQuantizeLSTM")
def _recurrence(kernel: Context) -> Iterator[Packed]:
    """``TryPackWeights`` (``rnn/*.cc``, ``contrib_ops/cpu/quantization/dynamic_quantize_lstm.cc``): the gates of both
    weights; a GRU's last gate is multiplied by itself."""
    for position, gates in enumerate(((3,), (2, 1)) if kernel.node.op_type == "GRU" else ((4,), (4,)), 1):
        sizes = _gates_bytes(kernel.input(position), gates)
        if sizes:
            yield kernel.name(position), sizes, f"recurrence {gates}"


def _gates_bytes(spec: TensorSpec, gates: tuple[int, ...]) -> tuple[int, ...]:
    """Of [directions, gates, inputs] in float32, or [directions, inputs, gates] in 8 bits."""
    directions, first, second = integers(spec)
    if spec.dtype == "float32":
        state = first // sum(gates)
        return tuple(directions * _padded(count * state) * second * FLOAT_BYTES for count in gates)
    return (directions * _packed_bytes(first, second),) if spec.dtype in _BYTES else ()


def _packed_bytes(rows: int, columns: int) -> int:
    """``MlasGemmPackBSize`` for 8-bit matrices (``core/mlas/lib/qgemm.cpp``): sums of columns, then the matrix with
    columns padded to 16 and rows to 4 (x86-64 kernels), the whole to 64 bytes."""
    return round_up(_padded(columns) * (FLOAT_BYTES + round_up(rows, 4)), 64)


def _padded(columns: int) -> int:
    return round_up(columns, PACKED_COLUMNS)
