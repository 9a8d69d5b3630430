"""Working buffers of the CUDA provider's kernels: what they take from the arena while they run, and when; and what
kernels take when they are made.

Each rule names its source below ``onnxruntime/core/providers/cuda`` or ``contrib_ops/cuda`` and was compared with
recorded sessions of 1.31.1 (``tests/golden/onnxruntime/cuda``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from graphmem.graph.model import ELEMENT_BITS, Graph, Node
from graphmem.runtimes.onnxruntime.kernels import cuda_attention
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries, network_of
from graphmem.runtimes.onnxruntime.kernels.tables import MICROSOFT
from graphmem.runtimes.onnxruntime.kernels.working_buffers import ONLY_OUTPUTS, OUTPUTS, SOFTMAX_ONE_AXIS, Steps

#: None: what this node's kernel takes is not known.
Rule = Callable[[Node, Graph, Libraries], Steps | None]


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in graph.tensors[name].shape)


def _itemsize(graph: Graph, name: str) -> int:
    return ELEMENT_BITS[graph.tensors[name].dtype] // 8


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _convolution(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``nn/conv.cc``: the plan's workspace, when the output is there."""
    size = libraries.convolution_workspace(node, graph)
    return (OUTPUTS, size) if size else ONLY_OUTPUTS


