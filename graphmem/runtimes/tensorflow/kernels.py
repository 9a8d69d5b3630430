"""The use of memory by TensorFlow's GPU kernels: which inputs an output is written over or shares its buffer with, and
what they take for themselves while they run. From the kernels' sources in tensorflow/core/kernels (2.21), by file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.recurrent import GRU, LSTM, STANDARD, Network
from graphmem.runtimes.tensorflow.step import Node, Tensor

#: Buffers that are shared in part begin at so many bytes (``EIGEN_MAX_ALIGN_BYTES``).
_ALIGNED = 64
#: Outputs are inputs under another shape or name: their buffers are shared (reshape_op.h, identity_op.h, ...).
SHARES = frozenset((
    "Reshape", "ExpandDims", "Squeeze", "Identity", "StopGradient", "PreventGradient", "IdentityN", "Bitcast",
    "CheckNumerics", "EnsureShape", "PlaceholderWithDefault", "_Retval",
))  # fmt: skip

_ONE = (
    "Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Sigmoid", "Tanh", "Exp", "Expm1", "Log", "Log1p", "Neg", "Abs",
    "Sqrt",
    "Rsqrt", "Square", "Erf", "Erfc", "Erfinv", "Inv", "Reciprocal", "Floor", "Ceil", "Round", "Rint", "Sign", "Sin",
    "Cos",
    "Softplus", "Softsign", "Softmax", "LogSoftmax", "BiasAdd", "ClipByValue", "ZerosLike", "OnesLike", "LogicalNot",
    "Snapshot",
    "ReluGrad", "Relu6Grad",
)  # fmt: skip
_TWO = (
    "Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Pow", "Maximum", "Minimum",
    "SquaredDifference",
    "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod", "LogicalAnd", "LogicalOr", "Xdivy", "Xlogy",
    "Atan2", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "SigmoidGrad", "TanhGrad", "RsqrtGrad", "SqrtGrad", "InvGrad",
    "ReciprocalGrad", "EluGrad", "SeluGrad", "LeakyReluGrad", "SoftplusGrad", "SoftsignGrad", "Select_",
)  # fmt: skip
#: Operator -> the inputs that its first output may be written over, in the order in which the kernel tries them
#: (``forward_input_or_allocate_output``: cwise_ops_common.h, relu_op.h, bias_op.cc, softmax_op_gpu.cu.cc ...), once
#: nobody else needs them and if type and shape are the same. ``AddN`` tries all (aggregate_ops.cc).
FORWARDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_ONE, (0,)),
    **dict.fromkeys(_TWO, (0, 1)),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "SparseSoftmaxCrossEntropyWithLogits": (0,),
    "SoftmaxCrossEntropyWithLogits": (0,),
}


#: The second output, the gradient, is written over the first input (sparse_xent_op.cc, xent_op.cc).
BACKPROPS_OVER_INPUT = frozenset(("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits"))


@dataclass(frozen=True)
class Need:
    """Memory of a kernel beside its outputs, all of it given back when it returns: ``before`` is requested before them,
    ``after`` when they are there, and then ``last``, the workspace of its algorithm first. Where it runs for the first
    time with these shapes, algorithms are tried out before that: ``guarded`` is held as long, each of ``trials`` in
    turn. ``result``: which of the buffers, in this order, becomes the output in its place at the end."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    guarded: tuple[int, ...] = ()
    trials: tuple[int, ...] = ()
    result: int | None = None


class Library(Protocol):
    """Work spaces of cuDNN on the card."""

    def convolution(self, asked: Convolution, *, fused: bool = False) -> tuple[int, ...]:
        """Workspaces of the plans that are tried out, in bytes; the first runs. ``fused``: with bias and activation."""

    def recurrent(self, network: Network, training: bool) -> tuple[int, int]:
        """Work and reserve space in bytes."""


Inputs = Sequence[Tensor]
Rule = Callable[[Node, Inputs, Library], Need]


def needs(node: Node, inputs: Inputs, library: Library) -> Need:
    """The scratch of a node's kernel; nothing where no rule is known."""
    rule = _RULES.get(node.op)
    return rule(node, inputs, library) if rule is not None else Need()


