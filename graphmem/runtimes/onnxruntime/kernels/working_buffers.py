"""Working buffers of the CPU provider's kernels: what they take from the arena while they run, and when.

The rules are those of 1.31.1 on x86-64. Each was compared with recorded sessions of ONNX's test cases or of exported
models (``tests/oracles/onnxruntime``), and names its source in ``core/providers/cpu`` or ``contrib_ops/cpu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, zip_longest

from graphmem.base.numbers import div_up, round_up
from graphmem.base.records import dataclass
from graphmem.runtimes.onnxruntime.kernels.context import (
    FLOAT_BYTES,
    INT_BYTES,
    ONLY_OUTPUTS,
    OUTPUTS,
    Context,
    Rules,
    Steps,
    softmax_copies,
)
from graphmem.runtimes.onnxruntime.plan.reuse import element_size

POINTER_BYTES = 8
#: ``MLAS_SGEMM_DATA_PARAMS``.
PRODUCT_ARGUMENT_BYTES = 64
#: Of a core of common servers; kernels ask the machine they run on.
L2_CACHE_BYTES = 1 << 20
#: Floats of im2col a thread works on: MLAS_SGEMM_STRIDEN x MLAS_SGEMM_STRIDEK (``core/mlas/lib/mlasi.h``).
CONV_BUFFER_FLOATS = 128 * 128

#: Rules by operator, each given the kernel and the number of threads.
WORKING: Rules[Callable[[Context, int], Steps]] = Rules()


@WORKING.of("Conv", "com.microsoft.FusedConv")
def _conv(kernel: Context, threads: int) -> Steps:
    """``nn/conv.cc`` asks ``MlasConvPrepare`` (``core/mlas/lib/convolve.cpp``) for the im2col buffer."""
    weight = kernel.shape(1)
    if kernel.output().dtype != "float32" or not kernel.output().elements or _is_direct(kernel):
        return ONLY_OUTPUTS
    depth = math.prod(weight[1:])
    pixels = math.prod(kernel.output_shape()[2:])
    filters = weight[0] // kernel.number("group", 1)
    if filters > pixels:
        return (OUTPUTS, pixels * depth * FLOAT_BYTES)
    return (OUTPUTS, _conv_threads(filters * pixels * depth, pixels, threads) * CONV_BUFFER_FLOATS * FLOAT_BYTES)


def _conv_threads(complexity: int, pixels: int, threads: int) -> int:
    """Threads among which ``MlasConvPrepare`` divides the output; each is worth 64 Ki multiplications
    (MLAS_SGEMM_THREAD_COMPLEXITY) and takes a multiple of 16 columns."""
    count = min(complexity // (64 << 10) + 1, threads)
    if count > 1:
        stride = round_up(div_up(pixels, count), 16)
        if stride >= pixels:
            return 1
        if stride * (count - 1) >= pixels:
            return count - 1
    return count


def _is_direct(kernel: Context) -> bool:
    """Whether the convolution is a matrix product on the input as it lies: pointwise, or a kernel that spans it."""
    image, weight = kernel.shape(0), kernel.shape(1)
    window = weight[2:]
    ones = (1,) * len(window)
    dilations = tuple(kernel.node.attributes.get("dilations", ones))
    if tuple(kernel.node.attributes.get("strides", ones)) != ones:
        return False
    output = kernel.output_shape()[2:]
    if any(o != i - (k - 1) * d for i, k, d, o in zip(image[2:], window, dilations, output, strict=True)):
        return False  # padded
    if window == ones:
        return True
    is_plane = len(window) == 2 and dilations == ones and weight[1] == 1
    return is_plane and (window[1] == image[3] or (window[0] == image[2] and window[1] == 1))


@WORKING.of("ConvTranspose")
def _conv_transpose(kernel: Context, threads: int) -> Steps:
    """The column buffer of ``nn/conv_transpose.cc``."""
    return (OUTPUTS, math.prod(kernel.shape(1)[1:]) * math.prod(kernel.shape(0)[2:]) * FLOAT_BYTES)


@WORKING.of("ConvInteger")
def _conv_integer(kernel: Context, threads: int) -> Steps:
    """The column buffer of ``nn/conv_integer.cc``, none for pointwise convolutions."""
    weight = kernel.shape(1)
    if math.prod(weight[2:]) == 1 and _is_direct(kernel):
        return ONLY_OUTPUTS
    return (OUTPUTS, math.prod(weight[1:]) * math.prod(kernel.output_shape()[2:]))


@WORKING.of("Where")
def _where(kernel: Context, threads: int) -> Steps:
    """``tensor/where_op.cc``: what is selected of either side, each as a tensor."""
    size = element_size(kernel.output().dtype)
    return (*(math.prod(_broadcast(kernel.shape(0), kernel.shape(side))) * size for side in (1, 2)), OUTPUTS)


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip_longest(reversed(first), reversed(second), fillvalue=1)
    return tuple(b if a == 1 else a for a, b in pairs)[::-1]


@WORKING.of("Max", "Min", "Sum", "Mean")
def _variadic(kernel: Context, threads: int) -> Steps:
    """``math/element_wise_ops.cc``, ``UntypedBroadcastVariadic``: a tensor for every partial result but the last, each
    given back when the next is there."""
    shapes = map(kernel.shape, range(len(kernel.node.inputs)))
    partial = list(accumulate(shapes, _broadcast))[1:-1]
    size = element_size(kernel.output().dtype)
    steps = [(math.prod(shape) * size, -count)[: 1 + bool(count)] for count, shape in enumerate(partial)]
    return (*(step for pair in steps for step in pair), OUTPUTS)


@WORKING.of("Softmax", "LogSoftmax", "Hardmax")
def _softmax(kernel: Context, threads: int) -> Steps:
    return softmax_copies(kernel)


@WORKING.of("LRN")
def _local_response(kernel: Context, threads: int) -> Steps:
    """``nn/lrn.cc``: the scale, and the squares of one image with channels padded."""
    shape = kernel.shape()
    padded = (shape[1] + kernel.number("size") - 1) * math.prod(shape[2:]) * FLOAT_BYTES
    return (OUTPUTS, kernel.output().nbytes, padded)


@WORKING.of("MeanVarianceNormalization")
def _mean_variance(kernel: Context, threads: int) -> Steps:
    """``tensor/mean_variance_normalization.cc``: input and output transposed."""
    return (OUTPUTS, kernel.output().nbytes, kernel.output().nbytes)


@WORKING.of("Resize", "Upsample")
def _resize(kernel: Context, threads: int) -> Steps:
    """``tensor/upsample.cc``: linear interpolation keeps two indices and two weights for every row and column."""
    before, after = kernel.shape(), kernel.output_shape()
    if kernel.node.attributes.get("mode", "nearest") != "linear" or before == after:
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


@WORKING.of("QLinearMatMul")
def _quantized_product(kernel: Context, threads: int) -> Steps:
    """``quantization/quantize_linear_matmul.cc``: the product in 32-bit integers."""
    return (OUTPUTS, kernel.output().elements * INT_BYTES)


@WORKING.of("com.microsoft.QGemm")
def _quantized_gemm(kernel: Context, threads: int) -> Steps:
    """``quantization/quant_gemm.cc``: the product in 32-bit integers where the output is quantized."""
    return _quantized_product(kernel, threads) if kernel.name(7) else ONLY_OUTPUTS


@WORKING.of("com.microsoft.DynamicQuantizeMatMul")
def _quantized_input(kernel: Context, threads: int) -> Steps:
    """``quantization/dynamic_quantize_matmul.cc``: the left matrix in bytes."""
    return (kernel.input().elements, OUTPUTS)


@WORKING.of("com.microsoft.BiasGelu", "com.microsoft.FastGelu")
def _biased_gelu(kernel: Context, threads: int) -> Steps:
    """``bert/bias_gelu.cc``: the sum, where there is a bias."""
    return (OUTPUTS, kernel.output().nbytes) if kernel.name(1) else ONLY_OUTPUTS


# --- recurrent networks -----------------------------------------------------------------------------------------------


class _Recurrent:
    """The sizes of a recurrent kernel in bytes: ``value`` is one state of one sequence, ``state`` those of all
    sequences; ``read`` and ``given`` are all steps of one direction, ``lengths`` a number for every sequence."""

    def __init__(self, kernel: Context) -> None:
        steps, batch, inputs = kernel.shape()
        self.directions, first, second = kernel.shape(2)
        self.value = (first if kernel.node.domain else second) * FLOAT_BYTES
        self.state = batch * self.value
        self.read, self.given = steps * batch * inputs * FLOAT_BYTES, steps * self.state
        self.lengths: Steps = () if kernel.name(4) else (batch * INT_BYTES,)
        self.has_biases = bool(kernel.name(3))
        self.is_backward = kernel.text("direction", "forward") == "reverse"
        self._absent = [not kernel.has_output(position) for position in range(3)]

    def absent(self, *sizes: int) -> Steps:
        """Buffers in place of the outputs that nobody asked for, of ``sizes`` in one direction."""
        pairs = zip(sizes, self._absent, strict=False)
        return tuple(self.directions * size for size, is_absent in pairs if size and is_absent)

    def ended(self, *, is_backward: bool) -> Steps:
        """The last buffers: a kernel that runs backward in time turns its input and its output; lengths."""
        return (*((self.read, self.given) if is_backward else ()), *self.lengths)


@WORKING.of("LSTM")
def _lstm(kernel: Context, threads: int) -> Steps:
    """``rnn/uni_directional_lstm.cc``, all of it until the kernel ends: peepholes, three states, the gates of all steps
    and the bias of every gate; then the reversed sequence, and lengths."""
    return _long_short(_Recurrent(kernel), ())


def _long_short(like: _Recurrent, quantized: Steps) -> Steps:
    value, state = like.value, like.state
    one = (value, value, state, state, state, 4 * like.given, *((value,) * 4 if like.has_biases else ()))
    absent = like.absent(0, state, state)
    if like.directions == 1:
        return (OUTPUTS, *absent, *one, *like.ended(is_backward=like.is_backward), *quantized)
    run = (*like.lengths, *quantized)
    return (OUTPUTS, *absent, *one, *one, like.read, like.given, *run, *run)


@WORKING.of("com.microsoft.DynamicQuantizeLSTM")
def _quantized_lstm(kernel: Context, threads: int) -> Steps:
    """``AllocateQuantizeBuffers`` beside those: input or state in bytes, and the gates of one step in integers."""
    like = _Recurrent(kernel)
    return _long_short(like, (max(like.read, like.state) // FLOAT_BYTES, 4 * like.state))


@WORKING.of("GRU")
def _gru(kernel: Context, threads: int) -> Steps:
    """``rnn/deep_cpu_gru.cc``, likewise: two states, biases for the batch, the gates of all steps."""
    like = _Recurrent(kernel)
    is_linear = bool(kernel.number("linear_before_reset"))
    states = 2 + is_linear + (3 + is_linear if like.has_biases else 0)
    one = (*((like.state,) * states), 3 * like.given)
    absent = like.absent(0, like.state)
    if like.directions == 1:
        return (OUTPUTS, *absent, *one, *like.ended(is_backward=like.is_backward))
    return (OUTPUTS, *absent, *one, *like.lengths, *one, *like.ended(is_backward=True))


@WORKING.of("RNN")
def _rnn(kernel: Context, threads: int) -> Steps:
    """``rnn/rnn.cc``: the states of all steps where they are no output, and the input's part of them."""
    like = _Recurrent(kernel)
    return (OUTPUTS, like.given, *like.absent(like.given))