def _recurrent(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``rnn/cudnn_rnn_base.cc``: the sequences' lengths, the sequences turned around where they run backward, an
    output that nobody wants, weights that are no constants, cuDNN's work space, and the output in ONNX's order."""
    network = network_of(node, graph, libraries)
    item = network.itemsize
    reverse = _is_reverse(node)
    lengths = network.batch * _INT_BYTES
    taken = [network.rows * network.inputs * item] if reverse else []
    size = network.rows * network.hidden * network.directions * item
    has_output = bool(node.outputs and node.outputs[0])
    if not has_output:
        taken.append(size)
    if not _has_constant_weights(node, graph):
        taken.append(_weights_bytes(node, graph))
    taken.append(libraries.recurrent_workspace(network))
    if reverse or network.directions == 2:
        taken.append(size)
    return (lengths, OUTPUTS, *taken)


def _is_reverse(node: Node) -> bool:
    return _text(node.attributes.get("direction", "forward")) == "reverse"


def _has_constant_weights(node: Node, graph: Graph) -> bool:
    constants = frozenset(graph.initializers)
    return all(name in constants for name in node.inputs[1:4] if name)


def _weights_bytes(node: Node, graph: Graph) -> int:
    """``ReorganizeWeights``: the weights as cuDNN lays them out, always with both biases."""
    weight, recurrence = (_shape(graph, name) for name in node.inputs[1:3])
    biases = 2 * recurrence[0] * recurrence[1]
    return (math.prod(weight) + math.prod(recurrence) + biases) * _itemsize(graph, node.inputs[1])


# --- reductions -------------------------------------------------------------------------------------------------------

_INT_BYTES, _INT64_BYTES = 4, 8
_FLOAT_BYTES = 4
#: ``reduction/reduction_functions.cu``: threads of a warp, warps of a block, values of a thread, blocks of a row.
_WARP, _MOST_WARPS, _VALUES, _MOST_BLOCKS = 32, 8, 4, 256
_PADDING = 15  # alignof(max_align_t) - 1
#: Sums and means whose axes are the last or the first ones are reductions of a matrix.
_OF_MATRICES = frozenset(("ReduceSum", "ReduceMean", "ReduceLogSum", "ReduceSumSquare"))
_SQUARED = "ReduceSumSquare"
_INTEGERS = frozenset(("int8", "uint8", "int32", "int64"))


def _reduction(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``reduction/reduction_ops.cc``: a matrix is reduced by columns through partial sums and a flag for every row, by
    rows in place; everything else by cuDNN, which asks for room of the input's size (400 shapes asked of 9.20).
    ``ReduceLogSumExp`` keeps what it subtracted the maximum from, and the logarithm; the index of the largest value of
    a long row comes from pairs of every block."""
    source, result = graph.tensors[node.inputs[0]], graph.tensors[node.outputs[0]]
    shape = _shape(graph, node.inputs[0])
    axes = reduced_axes(node, graph, len(shape))
    if not source.elements or axes is None or not axes or source.elements == result.elements:
        return ONLY_OUTPUTS
    item = _itemsize(graph, node.inputs[0])
    if source.dtype in _INTEGERS:  # computed in fp32
        return (OUTPUTS, source.elements * _FLOAT_BYTES, result.elements * _FLOAT_BYTES, source.elements * _FLOAT_BYTES)
    squares = (source.nbytes,) if node.op_type == _SQUARED else ()
    if node.op_type in _OF_MATRICES:
        matrix = _matrix(shape, axes)
        if matrix is not None:
            partial = () if matrix == _BY_ROWS else (_partial_sums(*matrix),)
            return (OUTPUTS, *squares, *partial)
    if node.op_type == "ReduceLogSumExp":
        return (OUTPUTS, source.elements * item, source.elements * item, result.elements * item)
    if node.op_type in ("ArgMax", "ArgMin"):
        if axes == (len(shape) - 1,):
            rows, blocks = source.elements // shape[-1], _blocks(shape[-1])
            pairs = rows * blocks * (_FLOAT_BYTES + _INT_BYTES) + rows * _INT_BYTES + _PADDING
            return (OUTPUTS, pairs) if blocks > 1 else ONLY_OUTPUTS
        indices = result.elements * _INT_BYTES
        return (OUTPUTS, indices, 2 * source.nbytes, result.elements * item)
    return (OUTPUTS, *squares, source.nbytes)


def reduced_axes(node: Node, graph: Graph, rank: int) -> tuple[int, ...] | None:
    """The axes that a node reduces, all where it names none; None where they are not known."""
    given = node.attributes.get("axes")
    if given is None and node.op_type.startswith("Arg"):
        given = [int(node.attributes.get("axis", 0))]
    if given is None and len(node.inputs) > 1 and node.inputs[1]:
        shape = _shape(graph, node.inputs[0])
        result = _shape(graph, node.outputs[0])
        if len(result) != len(shape):
            return _squeezed(shape, result)
        return tuple(axis for axis in range(rank) if result[axis] != shape[axis])
    if given is None or (len(given) == 0 and not node.attributes.get("noop_with_empty_axes", 0)):
        return tuple(range(rank))
    return tuple(sorted({int(axis) % rank for axis in given})) if rank else ()


def _squeezed(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...] | None:
    """Axes that are gone, where the last or the first ones may be meant."""
    gone = len(shape) - len(result)
    if shape[: len(result)] == result:
        return tuple(range(len(result), len(shape)))
    if shape[gone:] == result:
        return tuple(range(gone))
    for start in range(len(shape) - gone + 1):
        if shape[:start] + shape[start + gone :] == result:
            return tuple(range(start, start + gone))
    return None


_BY_ROWS = (0, 0)


def _matrix(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int] | None:
    """``get_applicable_matrix_reduction``: (rows, columns) where the last axes are reduced, :data:`_BY_ROWS` where the
    first ones are, None for anything else; dimensions of 1 do not count."""
    kept = [(size, axis in axes) for axis, size in enumerate(shape) if size > 1]
    flags = [flag for _, flag in kept]
    rows = math.prod(size for size, flag in kept if not flag)
    columns = math.prod(size for size, flag in kept if flag)
    if flags == sorted(flags) and not all(flags):
        return rows, columns
    return _BY_ROWS if flags == sorted(flags, reverse=True) else None


def _partial_sums(rows: int, columns: int) -> int:
    """``compute_reduce_matrix_columns_intermediate_buffer_size``: sums are of fp32."""
    return rows * _blocks(columns) * _FLOAT_BYTES + rows * _INT_BYTES + _PADDING


def _blocks(columns: int) -> int:
    """Blocks that reduce a row (``compute_grid_and_block_dims``)."""
    warps = min(_MOST_WARPS, max(1, columns // (_VALUES * _WARP)))
    return min(_MOST_BLOCKS, max(1, columns // (_VALUES * _WARP * warps)))


# --- others -----------------------------------------------------------------------------------------------------------


def _softmax(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``math/softmax.cc``: an axis that is not the last is brought there in a copy, and the result back."""
    shape = _shape(graph, node.inputs[0])
    axis = int(node.attributes.get("axis", -1))
    if dict(graph.opsets).get("", 1) < SOFTMAX_ONE_AXIS or not shape or axis % len(shape) == len(shape) - 1:
        return ONLY_OUTPUTS
    size = graph.tensors[node.inputs[0]].nbytes
    return (OUTPUTS, size, size)


#: Bytes of an index of the result that is looked up, by mode (``NearestMappingInfo``, ..., ``tensor/resize_impl.cu``).
_MAPPED_BYTES = {"nearest": 8, "linear": 12, "cubic": 24}
#: Values on either side that a filter reads where it does not scale down (``tensor/resize_antialias_impl.cu``).
_SUPPORT = {"linear": 1, "cubic": 2}
#: Results that are looked up where they are clipped, which a kernel against aliasing keeps.
_CLIPPED_BYTES = 1280


def _resize(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``tensor/upsample.cc``: where every index of the result comes from; to the nearest value in all dimensions, with
    where each of them begins, else in the last two, or three where the rank is odd. Against aliasing every index has
    bounds, a flag, and the weights of a window."""
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if 0 in after or before == after:
        return ONLY_OUTPUTS
    mode = _text(node.attributes.get("mode", "nearest"))
    if mode == "nearest":
        return (OUTPUTS, len(after) * _INT64_BYTES + sum(after) * _MAPPED_BYTES[mode])
    axes = 3 if mode == "linear" and len(after) % 2 else 2
    if not node.attributes.get("antialias", 0):
        return (OUTPUTS, sum(after[-axes:]) * _MAPPED_BYTES[mode])
    windows = [2 * -(-_SUPPORT[mode] * max(i, o) // o) + 1 for i, o in zip(before, after, strict=True)]
    weights = sum(window * size for window, size in zip(windows[-axes:], after[-axes:], strict=True)) * _FLOAT_BYTES
    return (OUTPUTS, 2 * sum(after[-axes:]) * _INT64_BYTES, sum(after[-axes:]) * _INT64_BYTES, weights)


def _instance_norm(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``nn/instance_norm.cc``: scale, bias, mean and variance repeated for every image of several."""
    images, channels = _shape(graph, node.inputs[0])[:2]
    size = images * channels * _FLOAT_BYTES
    return (OUTPUTS, size, size, size, size) if images > 1 else ONLY_OUTPUTS


def _group_norm(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``diffusion/group_norm.cc``: two sums in fp32 of every group and image."""
    return (OUTPUTS, 2 * _FLOAT_BYTES * _shape(graph, node.inputs[0])[0] * int(node.attributes["groups"]))


def _gather_nd(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``tensor/gather_nd.cc``: where every slice begins (1.31.1 takes one buffer a node)."""
    return (math.prod(_shape(graph, node.inputs[1])[:-1]) * _INT64_BYTES, OUTPUTS)


#: Rows up to which a quantized matrix is multiplied as it is, if its shape is a multiple of the kernel's
#: (``quantization/matmul_nbits.cc``, ``matmul_4bits.cu``).
_FEW_ROWS, _MULTIPLE = 16, 8


def _quantized_product(node: Node, graph: Graph, libraries: Libraries) -> Steps:
    """``quantization/matmul_nbits.cc``: the matrix in full for many rows, whole blocks of it."""
    shape = _shape(graph, node.inputs[0])
    depth, columns, block = (int(node.attributes[name]) for name in ("K", "N", "block_size"))
    is_even = not depth % _MULTIPLE and not columns % _MULTIPLE
    if is_even and math.prod(shape[:-1]) <= _FEW_ROWS:
        return ONLY_OUTPUTS
    return (OUTPUTS, columns * -(-depth // block) * block * _itemsize(graph, node.inputs[0]))


#: Rows and columns of 8-bit matrices are padded to this (``integer_gemm.cc``).
_INT8_MULTIPLE = 32


def _integer_product(node: Node, graph: Graph, libraries: Libraries) -> Steps | None:
    """``math/matmul_integer.cc``: matrices in padded copies; sums of rows and columns depend on the zero points."""
    left, right = (_shape(graph, name) for name in node.inputs[:2])
    if any(node.inputs[2:]) or len(right) != 2 or len(left) < 2:
        return None
    padded = [
        math.prod(shape[:-1]) * -(-shape[-1] // _INT8_MULTIPLE) * _INT8_MULTIPLE
        for shape in (left, right)
        if shape[-1] % _INT8_MULTIPLE
    ]
    return (OUTPUTS, *padded)


#: Longest axis that is sorted in place; longer ones are divided in parts, by how long that is thought to take.
_MOST_SORTED = 4096


def _topk(node: Node, graph: Graph, libraries: Libraries) -> Steps | None:
    """``math/topk_impl.cuh``."""
    shape = _shape(graph, node.inputs[0])
    axis = int(node.attributes.get("axis", -1))
    return ONLY_OUTPUTS if shape and shape[axis % len(shape)] <= _MOST_SORTED else None


#: Values of a block that is counted; blocks up to which the sums of the counts were recorded, and their room.
_COUNTED, _MOST_COUNTS, _SUMS_BYTES = 256, 7500, 1023


def _nonzero(node: Node, graph: Graph, libraries: Libraries) -> Steps | None:
    """``tensor/nonzero_op.cc``: how many there are in every block, before the output's shape is known."""
    blocks = -(-graph.tensors[node.inputs[0]].elements // _COUNTED)
    return (blocks * _INT_BYTES, _SUMS_BYTES, OUTPUTS) if blocks <= _MOST_COUNTS else None


_RECURRENT = frozenset((("", "LSTM"), ("", "GRU"), ("", "RNN")))


def made_with(node: Node, graph: Graph, libraries: Libraries) -> Iterator[tuple[str, int]]:
    """(label, bytes) of what a kernel takes when it is made and keeps: ``CudnnRnnBase`` has the generators of a
    dropout that never happens, and its constant weights packed; grouped queries a list of zeros, filters a
    table."""
    if (node.domain, node.op_type) == (MICROSOFT, "GroupQueryAttention"):
        yield "zeros", cuda_attention.ZEROS_BYTES
    if node.op_type == "Resize" and node.attributes.get("antialias", 0):
        yield "table of clipped values", _CLIPPED_BYTES
    if (node.domain, node.op_type) in _RECURRENT:
        yield "dropout states", libraries.dropout_states()
        if _has_constant_weights(node, graph):
            yield f"{node.inputs[1]} (packed)", _weights_bytes(node, graph)


def reserved_with(node: Node) -> Iterator[tuple[str, int]]:
    """(label, bytes) of what a kernel reserves outside the arena's regions when it is made."""
    if (node.domain, node.op_type) == (MICROSOFT, "MultiHeadAttention"):
        for side in ("queries", "keys"):
            yield f"ends of sequences of {side}", cuda_attention.SEQUENCES_BYTES


_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare", "ArgMax", "ArgMin",
)  # fmt: skip
CONVOLUTIONS = frozenset((("", "Conv"), ("", "ConvTranspose"), (MICROSOFT, "FusedConv")))
RULES: dict[tuple[str, str], Rule] = {
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys((("", name) for name in _REDUCTIONS), _reduction),
    ("", "Attention"): cuda_attention.of_onnx,
    (MICROSOFT, "Attention"): cuda_attention.attention,
    (MICROSOFT, "MultiHeadAttention"): cuda_attention.multi_head,
    (MICROSOFT, "GroupQueryAttention"): cuda_attention.group_query,
    (MICROSOFT, "MatMulNBits"): _quantized_product,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "Resize"): _resize,
    ("", "TopK"): _topk,
    ("", "NonZero"): _nonzero,
    ("", "MatMulInteger"): _integer_product,
    ("", "GatherND"): _gather_nd,
    (MICROSOFT, "GroupNorm"): _group_norm,
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _softmax,
}
#: Operators whose kernels are known to take working buffers, and whose rules are not written yet.
WITHOUT_RULE: frozenset[tuple[str, str]] = frozenset((
    ("", "Einsum"), ("", "NonMaxSuppression"),
    (MICROSOFT, "PackedAttention"), (MICROSOFT, "PackedMultiHeadAttention"), (MICROSOFT, "QAttention"),
    (MICROSOFT, "LongformerAttention"), (MICROSOFT, "DecoderMaskedMultiHeadAttention"),
    (MICROSOFT, "DecoderMaskedSelfAttention"), (MICROSOFT, "PagedAttention"), (MICROSOFT, "MoE"), (MICROSOFT, "QMoE"),
    (MICROSOFT, "SparseAttention"),
))  # fmt: skip