def data_dependent_output(node: Node, inputs: Inputs, position: int, library: Library) -> int:
    """Bytes of an output whose shape TensorFlow does not know beforehand; 0 where nobody knows."""
    if node.op == "CudnnRNNV3" and position == 3:
        return library.recurrent(_network(node, inputs), True)[1]
    return 0


def is_input_in_other_shape(node: Node, inputs: Inputs, order: Sequence[int] | None) -> bool:
    """Whether a transposition by ``order`` moves nothing but dimensions of size 1 (transpose_op.cc:
    ``NonSingletonDimensionsAlign``)."""
    if node.op != "Transpose" or order is None or inputs[0].shape is None:
        return False
    moved = [place for place in order if inputs[0].shape[place] != 1]
    return moved == sorted(moved)


def is_slice_of(node: Node, inputs: Inputs) -> bool:
    """Whether the output is a piece of the first input's own buffer: rows of its first dimension, which begin at
    64 bytes (slice_op.cc, strided_slice_op.cc: ``IsDim0SliceAligned``)."""
    if node.op != "Slice" or not inputs or inputs[0].shape is None or node.outputs[0].shape is None:
        return False
    whole, piece = inputs[0], node.outputs[0]
    assert whole.shape is not None
    assert piece.shape is not None
    if not whole.shape or whole.shape[1:] != piece.shape[1:] or not whole.elements:
        return False
    row = whole.bytes // whole.shape[0]
    return row % _ALIGNED == 0 or whole.shape[1:] == ()


# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(node: Node, inputs: Inputs, library: Library) -> Need:
    """Room for the largest value and the sum of each row, both of the shape of the whole (softmax_op_gpu.cu.cc); sums
    of half types are fp32."""
    return Need(after=(inputs[0].bytes, max(inputs[0].bytes, 4 * inputs[0].elements)))


def _cross_entropy(node: Node, inputs: Inputs, library: Library) -> Need:
    """A value a row (sparse_xent_op.cc, xent_op.cc)."""
    return Need(before=(node.outputs[0].bytes,))


# --- ConcatV2 ---------------------------------------------------------------------------------------------------------

#: So many addresses go to a kernel by themselves, more in a buffer (``GpuDeviceArrayOnHost``, gpu_device_array.h).
_INLINE_ADDRESSES = 8


def _concat(node: Node, inputs: Inputs, library: Library) -> Need:
    """The addresses of many tensors, and where each begins if they differ in size (concat_lib_gpu.cc)."""
    joined = [tensor for tensor in inputs[:-1] if tensor.bytes]
    if len(joined) <= _INLINE_ADDRESSES:
        return Need()
    begins = (4 * (len(joined) + 1),) if len({tensor.shape for tensor in joined}) > 1 else ()
    return Need(after=(8 * len(joined), *begins))


def _stack(node: Node, inputs: Inputs, library: Library) -> Need:
    """As of ``ConcatV2``, of the elements of a list (list_kernels.h)."""
    shape = node.outputs[0].shape
    return Need(after=(8 * shape[0],)) if shape and shape[0] > _INLINE_ADDRESSES else Need()


# --- Einsum -----------------------------------------------------------------------------------------------------------


def _einsum(node: Node, inputs: Inputs, library: Library) -> Need:
    """Operands are brought into the order batch, free, contracted (or batch, contracted, free, which the product takes
    as transposed), each by a copy where it is not in it; and so is the product, into the order of the output
    (einsum_op_impl.h: ``ReduceOperand``, ``ContractOperands``, ``TransposeOperand``)."""
    given, _, wanted = node.attributes["equation"].replace("...", "").partition("->")
    operands = given.split(",")
    if len(operands) != 2:
        return Need()
    kinds = {label: _kind(label, operands, wanted) for label in "".join(operands)}
    rank = {label: place for place, label in enumerate(dict.fromkeys("".join(operands)))}
    copies, product = [], ""
    for labels, tensor in zip(operands, inputs, strict=True):
        types = [kinds[label] for label in labels]
        swapped = [_SWAPPED.get(kind, kind) for kind in types]
        chosen = swapped if swapped == sorted(swapped) else types
        order = sorted(range(len(labels)), key=lambda place: (chosen[place], rank[labels[place]]))
        if order != list(range(len(labels))):
            copies.append(tensor.bytes)
    batch = sorted((label for label, kind in kinds.items() if kind == _BATCH), key=rank.__getitem__)
    product = "".join(batch)
    for labels in operands:
        product += "".join(sorted((one for one in labels if kinds[one] == _FREE), key=rank.__getitem__))
    if product != wanted:
        copies.append(node.outputs[0].bytes)
    return Need(before=tuple(copies))


