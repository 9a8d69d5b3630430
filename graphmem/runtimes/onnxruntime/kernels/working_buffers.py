"""Working buffers of the CPU provider's kernels: what they take from the arena while they run, and when.

The rules are those of 1.31.1 on x86-64. Each was compared with recorded sessions of ONNX's test cases or of exported
models (``tests/oracles/onnxruntime``), and names its source in ``core/providers/cpu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from graphmem.graph.model import Graph, Node
from graphmem.runtimes.onnxruntime.kernels.tables import MICROSOFT
from graphmem.runtimes.onnxruntime.plan.reuse import element_size

#: What a kernel does with memory, in order: ``n > 0`` takes a buffer of n bytes, :data:`OUTPUTS` allocates the outputs,
#: ``-k`` gives the k-th buffer back. Buffers that are not given back go when the kernel ends, the newest first.
Steps = tuple[int, ...]
OUTPUTS = 0
ONLY_OUTPUTS: Steps = (OUTPUTS,)
Rule = Callable[[Node, Graph, int], Steps]

FLOAT_BYTES = 4
POINTER_BYTES = 8
#: ``MLAS_SGEMM_DATA_PARAMS``.
PRODUCT_ARGUMENT_BYTES = 64
#: Of a core of common servers; kernels ask the machine they run on.
L2_CACHE_BYTES = 1 << 20
#: Floats of im2col a thread works on: MLAS_SGEMM_STRIDEN x MLAS_SGEMM_STRIDEK (``core/mlas/lib/mlasi.h``).
CONV_BUFFER_FLOATS = 128 * 128
#: First opset in which the softmax family looks at one axis only.
SOFTMAX_ONE_AXIS = 13


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in graph.tensors[name].shape)


def _output_bytes(node: Node, graph: Graph) -> int:
    return graph.tensors[node.outputs[0]].nbytes


def _conv(node: Node, graph: Graph, threads: int) -> Steps:
    """``nn/conv.cc`` asks ``MlasConvPrepare`` (``core/mlas/lib/convolve.cpp``) for the im2col buffer."""
    image, weight = _shape(graph, node.inputs[0]), _shape(graph, node.inputs[1])
    output = graph.tensors[node.outputs[0]]
    if output.dtype != "float32" or not output.elements:
        return ONLY_OUTPUTS
    depth = math.prod(weight[1:])
    pixels = math.prod(_shape(graph, node.outputs[0])[2:])
    filters = weight[0] // int(node.attributes.get("group", 1))
    if _is_direct(node, graph, image, weight):
        return ONLY_OUTPUTS
    if filters > pixels:
        return (OUTPUTS, pixels * depth * FLOAT_BYTES)
    return (OUTPUTS, _conv_threads(filters * pixels * depth, pixels, threads) * CONV_BUFFER_FLOATS * FLOAT_BYTES)


def _conv_threads(complexity: int, pixels: int, threads: int) -> int:
    """Threads among which ``MlasConvPrepare`` divides the output; each is worth 64 Ki multiplications
    (MLAS_SGEMM_THREAD_COMPLEXITY) and takes a multiple of 16 columns."""
    count = min(complexity // (64 << 10) + 1, threads)
    stride = -(-pixels // count)
    if count > 1:
        stride = -(-stride // 16) * 16
        if stride >= pixels:
            return 1
        if stride * (count - 1) >= pixels:
            return count - 1
    return count


def _is_direct(node: Node, graph: Graph, image: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether the convolution is a matrix product on the input as it lies: pointwise, or a kernel that spans it."""
    kernel = weight[2:]
    ones = (1,) * len(kernel)
    dilations = tuple(node.attributes.get("dilations", ones))
    if tuple(node.attributes.get("strides", ones)) != ones:
        return False
    output = _shape(graph, node.outputs[0])[2:]
    if any(o != i - (k - 1) * d for i, k, d, o in zip(image[2:], kernel, dilations, output, strict=True)):
        return False  # padded
    if kernel == ones:
        return True
    is_plane = len(kernel) == 2 and dilations == ones and weight[1] == 1
    return is_plane and (kernel[1] == image[3] or (kernel[0] == image[2] and kernel[1] == 1))


def _conv_transpose(node: Node, graph: Graph, threads: int) -> Steps:
    """The column buffer of ``nn/conv_transpose.cc``."""
    image, weight = _shape(graph, node.inputs[0]), _shape(graph, node.inputs[1])
    return (OUTPUTS, math.prod(weight[1:]) * math.prod(image[2:]) * FLOAT_BYTES)


