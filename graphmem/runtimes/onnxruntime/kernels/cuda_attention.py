"""Working buffers of attention on CUDA: which of its implementations runs, and what that one takes from the arena.

``contrib_ops/cuda/bert/{attention,multihead_attention,group_query_attention}.cc`` and ``core/providers/cuda/llm/
attention.cc`` try, by card, type and shapes: cuDNN's, flash attention, TensorRT's fused kernels, memory efficient
attention, and products with a softmax between them. Compared with 1.31.1 at compute capability 7.5, 8.0 and 9.0
(``tests/golden/onnxruntime/cuda``), with the environment's ``ORT_DISABLE_...`` unset.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from graphmem.base.numbers import div_up, round_up
from graphmem.base.records import dataclass
from graphmem.graph.model import ELEMENT_BITS
from graphmem.runtimes.onnxruntime.kernels.context import FLOAT_BYTES, INT_BYTES, OUTPUTS, Context, Rules, Steps
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries

#: Rules of the CUDA provider by operator. None as a rule's result: what the kernel takes for this node is not known;
#: the node is counted with its outputs alone and named among those that are not modelled.
RULES: Rules[Callable[[Context, Libraries], Steps | None]] = Rules()
#: Alignment of scratch (``kMemoryAlignment``, ``attention_impl.cu``).
_ALIGNMENT = 256
#: What the plan of cuDNN's attention asks for with several queries; of one the keys are split, by a rule of its own.
_CUDNN_BYTES = 256
_HALVES = ("float16", "bfloat16")
#: Sequences from which on float32 is computed memory efficiently, and packed products by flash attention
#: (``attention_common.h``).
_LONG_FLOAT32, _LONG_PACKED = 256, 513
#: Compute capabilities that the provider's conditions name (``sdpa`` kernels of cuDNN, of flash attention).
_TURING, _AMPERE, _HOPPER = (7, 5), (8, 0), (9, 0)
#: Compute capabilities that TensorRT's fused kernels are compiled for, and their heads: with flash attention from
#: sequences of 385 on, and for shorter ones (``mha_runner.cu``, ``flash_attention.cc``).
_FUSED_CARDS = ((7, 5), (8, 0), (8, 6), (8, 9))
_FUSED_LONG, _FUSED_LONG_HEADS, _FUSED_HEADS = 385, (16, 32, 40, 64, 80, 128, 160, 256), (32, 64)
#: Longest keys of the fused kernel for cross attention, and its widest heads by card.
_CROSS_KEYS, _CROSS_HEAD_TURING, _CROSS_HEAD = 128, 64, 256
#: Columns of masks that memory efficient attention reads are multiples of this.
_MASK_COLUMNS = 4
#: ``kv_cache`` operators keep this many zeros (``kZerosCount``), and fused kernels two lists of the ends of sequences
#: for at most 128 of them (``kCumulatedSequenceLengthCacheMaxBatchSize``).
ZEROS_BYTES, SEQUENCES_BYTES = 256 * INT_BYTES, (128 + 1) * INT_BYTES


@dataclass(frozen=True)
class Shapes:
    """One attention: sequences of queries and keys, heads of both, values of a head."""

    dtype: str
    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    head: int
    value_head: int

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ELEMENT_BITS[self.dtype] // 8

    @property
    def query_bytes(self) -> int:
        """All queries."""
        return self.batch * self.queries * self.heads * self.head * self.itemsize

    @property
    def result_bytes(self) -> int:
        """The result."""
        return self.batch * self.queries * self.heads * self.value_head * self.itemsize

    @property
    def packed_bytes(self) -> int:
        """Queries, keys and values, each with all heads."""
        return self.query_bytes + self.batch * self.keys * self.heads * (self.head + self.value_head) * self.itemsize

    def scores_bytes(self, itemsize: int) -> int:
        """A score of every query and key, in values of ``itemsize`` bytes."""
        return round_up(self.batch * self.heads * self.queries * self.keys * itemsize, _ALIGNMENT)

    @property
    def sums_bytes(self) -> tuple[int, ...]:
        """Memory efficient attention's sums in fp32, where a head is wide and narrower than they."""
        is_wide = self.value_head > 128 and self.itemsize < FLOAT_BYTES
        return (self.batch * self.queries * self.heads * self.value_head * FLOAT_BYTES,) if is_wide else ()


# --- which one runs ---------------------------------------------------------------------------------------------------