_BATCH, _FREE, _CONTRACTED, _REDUCED = range(4)
_SWAPPED = {_FREE: _CONTRACTED, _CONTRACTED: _FREE}


def _kind(label: str, operands: list[str], wanted: str) -> int:
    shared = all(label in labels for labels in operands)
    if label in wanted:
        return _BATCH if shared else _FREE
    return _CONTRACTED if shared else _REDUCED


# --- cuDNN ------------------------------------------------------------------------------------------------------------

#: Guards around every buffer while algorithms are tried out (redzone_allocator.h).
_GUARDS = 2 * (8 << 20)
_GUARD_ALIGNMENT = 4


def _convolution(node: Node, inputs: Inputs, library: Library) -> Need:
    """The filter in cuDNN's order, the input padded where the padding is uneven, and the plan's workspace
    (conv_ops_gpu.cc, conv_grad_filter_ops.cc, conv_grad_input_ops.cc). The gradient of the input is computed, and
    cropped, into buffers of its own, the last of which takes the output's place. Where algorithms are tried out for
    the first time, into a guarded copy of the output (autotune_conv_impl.h). With bias and activation in the same
    kernel it is computed with channels second but in half precision, from and into copies (conv_ops_fused_impl.h)."""
    shapes = _conv_shapes(node, inputs)
    if shapes is None:
        return Need()
    image, kernel, result = shapes
    if _is_product(node, image, kernel):
        return Need()
    direction = _DIRECTIONS[node.op]
    item = node.outputs[0].bytes // max(1, node.outputs[0].elements)
    even, padded = _padding(node, image, kernel, result)
    channels_last = node.attributes.get("data_format", "NHWC") == "NHWC"
    is_fused = node.op == "_FusedConv2D"
    is_turned = is_fused and channels_last and node.outputs[0].dtype not in ("half", "float16")
    spatial = range(2, len(image))
    whole = tuple(size + padded[place - 2] if place in spatial else size for place, size in enumerate(image))
    asked = Convolution(
        direction, _DTYPES[node.outputs[0].dtype], whole, kernel, result, _spatial(node, "strides"), even,
        _spatial(node, "dilations"), channels_last and not is_turned,
    )  # fmt: skip
    plans = library.convolution(asked, fused=is_fused)
    turned, full = prod(kernel) * item, prod(whole) * item
    is_padded = whole != image
    after = (full,) * (is_padded + (is_turned and image[1] > 1)) + (turned,) + (prod(result) * item,) * is_turned
    cropped: tuple[int, ...] = ()
    if direction == "backward data":
        after, cropped = (turned, full), (node.outputs[0].bytes,) if is_padded else ()
    copied = {"forward": node.outputs[0].bytes, "backward data": full, "backward weight": turned}
    guarded = copied[direction] + _GUARDS
    tried = tuple(-(-plan // _GUARD_ALIGNMENT) * _GUARD_ALIGNMENT + _GUARDS for plan in plans)
    own = None if direction != "backward data" else 3 if is_padded else 1
    return Need((), after, (plans[0], *cropped), (guarded,), tried, own)


def _is_product(node: Node, image: _Shape, kernel: _Shape) -> bool:
    """Whether cuBLAS computes it, which takes nothing: channels last and in one group, and the filter sees one place
    or all of them (conv_ops_gpu.cc, conv_grad_ops_3d.cc ...)."""
    if node.op == "_FusedConv2D" or not node.attributes.get("data_format", "NHWC").endswith("C"):
        return False
    steps = (*_spatial(node, "strides"), *_spatial(node, "dilations"))
    one_place = set(kernel[2:]) == {1} and set(steps) == {1}
    whole = kernel[2:] == image[2:] and set(_spatial(node, "dilations")) == {1}
    return kernel[1] == image[1] and (one_place or (whole and node.attributes.get("padding") == "VALID"))


_DIRECTIONS = {
    "Conv2D": "forward", "_FusedConv2D": "forward", "Conv3D": "forward",
    "Conv2DBackpropInput": "backward data", "Conv3DBackpropInputV2": "backward data",
    "Conv2DBackpropFilter": "backward weight", "Conv3DBackpropFilterV2": "backward weight",
}  # fmt: skip
_DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float64"}

_Shape = tuple[int, ...]


def _conv_shapes(node: Node, inputs: Inputs) -> tuple[_Shape, _Shape, _Shape] | None:
    """Input, filter and output of the convolution, channels second."""
    place = {"forward": 2, "backward data": 0, "backward weight": 1}[_DIRECTIONS[node.op]]
    three = [*inputs[:3], node.outputs[0]][:3]
    three[place] = node.outputs[0]
    image, kernel, result = (tensor.shape for tensor in three)
    if image is None or kernel is None or result is None:
        return None
    last = node.attributes.get("data_format", "NHWC").endswith("C")
    filters = (kernel[-1], kernel[-2], *kernel[:-2])
    return _channels_second(image, last), filters, _channels_second(result, last)


def _channels_second(shape: _Shape, last: bool) -> _Shape:
    return (shape[0], shape[-1], *shape[1:-1]) if last else shape


def _spatial(node: Node, name: str) -> _Shape:
    values = node.attributes.get(name) or [1, 1, 1, 1]
    last = node.attributes.get("data_format", "NHWC").endswith("C")
    return tuple(values[1:-1] if last else values[2:])


def _padding(node: Node, image: _Shape, kernel: _Shape, result: _Shape) -> tuple[_Shape, _Shape]:
    """The padding on both sides that cuDNN is given, and the padding of the input beforehand."""
    if node.attributes.get("padding") == "VALID":
        return (0,) * (len(image) - 2), (0,) * (len(image) - 2)
    even, more = [], []
    places = zip(image[2:], kernel[2:], result[2:], _spatial(node, "strides"), _spatial(node, "dilations"), strict=True)
    for size, width, out, stride, dilation in places:
        total = max(0, (out - 1) * stride + (width - 1) * dilation + 1 - size)
        even.append(total // 2)
        more.append(total % 2)
    return tuple(even), tuple(more)


def _recurrent(node: Node, inputs: Inputs, library: Library) -> Need:
    """The lengths of the sequences, and cuDNN's work space (cudnn_rnn_ops.cc)."""
    network = _network(node, inputs)
    return Need(after=(4 * network.batch,), last=(library.recurrent(network, True)[0],))


def _network(node: Node, inputs: Inputs) -> Network:
    """As TensorFlow describes it: the standard algorithm, one layer for each state."""
    sequences, states = inputs[0].shape, inputs[1].shape
    assert sequences is not None
    assert states is not None
    steps_first = bool(node.attributes.get("time_major", True))
    steps, batch = sequences[:2] if steps_first else (sequences[1], sequences[0])
    directions = 2 if node.attributes.get("direction") == "bidirectional" else 1
    layers = (states[0] if steps_first else states[1]) // directions
    mode = {"lstm": LSTM, "gru": GRU}.get(node.attributes["rnn_mode"], LSTM)
    return Network(
        mode, STANDARD, _DTYPES[inputs[0].dtype], steps, batch, sequences[2], states[2], 0, layers, directions,
    )  # fmt: skip


def _bias_gradient(node: Node, inputs: Inputs, library: Library) -> Need:
    """Two ways are tried out where a shape is new; the one that sums rows first fills a tensor of the gradient's size,
    if channels are second. The other is taken where both are as fast (bias_op.cc: ``ComputeWithReduceSum``)."""
    return Need(trials=(inputs[0].bytes,) if node.attributes.get("data_format") == "NCHW" else ())


_RULES: Mapping[str, Rule] = {
    "BiasAddGrad": _bias_gradient,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "SparseSoftmaxCrossEntropyWithLogits": _cross_entropy,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy,
    "ConcatV2": _concat,
    "TensorListStack": _stack,
    "Einsum": _einsum,
    **dict.fromkeys(_DIRECTIONS, _convolution),
    "CudnnRNNV3": _recurrent,
    "CudnnRNNBackpropV3": _recurrent,
}