def _conv_integer(node: Node, graph: Graph, threads: int) -> Steps:
    """The column buffer of ``nn/conv_integer.cc``, none for pointwise convolutions."""
    weight = _shape(graph, node.inputs[1])
    if _is_direct(node, graph, _shape(graph, node.inputs[0]), weight) and math.prod(weight[2:]) == 1:
        return ONLY_OUTPUTS
    return (OUTPUTS, math.prod(weight[1:]) * math.prod(_shape(graph, node.outputs[0])[2:]))


def _where(node: Node, graph: Graph, threads: int) -> Steps:
    """``tensor/where_op.cc``: what is selected of either side, each as a tensor."""
    condition, *sides = (_shape(graph, name) for name in node.inputs)
    size = element_size(graph.tensors[node.outputs[0]].dtype)
    return (*(math.prod(_broadcast(condition, side)) * size for side in sides), OUTPUTS)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


def _variadic(node: Node, graph: Graph, threads: int) -> Steps:
    """``math/element_wise_ops.cc``, ``UntypedBroadcastVariadic``: a tensor for every partial result but the last."""
    shapes = [_shape(graph, name) for name in node.inputs]
    size = element_size(graph.tensors[node.outputs[0]].dtype)
    steps: list[int] = []
    partial = shapes[0]
    for count, shape in enumerate(shapes[1:-1], 1):
        partial = _broadcast(partial, shape)
        steps.append(math.prod(partial) * size)
        if count > 1:
            steps.append(1 - count)
    return (*steps, OUTPUTS)


def _softmax(node: Node, graph: Graph, threads: int) -> Steps:
    """``math/softmax.cc``: an axis that is not the last is brought there in a copy, and the result back."""
    shape = _shape(graph, node.inputs[0])
    axis = int(node.attributes.get("axis", -1))
    if dict(graph.opsets).get("", 1) < SOFTMAX_ONE_AXIS or axis % max(1, len(shape)) == len(shape) - 1 or not shape:
        return ONLY_OUTPUTS
    size = _output_bytes(node, graph)
    return (OUTPUTS, size, size)


def _local_response(node: Node, graph: Graph, threads: int) -> Steps:
    """``nn/lrn.cc``: the scale, and the squares of one image with channels padded."""
    shape = _shape(graph, node.inputs[0])
    padded = (shape[1] + int(node.attributes["size"]) - 1) * math.prod(shape[2:]) * FLOAT_BYTES
    return (OUTPUTS, _output_bytes(node, graph), padded)


def _mean_variance(node: Node, graph: Graph, threads: int) -> Steps:
    """``tensor/mean_variance_normalization.cc``: input and output transposed."""
    size = _output_bytes(node, graph)
    return (OUTPUTS, size, size)


def _resize(node: Node, graph: Graph, threads: int) -> Steps:
    """``tensor/upsample.cc``: linear interpolation keeps two indices and two weights for every row and column."""
    before, after = _shape(graph, node.inputs[0]), _shape(graph, node.outputs[0])
    if node.attributes.get("mode", "nearest") != "linear" or before == after:
        return ONLY_OUTPUTS
    rank = len(after)
    if rank == 2 or (rank == 4 and (before[0], before[1]) == (after[0], after[1])):
        sizes = after[-2:]
    elif rank == 4 and (before[0], before[3]) == (after[0], after[3]):
        sizes = after[1:3]
    elif rank == 3 or rank == 5:
        sizes = after[-3:]
    else:
        return ONLY_OUTPUTS
    return (OUTPUTS, sum(sizes) * 4 * FLOAT_BYTES)


def _quantized_product(node: Node, graph: Graph, threads: int) -> Steps:
    """``quantization/quantize_linear_matmul.cc``: the product in 32-bit integers."""
    return (OUTPUTS, graph.tensors[node.outputs[0]].elements * 4)


def _quantized_gemm(node: Node, graph: Graph, threads: int) -> Steps:
    """``contrib_ops/cpu/quantization/quant_gemm.cc``: the product in 32-bit integers where the output is quantized."""
    is_quantized = len(node.inputs) > 7 and bool(node.inputs[7])
    return _quantized_product(node, graph, threads) if is_quantized else ONLY_OUTPUTS


def _quantized_input(node: Node, graph: Graph, threads: int) -> Steps:
    """``contrib_ops/cpu/quantization/dynamic_quantize_matmul.cc``: the left matrix in bytes."""
    return (graph.tensors[node.inputs[0]].elements, OUTPUTS)