def _has_cudnn(shapes: Shapes, libraries: Libraries) -> bool:
    """``cudnn_sdpa::is_supported``; it is asked from Hopper on."""
    return shapes.dtype in _HALVES and libraries.capability >= _HOPPER and _fits_flash(shapes)


def _has_flash(shapes: Shapes, libraries: Libraries) -> bool:
    """``flash::is_supported``."""
    is_alike = shapes.head == shapes.value_head
    return shapes.dtype in _HALVES and libraries.capability >= _AMPERE and is_alike and _fits_flash(shapes)


def _fits_flash(shapes: Shapes) -> bool:
    heads = (shapes.head, shapes.value_head)
    return all(not head % 8 and head <= 256 for head in heads) and not shapes.heads % shapes.key_heads


def _has_fused(shapes: Shapes, libraries: Libraries) -> bool:
    """``FusedMHARunnerFP16v2::IsSupported``."""
    if shapes.dtype != "float16" or libraries.capability not in _FUSED_CARDS or shapes.head != shapes.value_head:
        return False
    return shapes.head in (_FUSED_LONG_HEADS if shapes.queries >= _FUSED_LONG else _FUSED_HEADS)


def _has_cross(shapes: Shapes, libraries: Libraries) -> bool:
    """``has_fused_cross_attention_kernel``."""
    widest = _CROSS_HEAD_TURING if libraries.capability == _TURING else _CROSS_HEAD
    is_known = shapes.dtype == "float16" and libraries.capability in _FUSED_CARDS
    return is_known and shapes.head == shapes.value_head <= widest and shapes.keys <= _CROSS_KEYS


def _has_efficient(shapes: Shapes, libraries: Libraries, *, is_long: bool) -> bool:
    """``has_memory_efficient_attention``, which float32 takes for long sequences alone."""
    if shapes.dtype == "bfloat16" and libraries.capability < _AMPERE:
        return False
    return (shapes.dtype in _HALVES or is_long) and not shapes.head % 8 and not shapes.value_head % 8


def _flash_buffers(shapes: Shapes, libraries: Libraries) -> tuple[int, ...]:
    """The logarithms of the sums; where few blocks would leave a card idle the keys are split, and each part has
    logarithms and a result of its own, in fp32 (``get_num_splits_and_buffer_sizes``)."""
    logarithms = shapes.batch * shapes.heads * shapes.queries * FLOAT_BYTES
    splits = _splits(shapes, libraries.card.sm_count or 1)
    if splits == 1:
        return (logarithms,)
    return (logarithms, splits * logarithms, splits * logarithms * round_up(shapes.head, 32))


def _splits(shapes: Shapes, processors: int) -> int:
    """``num_splits_heuristic`` (``flash_api.cc``): the fewest parts whose last wave of blocks is nearly as full as that
    of the best number."""
    columns = 256 if shapes.head <= 64 else 128 if shapes.head <= 128 else 64
    blocks = div_up(shapes.keys, columns)
    work = shapes.batch * shapes.heads * div_up(shapes.queries, 64)
    if work >= 0.8 * processors:
        return 1
    waves = {
        parts: work * parts / processors
        for parts in range(1, min(128, processors, blocks) + 1)
        if parts == 1 or div_up(blocks, parts) != div_up(blocks, parts - 1)
    }
    filled = {parts: wave / math.ceil(wave) for parts, wave in waves.items()}
    return next((parts for parts, share in filled.items() if share >= 0.85 * max(filled.values())), 1)


# --- the operators ----------------------------------------------------------------------------------------------------


@RULES.of("com.microsoft.Attention")
def attention(kernel: Context, libraries: Libraries) -> Steps | None:
    """``bert/attention.cc``: queries, keys and values in one product, then what the implementation needs of them."""
    batch, length, _ = kernel.shape()
    heads, columns = kernel.number("num_heads"), kernel.shape(1)[-1]
    past = kernel.shape(4)[-2] if kernel.name(4) else 0
    head = columns // 3 // heads
    shapes = Shapes(kernel.input().dtype, batch, length, past + length, heads, heads, head, head)
    if kernel.name(5) or "qkv_hidden_sizes" in kernel.node.attributes:
        return None
    product, mask = batch * length * columns * shapes.itemsize, kernel.name(3)
    if not past and not any(kernel.node.outputs[1:]):
        fused = _fused_attention(kernel, shapes, libraries, product)
        if fused is None or fused:
            return fused
    if mask and kernel.shape(3) == (3 * batch + 2,):
        return None
    return (OUTPUTS, product, product + 2 * shapes.scores_bytes(shapes.itemsize))