# --- quantized convolutions -------------------------------------------------------------------------------------------


@WORKING.of("QLinearConv", "com.microsoft.QLinearConv")
def _quantized_conv(kernel: Context, threads: int) -> Steps:
    """``quantization/qlinearconv.cc``: sums of an image in 32-bit integers unless the kernel requantizes by itself;
    where channels do not come last, input and output of an image transposed; then pointers to what every output pixel
    reads, or a column buffer of one group."""
    image, weight, output = kernel.shape(0), kernel.shape(3), kernel.output_shape()
    is_last = bool(kernel.number("channels_last"))
    pixels, window, filters = math.prod(output[1:-1] if is_last else output[2:]), math.prod(weight[2:]), weight[0]
    is_pointwise = window == 1 and all(stride == 1 for stride in kernel.numbers("strides"))
    pointers = pixels * window * POINTER_BYTES
    sums: Steps = (filters * pixels * INT_BYTES,)
    last: Steps = () if is_pointwise else (weight[1] * window * pixels,)
    if symmetric_filter_bytes(kernel):
        sums, last = (), () if is_pointwise else (pointers * (output[0] if is_last else 1),)
    elif weight[1] == 1 and filters == kernel.number("group", 1):
        last = (pointers,)
    sides = () if is_last else (math.prod(image[1:]), filters * pixels)
    return (OUTPUTS, *sums, *sides, *last)


