"""Working buffers of the CUDA provider's kernels: what they take from the arena while they run, and when; and what
kernels take when they are made.

Each rule names its source below ``onnxruntime/core/providers/cuda`` or ``contrib_ops/cuda`` and was compared with
recorded sessions of 1.31.1 (``tests/golden/onnxruntime/cuda``). Attention is in :mod:`.cuda_attention`.
A rule gives None for a node whose kernel takes an amount that is not known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from graphmem.base.numbers import div_up, round_up
from graphmem.errors import SourceError
from graphmem.graph.model import ELEMENT_BITS
from graphmem.runtimes.onnxruntime.kernels.context import (
    FLOAT_BYTES,
    INT64_BYTES,
    INT_BYTES,
    ONLY_OUTPUTS,
    OUTPUTS,
    Context,
    Steps,
    softmax_copies,
)
from graphmem.runtimes.onnxruntime.kernels.cuda_attention import RULES, SEQUENCES_BYTES, ZEROS_BYTES
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries, network_of

CONVOLUTIONS = ("Conv", "ConvTranspose", "com.microsoft.FusedConv")
_RECURRENT = ("LSTM", "GRU", "RNN")


def _itemsize(kernel: Context, position: int = 0) -> int:
    return ELEMENT_BITS[kernel.input(position).dtype] // 8


@RULES.of(*CONVOLUTIONS)
def _convolution(kernel: Context, libraries: Libraries) -> Steps:
    """``nn/conv.cc``: the plan's workspace, when the output is there."""
    size = libraries.convolution_workspace(kernel)
    return (OUTPUTS, size) if size else ONLY_OUTPUTS


@RULES.of(*_RECURRENT)
def _recurrent(kernel: Context, libraries: Libraries) -> Steps:
    """``rnn/cudnn_rnn_base.cc``: the sequences' lengths, the sequences turned around where they run backward, an
    output that nobody wants, weights that are no constants, cuDNN's work space, and the output in ONNX's order."""
    network = network_of(kernel, libraries)
    is_reverse = kernel.text("direction", "forward") == "reverse"
    output = network.rows * network.hidden * network.directions * network.itemsize
    taken = [network.rows * network.inputs * network.itemsize] if is_reverse else []
    if not kernel.has_output(0):
        taken.append(output)
    if not _has_constant_weights(kernel):
        taken.append(_weights_bytes(kernel))
    taken.append(libraries.recurrent_workspace(network))
    if is_reverse or network.directions == 2:
        taken.append(output)
    return (network.batch * INT_BYTES, OUTPUTS, *taken)


def _has_constant_weights(kernel: Context) -> bool:
    constants = frozenset(kernel.graph.initializers)
    return all(name in constants for name in kernel.node.inputs[1:4] if name)


def _weights_bytes(kernel: Context) -> int:
    """``ReorganizeWeights``: the weights as cuDNN lays them out, always with both biases."""
    recurrence = kernel.shape(2)
    values = math.prod(kernel.shape(1)) + math.prod(recurrence) + 2 * recurrence[0] * recurrence[1]
    return values * _itemsize(kernel, 1)


# --- reductions -------------------------------------------------------------------------------------------------------

#: ``reduction/reduction_functions.cu``: threads of a warp, warps of a block, values of a thread, blocks of a row.
_WARP, _MOST_WARPS, _VALUES, _MOST_BLOCKS = 32, 8, 4, 256
_PADDING = 15  # alignof(max_align_t) - 1
#: Sums and means whose axes are the last or the first ones are reductions of a matrix.
_OF_MATRICES = ("ReduceSum", "ReduceMean", "ReduceLogSum", "ReduceSumSquare")
_INTEGERS = ("int8", "uint8", "int32", "int64")


@RULES.of(
    *_OF_MATRICES, "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ArgMax", "ArgMin"
)
def _reduction(kernel: Context, libraries: Libraries) -> Steps:
    """``reduction/reduction_ops.cc``: a matrix is reduced by columns through partial sums and a flag for every row, by
    rows in place; everything else by cuDNN, which asks for room of the input's size (400 shapes asked of 9.20).
    ``ReduceLogSumExp`` keeps what it subtracted the maximum from, and the logarithm; the index of the largest value of
    a long row comes from pairs of every block."""
    source, result, shape = kernel.input(), kernel.output(), kernel.shape()
    axes = reduced_axes(kernel)
    if not source.elements or not axes or source.elements == result.elements:
        return ONLY_OUTPUTS
    item, operator = _itemsize(kernel), kernel.node.op_type
    if source.dtype in _INTEGERS:  # computed in fp32
        return (OUTPUTS, source.elements * FLOAT_BYTES, result.elements * FLOAT_BYTES, source.elements * FLOAT_BYTES)
    if operator == "ReduceLogSumExp":
        return (OUTPUTS, source.elements * item, source.elements * item, result.elements * item)
    if operator.startswith("Arg"):
        if axes != (len(shape) - 1,):
            return (OUTPUTS, result.elements * INT_BYTES, 2 * source.nbytes, result.elements * item)
        rows, blocks = source.elements // shape[-1], _blocks(shape[-1])
        return (OUTPUTS, _partial_sums(rows, blocks, FLOAT_BYTES + INT_BYTES)) if blocks > 1 else ONLY_OUTPUTS
    squares = (source.nbytes,) if operator == "ReduceSumSquare" else ()
    matrix = _matrix(shape, axes) if operator in _OF_MATRICES else None
    if matrix is None:
        return (OUTPUTS, *squares, source.nbytes)
    rows, columns = matrix
    return (OUTPUTS, *squares, *((_partial_sums(rows, _blocks(columns), FLOAT_BYTES),) if rows else ()))