def _fused_attention(kernel: Context, shapes: Shapes, libraries: Libraries, product: int) -> Steps | None:
    """The buffers of an implementation in one kernel; () where there is none for it, None where they are not known."""
    mask, lengths = kernel.name(3), _mask_is_lengths(kernel, 3, shapes.batch)
    if lengths and _has_cudnn(shapes, libraries):
        ends = [shapes.batch * INT_BYTES] if mask else []
        return None if shapes.queries == 1 else (OUTPUTS, product, product, *ends, _CUDNN_BYTES)
    if not mask and shapes.queries >= _LONG_PACKED and _has_flash(shapes, libraries):
        return (OUTPUTS, *_flash_buffers(shapes, libraries), product, product)
    if lengths and not kernel.number("unidirectional") and _has_fused(shapes, libraries):
        return (OUTPUTS, product, product + _offsets_bytes(shapes.batch))
    if not mask and _has_efficient(shapes, libraries, is_long=shapes.queries >= _LONG_FLOAT32):
        return (OUTPUTS, product, product + sum(shapes.sums_bytes))
    return ()


def _mask_is_lengths(kernel: Context, position: int, batch: int) -> bool:
    """Whether there is no mask, or one of a length for each sequence."""
    return not kernel.name(position) or kernel.shape(position) == (batch,)


def _offsets_bytes(batch: int) -> int:
    """Where every sequence and its padding begin (``GetSequenceOffsetSize``)."""
    return round_up((2 * batch + 1) * INT_BYTES, _ALIGNMENT)


@RULES.of("com.microsoft.MultiHeadAttention")
def multi_head(kernel: Context, libraries: Libraries) -> Steps | None:
    """``bert/multihead_attention.cc``: queries, keys and values that are packed or have a bias are unpacked first."""
    if any(kernel.node.inputs[5:]) or any(kernel.node.outputs[1:]) or (kernel.name(1) and len(kernel.shape(1)) == 4):
        return None
    shapes = _multi_head_shapes(kernel)
    taken = _multi_head_buffers(kernel, shapes, libraries)
    return None if taken is None else (OUTPUTS, *filter(None, taken))


def _multi_head_buffers(kernel: Context, shapes: Shapes, libraries: Libraries) -> tuple[int, ...] | None:
    key, value, bias, mask = map(kernel.name, range(1, 5))
    lengths, causal = _mask_is_lengths(kernel, 4, shapes.batch), kernel.number("unidirectional")
    packed = shapes.packed_bytes if bias or not value else 0
    if lengths and _has_cudnn(shapes, libraries):
        ends = shapes.batch * INT_BYTES if mask else 0
        return None if shapes.queries == 1 else (packed, ends, _CUDNN_BYTES)
    if not mask and _has_flash(shapes, libraries):
        return (*_flash_buffers(shapes, libraries), packed)
    if not mask and not causal and (value or (key and not bias)) and _has_cross(shapes, libraries):
        return ((shapes.packed_bytes if value else 0) + 2 * _offsets_bytes(shapes.batch),)
    is_square = (value or not key) and shapes.queries == shapes.keys
    if lengths and not causal and is_square and _has_fused(shapes, libraries):
        return ((shapes.packed_bytes if key or bias else 0) + _offsets_bytes(shapes.batch),)
    if not mask and _has_efficient(shapes, libraries, is_long=max(shapes.queries, shapes.keys) >= _LONG_FLOAT32):
        return (packed + sum(shapes.sums_bytes),)
    return (shapes.packed_bytes + 2 * shapes.scores_bytes(shapes.itemsize),)


def _multi_head_shapes(kernel: Context) -> Shapes:
    """Queries are (batch, length, values), packed ones (batch, length, heads, 3, head) or with keys (..., 2, head)."""
    heads, given = kernel.number("num_heads"), kernel.shape()
    batch, length = given[:2]
    head = given[-1] if len(given) == 5 else given[-1] // heads
    keys = kernel.shape(1)[1] if kernel.name(1) else length
    value_head = kernel.shape(2)[-1] // heads if kernel.name(2) else head
    return Shapes(kernel.input().dtype, batch, length, keys, heads, heads, head, value_head)