@dataclass(frozen=True)
class _Recurrent:
    """The sizes of a recurrent node in bytes: one state of one sequence, those of all sequences, what is read and given
    at all steps in one direction, and a length for every sequence."""

    node: Node
    directions: int
    value: int
    state: int
    steps: int
    read: int
    lengths: int

    @property
    def given(self) -> int:
        return self.steps * self.state

    def has(self, position: int) -> bool:
        """Whether an optional input is there: 3 the biases, 4 the lengths of the sequences."""
        return len(self.node.inputs) > position and bool(self.node.inputs[position])

    def absent(self, *sizes: int) -> Steps:
        """Buffers in place of the outputs that nobody asked for, of ``sizes`` in one direction."""
        outputs = (*self.node.outputs, "", "", "")
        return tuple(self.directions * size for size, name in zip(sizes, outputs, strict=False) if size and not name)

    def ended(self, *, is_backward: bool) -> Steps:
        """What comes last: what runs backward in time reads a reversed input and reverses its output; lengths."""
        turned = (self.read, self.given) if is_backward else ()
        return (*turned, *(() if self.has(4) else (self.lengths,)))

    @property
    def is_backward(self) -> bool:
        return bool(self.node.attributes.get("direction", "forward") == "reverse")


def _recurrent(node: Node, graph: Graph) -> _Recurrent:
    steps, batch, inputs = _shape(graph, node.inputs[0])
    hidden = _shape(graph, node.inputs[2])[1 if node.domain else 2]
    directions = _shape(graph, node.inputs[2])[0]
    value, counts = hidden * FLOAT_BYTES, batch * FLOAT_BYTES
    return _Recurrent(node, directions, value, batch * value, steps, steps * batch * inputs * FLOAT_BYTES, counts)


def _lstm(node: Node, graph: Graph, threads: int) -> Steps:
    """``rnn/uni_directional_lstm.cc``, all of it until the kernel ends: peepholes, three states, the gates of all steps
    and the bias of every gate; then the reversed sequence, and lengths."""
    return _long_short(_recurrent(node, graph), ())


def _long_short(like: _Recurrent, quantized: Steps) -> Steps:
    value, state = like.value, like.state
    one = (value, value, state, state, state, 4 * like.given, *((value,) * 4 if like.has(3) else ()))
    absent = like.absent(0, state, state)
    if like.directions == 1:
        return (OUTPUTS, *absent, *one, *like.ended(is_backward=like.is_backward), *quantized)
    run = (*like.ended(is_backward=False), *quantized)
    return (OUTPUTS, *absent, *one, *one, like.read, like.given, *run, *run)