def reduced_axes(kernel: Context) -> tuple[int, ...] | None:
    """The axes that a node reduces, all where it names none; None where they are not known."""
    shape, given = kernel.shape(), kernel.node.attributes.get("axes")
    if given is None and kernel.node.op_type.startswith("Arg"):
        given = [kernel.number("axis")]
    if given is None and kernel.name(1):
        result = kernel.output_shape()
        if len(result) != len(shape):
            return _squeezed(shape, result)
        return tuple(axis for axis, size in enumerate(shape) if result[axis] != size)
    if given is None or (len(given) == 0 and not kernel.number("noop_with_empty_axes")):
        return tuple(range(len(shape)))
    return tuple(sorted({int(axis) % len(shape) for axis in given})) if shape else ()


def _squeezed(shape: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...] | None:
    """Axes in a row that are gone: the last ones where those may be meant, else the first, else any."""
    gone, rank = len(shape) - len(result), len(shape)
    starts = (
        start for start in (len(result), *range(rank - gone + 1)) if shape[:start] + shape[start + gone :] == result
    )
    start = next(starts, None)
    return None if start is None else tuple(range(start, start + gone))


def _matrix(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int] | None:
    """``get_applicable_matrix_reduction``: (rows, columns) where the last axes are reduced, no rows where the
    first ones are, None for anything else; dimensions of 1 do not count."""
    kept = [(size, axis in axes) for axis, size in enumerate(shape) if size > 1]
    flags = [flag for _, flag in kept]
    if flags == sorted(flags) and not all(flags):
        rows, columns = (math.prod(size for size, flag in kept if flag == is_reduced) for is_reduced in (False, True))
        return rows, columns
    return (0, 0) if flags == sorted(flags, reverse=True) else None


def _partial_sums(rows: int, blocks: int, item: int) -> int:
    """``compute_reduce_matrix_columns_intermediate_buffer_size``: something of every block, and a flag of every row."""
    return rows * blocks * item + rows * INT_BYTES + _PADDING