@RULES.of("Attention")
def of_onnx(kernel: Context, libraries: Libraries) -> Steps | None:
    """``core/providers/cuda/llm/attention.cc``: inputs of four dimensions are transposed for the kernels that want them
    otherwise; keys of fewer heads are repeated where a kernel knows one number of heads."""
    if any(kernel.node.inputs[4:]) or any(kernel.node.outputs[1:]) or kernel.node.attributes.get("softcap", 0.0):
        return None
    mask, is_transposed = kernel.name(3), len(kernel.shape()) == 4
    shapes = _onnx_shapes(kernel)
    moved = (shapes.query_bytes, shapes.result_bytes) if is_transposed else ()
    is_grouped = shapes.heads != shapes.key_heads
    if not mask and _has_flash(shapes, libraries):
        return (OUTPUTS, *_flash_buffers(shapes, libraries), *moved)
    is_bool = bool(mask) and kernel.input(3).dtype == "bool"  # a mask of truth values is made one to add
    converted = (kernel.input(3).elements * shapes.itemsize,) if is_bool else ()
    is_aligned = not mask or not kernel.shape(3)[-1] % _MASK_COLUMNS
    is_repeated = not is_grouped or shapes.itemsize < FLOAT_BYTES
    if is_aligned and is_repeated and _has_efficient(shapes, libraries, is_long=True):
        repeated = shapes.batch * shapes.keys * shapes.heads * shapes.itemsize
        copies = (repeated * shapes.head, repeated * shapes.value_head) if is_grouped else ()
        return (OUTPUTS, *moved[:1], *copies, *moved[1:], *converted, *shapes.sums_bytes)
    copied = shapes.batch * shapes.keys * shapes.key_heads * shapes.itemsize
    sides = (shapes.query_bytes, copied * shapes.head, copied * shapes.value_head, shapes.result_bytes)
    return (OUTPUTS, *converted, *(() if is_transposed else sides), 2 * shapes.scores_bytes(FLOAT_BYTES))


def _onnx_shapes(kernel: Context) -> Shapes:
    """Of inputs that are (batch, heads, length, head), or (batch, length, values)."""
    given, keys, values = map(kernel.shape, range(3))
    dtype = kernel.input().dtype
    if len(given) == 4:
        return Shapes(dtype, given[0], given[2], keys[2], given[1], keys[1], given[3], values[3])
    heads, key_heads = kernel.number("q_num_heads"), kernel.number("kv_num_heads")
    return Shapes(dtype, given[0], given[1], keys[1], heads, key_heads, given[2] // heads, values[2] // key_heads)


@RULES.of("com.microsoft.GroupQueryAttention")
def group_query(kernel: Context, libraries: Libraries) -> Steps | None:
    """``bert/group_query_attention.cc``: three lengths of every sequence, and queries, keys and values unpacked."""
    is_quantized = any(kernel.text(f"{name}_quant_type", "NONE") != "NONE" for name in "kv")
    if is_quantized or any(kernel.node.inputs[10:]) or not kernel.has_output(1):
        return None
    shapes, past = _group_query_shapes(kernel), kernel.name(3)
    if past and past not in kernel.graph.inputs and shapes.queries == 1 and libraries.capability >= _AMPERE:
        return None  # keys may be appended in place, for which there is a kernel with room of its own
    lengths = 3 * shapes.batch * INT_BYTES
    is_unpacked = not kernel.name(1) or bool(kernel.number("do_rotary"))
    queries = (shapes.query_bytes,) if is_unpacked else ()
    is_plain = kernel.node.attributes.get("softcap", 0.0) == 0.0 and not kernel.number("smooth_softmax")
    if is_plain and kernel.number("local_window_size", -1) == -1 and _has_cudnn(shapes, libraries):
        return None if shapes.queries == 1 else (OUTPUTS, lengths, *queries, _CUDNN_BYTES)
    if _has_flash(shapes, libraries):
        return (OUTPUTS, *_flash_buffers(shapes, libraries), lengths, *queries)
    if not _has_efficient(shapes, libraries, is_long=True):
        return None
    repeated = shapes.batch * shapes.heads * shapes.keys * shapes.head * shapes.itemsize
    copies = (repeated, repeated) if shapes.heads != shapes.key_heads else ()
    parts = shapes.heads + shapes.key_heads * (1 if kernel.name(1) else 2)
    unpacked = shapes.query_bytes * parts // shapes.heads if is_unpacked else 0
    return (OUTPUTS, lengths, *copies, *shapes.sums_bytes, *filter(None, (unpacked,)))


def _group_query_shapes(kernel: Context) -> Shapes:
    heads, key_heads = kernel.number("num_heads"), kernel.number("kv_num_heads")
    batch, length, columns = kernel.shape()
    head = columns // (heads if kernel.name(1) else heads + 2 * key_heads)
    kept = kernel.output_shape(1)[2]
    return Shapes(kernel.input().dtype, batch, length, kept, heads, key_heads, head, head)