def symmetric_filter_bytes(kernel: Context) -> int:
    """Bytes of the filter of a QLinearConv packed for the kernels that need no sums, 0 where those do not serve it
    (``MlasConvSymPackWSize``, ``core/mlas/lib/convsym.cpp``): unsigned input, signed weights around zero."""
    zero = kernel.graph.values.get(kernel.name(5))
    if kernel.input(3).dtype != "int8" or kernel.input().dtype != "uint8" or zero is None or zero.any():
        return 0
    filters, channels, *window = kernel.shape(3)
    group = kernel.number("group", 1)
    if group > 1:
        return filters * math.prod(window) if channels == 1 and filters == group and not group % 16 else 0
    return 0 if filters < 16 or channels % 4 else round_up(filters, 16) * channels * math.prod(window)


# --- attention --------------------------------------------------------------------------------------------------------


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

    def multiplied(self, kernel: Context, mask_at: int) -> Steps:
        """``AttentionCPUBase::ApplyAttention``: the mask, at that input, spread out to a row for each sequence, or for
        each query too; the scores, the arguments of the products, the product before it is transposed."""
        name = kernel.name(mask_at)
        is_wide = kernel.number("unidirectional") or (name and len(kernel.input(mask_at).shape) > 2)
        rows = self.batch * (self.queries if is_wide else 1 if name else 0)
        mask = (rows * self.keys * FLOAT_BYTES,) if rows and self.keys else ()
        products = self.batch * self.heads
        scores, product = (products * self.queries * columns * FLOAT_BYTES for columns in (self.keys, self.value_width))
        return (*mask, scores, products * PRODUCT_ARGUMENT_BYTES, product)

    def blocks(self, threads: int) -> int:
        """Flash attention (``multihead_attention.cc``): tiles that fit the second-level cache, for each thread."""
        columns = self.width + self.value_width
        keys = max(1, L2_CACHE_BYTES // (4 * FLOAT_BYTES * columns))
        queries, keys = min(keys, columns, self.queries), min(keys, self.keys)
        return threads * queries * (2 + keys + self.value_width) * FLOAT_BYTES


@WORKING.of("com.microsoft.Attention")
def _packed_attention(kernel: Context, threads: int) -> Steps:
    """``bert/attention.cc``: queries, keys and values in one buffer."""
    batch, queries, _ = kernel.shape()
    columns = attention_columns(kernel)
    heads = kernel.number("num_heads")
    past = kernel.shape(4)[3] if kernel.name(4) else 0
    like = _Attention(batch, heads, queries, queries + past, columns[0] // heads, columns[2] // heads)
    return (OUTPUTS, batch * queries * sum(columns) * FLOAT_BYTES, *like.multiplied(kernel, 3))


def attention_columns(kernel: Context) -> tuple[int, ...]:
    """Columns of the queries, keys and values of a com.microsoft ``Attention``."""
    return kernel.numbers("qkv_hidden_sizes") or (kernel.shape(1)[1] // 3,) * 3


@WORKING.of("com.microsoft.MultiHeadAttention")
def _multi_head_attention(kernel: Context, threads: int) -> Steps:
    """``bert/multihead_attention.cc``: each side by heads, its bias added before; flash attention where there is no
    mask and no past."""
    heads = kernel.number("num_heads")
    batch, queries, columns = kernel.shape()
    key = kernel.shape(1) if kernel.name(1) else (batch, queries, columns)
    value = kernel.shape(2) if kernel.name(2) else key
    is_split = len(key) == 4
    past = kernel.shape(6)[2] if kernel.name(6) else 0
    width, value_width = columns // heads, value[3] if is_split else value[2] // heads
    like = _Attention(batch, heads, queries, past + key[2 if is_split else 1], width, value_width)
    steps: list[int] = [OUTPUTS]
    taken = 0
    for shape in ((batch, queries, columns),) if is_split else ((batch, queries, columns), key, value):
        steps.append(math.prod(shape) * FLOAT_BYTES)
        taken += 1
        if kernel.name(3):
            steps += [steps[-1], shape[2] * FLOAT_BYTES, -(taken + 2), -(taken + 1)]
            taken += 2
    is_plain = not (is_split or any(map(kernel.name, range(4, 8))) or any(kernel.node.outputs[1:]))
    is_flash = is_plain and not kernel.number("unidirectional")
    return (*steps, like.blocks(threads)) if is_flash else (*steps, *like.multiplied(kernel, 4))


@WORKING.of("Attention")
def _attention(kernel: Context, threads: int) -> Steps:
    """``llm/attention.cc`` (opset 23): the scores, and a mask that is made of truth values."""
    shape, keys = kernel.shape(0), kernel.shape(1)
    heads = kernel.number("q_num_heads") if len(shape) == 3 else shape[1]
    total = keys[-2] + (kernel.shape(4)[2] if kernel.name(4) else 0)
    size = element_size(kernel.input().dtype)
    made: int = shape[-2] * total if kernel.number("is_causal") else 0
    if kernel.name(3) and (made or kernel.input(3).dtype == "bool"):
        made = max(made, kernel.input(3).elements)
    scores = () if kernel.has_output(3) else (shape[0] * heads * shape[-2] * total * size,)
    return (OUTPUTS, *scores, *((made * size,) if made else ()))