def _blocks(columns: int) -> int:
    """Blocks that reduce a row (``compute_grid_and_block_dims``)."""
    warps = min(_MOST_WARPS, max(1, columns // (_VALUES * _WARP)))
    return min(_MOST_BLOCKS, max(1, columns // (_VALUES * _WARP * warps)))


# --- others -----------------------------------------------------------------------------------------------------------


@RULES.of("Softmax", "LogSoftmax")
def _softmax(kernel: Context, libraries: Libraries) -> Steps:
    return softmax_copies(kernel)


#: Bytes of an index of the result that is looked up, by mode (``NearestMappingInfo``, ..., ``tensor/resize_impl.cu``).
_MAPPED_BYTES = {"nearest": 8, "linear": 12, "cubic": 24}
#: Values on either side that a filter reads where it does not scale down (``tensor/resize_antialias_impl.cu``).
_SUPPORT = {"linear": 1, "cubic": 2}
#: Results that are looked up where they are clipped, which a kernel against aliasing keeps.
_CLIPPED_BYTES = 1280


@RULES.of("Resize")
def _resize(kernel: Context, libraries: Libraries) -> Steps:
    """``tensor/upsample.cc``: where every index of the result comes from; to the nearest value in all dimensions, with
    where each of them begins, else in the last two, or three where the rank is odd. Against aliasing every index has
    bounds, a flag, and the weights of a window."""
    before, after = kernel.shape(), kernel.output_shape()
    if 0 in after or before == after:
        return ONLY_OUTPUTS
    mode = kernel.text("mode", "nearest")
    if mode not in _MAPPED_BYTES:
        raise SourceError(f"{kernel.node}: ONNX Runtime knows no mode {mode!r}, but {', '.join(_MAPPED_BYTES)}")
    if mode == "nearest":
        return (OUTPUTS, len(after) * INT64_BYTES + sum(after) * _MAPPED_BYTES[mode])
    axes = 3 if mode == "linear" and len(after) % 2 else 2
    indices = sum(after[-axes:])
    if not kernel.number("antialias"):
        return (OUTPUTS, indices * _MAPPED_BYTES[mode])
    windows = [2 * div_up(_SUPPORT[mode] * max(i, o), o) + 1 for i, o in zip(before, after, strict=True)]
    weights = sum(window * size for window, size in zip(windows[-axes:], after[-axes:], strict=True)) * FLOAT_BYTES
    return (OUTPUTS, 2 * indices * INT64_BYTES, indices * INT64_BYTES, weights)


@RULES.of("InstanceNormalization")
def _instance_norm(kernel: Context, libraries: Libraries) -> Steps:
    """``nn/instance_norm.cc``: scale, bias, mean and variance repeated for every image of several."""
    images, channels = kernel.shape()[:2]
    return (OUTPUTS, *(images * channels * FLOAT_BYTES,) * 4) if images > 1 else ONLY_OUTPUTS


@RULES.of("com.microsoft.GroupNorm")
def _group_norm(kernel: Context, libraries: Libraries) -> Steps:
    """``diffusion/group_norm.cc``: two sums in fp32 of every group and image."""
    return (OUTPUTS, 2 * FLOAT_BYTES * kernel.shape()[0] * kernel.number("groups"))


@RULES.of("GatherND")
def _gather_nd(kernel: Context, libraries: Libraries) -> Steps:
    """``tensor/gather_nd.cc``: where every slice begins (1.31.1 takes one buffer a node)."""
    return (math.prod(kernel.shape(1)[:-1]) * INT64_BYTES, OUTPUTS)


#: Rows up to which a quantized matrix is multiplied as it is, if its shape is a multiple of the kernel's
#: (``quantization/matmul_nbits.cc``, ``matmul_4bits.cu``).
_FEW_ROWS, _MULTIPLE = 16, 8


@RULES.of("com.microsoft.MatMulNBits")
def _quantized_product(kernel: Context, libraries: Libraries) -> Steps:
    """``quantization/matmul_nbits.cc``: the matrix in full for many rows, whole blocks of it."""
    depth, columns, block = map(kernel.number, ("K", "N", "block_size"))
    is_even = not depth % _MULTIPLE and not columns % _MULTIPLE
    if is_even and math.prod(kernel.shape()[:-1]) <= _FEW_ROWS:
        return ONLY_OUTPUTS
    return (OUTPUTS, columns * round_up(depth, block) * _itemsize(kernel))


#: Rows and columns of 8-bit matrices are padded to this (``integer_gemm.cc``).
_INT8_MULTIPLE = 32


@RULES.of("MatMulInteger")
def _integer_product(kernel: Context, libraries: Libraries) -> Steps | None:
    """``math/matmul_integer.cc``: matrices in padded copies; sums of rows and columns depend on the zero points."""
    left, right = kernel.shape(0), kernel.shape(1)
    if any(kernel.node.inputs[2:]) or len(right) != 2 or len(left) < 2:
        return None
    uneven = (shape for shape in (left, right) if shape[-1] % _INT8_MULTIPLE)
    return (OUTPUTS, *(math.prod(shape[:-1]) * round_up(shape[-1], _INT8_MULTIPLE) for shape in uneven))


#: Longest axis that is sorted in place; longer ones are divided in parts, by how long that is thought to take.
_MOST_SORTED = 4096


@RULES.of("TopK")
def _topk(kernel: Context, libraries: Libraries) -> Steps | None:
    """``math/topk_impl.cuh``."""
    shape = kernel.shape()
    return ONLY_OUTPUTS if shape and shape[kernel.number("axis", -1) % len(shape)] <= _MOST_SORTED else None


#: Values of a block that is counted; blocks up to which the sums of the counts were recorded, and their room.
_COUNTED, _MOST_COUNTS, _SUMS_BYTES = 256, 7500, 1023


@RULES.of("NonZero")
def _nonzero(kernel: Context, libraries: Libraries) -> Steps | None:
    """``tensor/nonzero_op.cc``: how many there are in every block, before the output's shape is known."""
    blocks = div_up(kernel.input().elements, _COUNTED)
    return (blocks * INT_BYTES, _SUMS_BYTES, OUTPUTS) if blocks <= _MOST_COUNTS else None


def made_with(kernel: Context, libraries: Libraries) -> Iterator[tuple[str, int, bool]]:
    """(label, bytes, whether it is reserved outside the arena's regions) of the buffers that a kernel takes when it is
    made and keeps: ``CudnnRnnBase`` has the generators of a dropout that never happens, and its constant weights
    packed; grouped queries a list of zeros, filters a table, attention the ends of sequences."""
    operator = kernel.node.operator
    if operator == "com.microsoft.GroupQueryAttention":
        yield "zeros", ZEROS_BYTES, False
    elif operator == "com.microsoft.MultiHeadAttention":
        for side in ("queries", "keys"):
            yield f"ends of sequences of {side}", SEQUENCES_BYTES, True
    elif kernel.node.op_type == "Resize" and kernel.number("antialias"):
        yield "table of clipped values", _CLIPPED_BYTES, False
    elif operator in _RECURRENT:
        yield "dropout states", libraries.dropout_states(), False
        if _has_constant_weights(kernel):
            yield f"{kernel.name(1)} (packed)", _weights_bytes(kernel), False