def _quantized_lstm(node: Node, graph: Graph, threads: int) -> Steps:
    """``AllocateQuantizeBuffers`` beside those: input or state in bytes, and the gates of one step in integers."""
    like = _recurrent(node, graph)
    return _long_short(like, (max(like.read, like.state) // FLOAT_BYTES, 4 * like.state))


def _gru(node: Node, graph: Graph, threads: int) -> Steps:
    """``rnn/deep_cpu_gru.cc``, likewise: two states, biases for the batch, the gates of all steps."""
    like = _recurrent(node, graph)
    is_linear = bool(node.attributes.get("linear_before_reset", 0))
    states = 2 + is_linear + (3 + is_linear if like.has(3) else 0)
    one = (*((like.state,) * states), 3 * like.given)
    absent = like.absent(0, like.state)
    if like.directions == 1:
        return (OUTPUTS, *absent, *one, *like.ended(is_backward=like.is_backward))
    return (OUTPUTS, *absent, *one, *like.ended(is_backward=False), *one, *like.ended(is_backward=True))


def _rnn(node: Node, graph: Graph, threads: int) -> Steps:
    """``rnn/rnn.cc``: the states of all steps where they are no output, and the input's part of them."""
    like = _recurrent(node, graph)
    return (OUTPUTS, like.given, *like.absent(like.given))


def _biased_gelu(node: Node, graph: Graph, threads: int) -> Steps:
    """``contrib_ops/cpu/bert/bias_gelu.cc``: the sum, where there is a bias."""
    return (OUTPUTS, _output_bytes(node, graph)) if len(node.inputs) > 1 and node.inputs[1] else ONLY_OUTPUTS


def _quantized_conv(node: Node, graph: Graph, threads: int) -> Steps:
    """``quantization/qlinearconv.cc``: sums of an image in 32-bit integers unless the kernel requantizes by itself;
    where channels do not come last, input and output of an image transposed; then pointers to what every output pixel
    reads, or a column buffer of one group."""
    image, weight, output = (_shape(graph, name) for name in (node.inputs[0], node.inputs[3], node.outputs[0]))
    is_last = bool(node.attributes.get("channels_last", 0))
    pixels, kernel, filters = math.prod(output[1:-1] if is_last else output[2:]), math.prod(weight[2:]), weight[0]
    is_pointwise = kernel == 1 and all(stride == 1 for stride in node.attributes.get("strides", ()))
    pointers = pixels * kernel * POINTER_BYTES
    sums: Steps = (filters * pixels * 4,)
    last: Steps = () if is_pointwise else (weight[1] * kernel * pixels,)
    if symmetric_filter_bytes(node, graph):
        sums, last = (), () if is_pointwise else (pointers * (output[0] if is_last else 1),)
    elif weight[1] == 1 and filters == int(node.attributes.get("group", 1)):
        last = (pointers,)
    sides = () if is_last else (math.prod(image[1:]), filters * pixels)
    return (OUTPUTS, *sums, *sides, *last)


def symmetric_filter_bytes(node: Node, graph: Graph) -> int:
    """Bytes of the filter of a QLinearConv packed for the kernels that need no sums, 0 where those do not serve it
    (``MlasConvSymPackWSize``, ``core/mlas/lib/convsym.cpp``): unsigned input, signed weights around zero."""
    weight = graph.tensors[node.inputs[3]]
    zero = graph.values.get(node.inputs[5]) if len(node.inputs) > 5 else None
    if weight.dtype != "int8" or graph.tensors[node.inputs[0]].dtype != "uint8" or zero is None or zero.any():
        return 0
    filters, channels, *kernel = (int(d) for d in weight.shape)
    group = int(node.attributes.get("group", 1))
    if group > 1:
        return filters * math.prod(kernel) if channels == 1 and filters == group and not group % 16 else 0
    if filters < 16 or channels % 4:
        return 0
    return -(-filters // 16) * 16 * channels * math.prod(kernel)


@dataclass(frozen=True)
class _Attention:
    """The sizes of an attention: sequences, heads, lengths of queries and of keys, columns of a head's keys and
    values."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.queries * self.keys * FLOAT_BYTES

    @property
    def product(self) -> int:
        return self.batch * self.heads * self.queries * self.value_width * FLOAT_BYTES

    def multiplied(self, mask: int) -> Steps:
        """``AttentionCPUBase::ApplyAttention``: the mask spread out, the scores, the arguments of the products, the
        product before it is transposed."""
        arguments = self.batch * self.heads * PRODUCT_ARGUMENT_BYTES
        return (*((mask,) if mask else ()), self.scores, arguments, self.product)

    def mask(self, node: Node, graph: Graph, position: int) -> int:
        """Bytes of the mask at a position: a row for each sequence, or one for each query too."""
        name = node.inputs[position] if len(node.inputs) > position else ""
        if node.attributes.get("unidirectional", 0) or (name and len(graph.tensors[name].shape) > 2):
            return self.batch * self.queries * self.keys * FLOAT_BYTES
        return self.batch * self.keys * FLOAT_BYTES if name else 0

    def blocks(self, threads: int) -> int:
        """Flash attention (``multihead_attention.cc``): tiles that fit the second-level cache, for each thread."""
        columns = self.width + self.value_width
        keys = max(1, L2_CACHE_BYTES // (4 * FLOAT_BYTES * columns))
        queries, keys = min(keys, columns, self.queries), min(keys, self.keys)
        return threads * queries * (2 + keys + self.value_width) * FLOAT_BYTES


def _packed_attention(node: Node, graph: Graph, threads: int) -> Steps:
    """``contrib_ops/cpu/bert/attention.cc``: queries, keys and values in one buffer."""
    batch, queries, _ = _shape(graph, node.inputs[0])
    columns = attention_columns(node, graph)
    heads = int(node.attributes["num_heads"])
    past = _shape(graph, node.inputs[4])[3] if len(node.inputs) > 4 and node.inputs[4] else 0
    like = _Attention(batch, heads, queries, queries + past, columns[0] // heads, columns[2] // heads)
    return (OUTPUTS, batch * queries * sum(columns) * FLOAT_BYTES, *like.multiplied(like.mask(node, graph, 3)))


def attention_columns(node: Node, graph: Graph) -> tuple[int, int, int]:
    """Columns of the queries, keys and values of a com.microsoft ``Attention``."""
    given = node.attributes.get("qkv_hidden_sizes")
    third = _shape(graph, node.inputs[1])[1] // 3
    return (given[0], given[1], given[2]) if given else (third, third, third)


def _multi_head_attention(node: Node, graph: Graph, threads: int) -> Steps:
    """``contrib_ops/cpu/bert/multihead_attention.cc``: each side by heads, its bias added before; flash attention where
    there is neither mask nor past."""
    heads = int(node.attributes["num_heads"])
    batch, queries, columns = _shape(graph, node.inputs[0])
    given = (*node.inputs, *("",) * 8)
    key = _shape(graph, given[1]) if given[1] else (batch, queries, columns)
    value = _shape(graph, given[2]) if given[2] else key
    is_split = len(key) == 4
    past = _shape(graph, given[6])[2] if given[6] else 0
    width, value_width = columns // heads, value[3] if is_split else value[2] // heads
    like = _Attention(batch, heads, queries, past + key[2 if is_split else 1], width, value_width)
    steps: list[int] = [OUTPUTS]
    taken = 0
    for shape in ((batch, queries, columns),) if is_split else ((batch, queries, columns), key, value):
        steps.append(math.prod(shape) * FLOAT_BYTES)
        taken += 1
        if given[3]:
            steps += [steps[-1], shape[2] * FLOAT_BYTES, -(taken + 2), -(taken + 1)]
            taken += 2
    is_flash = not (is_split or any(given[4:8]) or any(node.outputs[1:]) or node.attributes.get("unidirectional", 0))
    return (*steps, like.blocks(threads)) if is_flash else (*steps, *like.multiplied(like.mask(node, graph, 4)))


def _attention(node: Node, graph: Graph, threads: int) -> Steps:
    """``core/providers/cpu/llm/attention.cc`` (opset 23): the scores, and a mask that is made of truth values."""
    shape, keys = _shape(graph, node.inputs[0]), _shape(graph, node.inputs[1])
    heads = int(node.attributes.get("q_num_heads", 0)) if len(shape) == 3 else shape[1]
    past = _shape(graph, node.inputs[4])[2] if len(node.inputs) > 4 and node.inputs[4] else 0
    total = past + keys[-2]
    size = element_size(graph.tensors[node.inputs[0]].dtype)
    scores = shape[0] * heads * shape[-2] * total * size
    mask = node.inputs[3] if len(node.inputs) > 3 else ""
    made: int = shape[-2] * total if node.attributes.get("is_causal", 0) else 0
    if mask and (made or graph.tensors[mask].dtype == "bool"):
        made = max(made, graph.tensors[mask].elements)
    shown = () if len(node.outputs) > 3 and node.outputs[3] else (scores,)
    return (OUTPUTS, *shown, *((made * size,) if made else ()))


WORKING: dict[tuple[str, str], Rule] = {
    (MICROSOFT, "Attention"): _packed_attention,
    (MICROSOFT, "MultiHeadAttention"): _multi_head_attention,
    ("", "Attention"): _attention,
    ("", "LSTM"): _lstm,
    ("", "GRU"): _gru,
    ("", "RNN"): _rnn,
    ("", "Conv"): _conv,
    (MICROSOFT, "FusedConv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "ConvInteger"): _conv_integer,
    ("", "Where"): _where,
    ("", "Max"): _variadic,
    ("", "Min"): _variadic,
    ("", "Sum"): _variadic,
    ("", "Mean"): _variadic,
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _softmax,
    ("", "Hardmax"): _softmax,
    ("", "LRN"): _local_response,
    ("", "MeanVarianceNormalization"): _mean_variance,
    ("", "Resize"): _resize,
    ("", "Upsample"): _resize,
    ("", "QLinearMatMul"): _quantized_product,
    (MICROSOFT, "DynamicQuantizeMatMul"): _quantized_input,
    (MICROSOFT, "DynamicQuantizeLSTM"): _quantized_lstm,
    (MICROSOFT, "QGemm"): _quantized_gemm,
    (MICROSOFT, "BiasGelu"): _biased_gelu,
    (MICROSOFT, "FastGelu"): _biased_gelu,
    ("", "QLinearConv"): _quantized_conv,
    (MICROSOFT, "QLinearConv"): _quantized_conv,
}
#: Operators whose CPU kernels are known to take working buffers, and whose rules are not written yet.
WITHOUT_RULE: frozenset[tuple[str, str]] = frozenset((
    ("", "DFT"), ("", "STFT"), ("", "DeformConv"),
    ("", "Einsum"), (MICROSOFT, "GroupQueryAttention"), (MICROSOFT, "QAttention"),
    (MICROSOFT, "MatMulNBits"), (MICROSOFT, "SparseAttention"),
    (MICROSOFT, "DecoderMaskedMultiHeadAttention"), (MICROSOFT, "QMoE"), (MICROSOFT, "MoE"),
))  # fmt: skip
