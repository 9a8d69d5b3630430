"""Nested tensors of ``nn.TransformerEncoder``: in evaluation it packs padded sequences and computes on their tokens
alone.

Its layers then are one operator each, and their use of memory on a card is spelled out here, tensor by tensor:
``ATen/native/nested/NestedTensorMath.cpp``, ``nested/cuda/NestedTensorTransformerFunctions.cpp``,
``transformers/transformer.cpp`` and ``transformers/cuda/attention.cu`` of PyTorch 2.13. Order and sizes were recorded
on the CUDA build. Nested tensors that a program makes itself are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.transformer_layers import encoder_layer
from graphmem.capture.torch_internals import OpOverload, disabled_torch_function
from graphmem.capture.values.assumed_values import Selection
from graphmem.capture.values.tensors import tensors_in
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError
from graphmem.torch_names import private

_aten = torch.ops.aten
#: The remark about lengths that nobody knows.
UNPADDED = Code.NOTHING_PADDED.about()
#: The types that CUDA's kernels pack, and those that they pad; others go through masks, and piece by piece.
_PACKED_BY_KERNEL = (torch.float32, torch.float16)
_PADDED_BY_KERNEL = (torch.float32, torch.float16, torch.float64)


_wrapper: Any = private("torch.Tensor._make_wrapper_subclass", "nested tensors of nn.TransformerEncoder cannot be made")


class PackedSequences(torch.Tensor):  # type: ignore[misc]
    """A nested tensor: sequences of ``lengths`` one after the other in ``buffer`` (sum of lengths, features)."""

    # A function of its own would make the modules leave their fast path.
    __torch_function__ = disabled_torch_function
    is_nested = True
    buffer: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def __new__(cls, buffer: Tensor, lengths: Sequence[int]) -> PackedSequences:
        shape = (len(lengths), max(lengths), buffer.shape[-1])
        made: PackedSequences = _wrapper(cls, shape, dtype=buffer.dtype, device="meta")
        made.buffer, made.lengths = buffer, tuple(lengths)
        return made

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, *_: object) -> NoReturn:
        raise CaptureError(
            f"{func} of a nested tensor is not followed; graphmem knows those that nn.TransformerEncoder makes of a "
            "padding mask. Pad the sequences, or build the encoder with enable_nested_tensor=False"
        )


@dataclass(frozen=True)
class NestedRun:
    """The argument of a decomposition: ``known``, the values of a tensor on the host or None, ``attends``, the backend
    of attention for query, key and value of three shapes and a type, and ``assume``, which notes an assumption."""

    known: Callable[[Tensor], Tensor | None]
    attends: Callable[[Sequence[int], torch.dtype], str]
    assume: Callable[[Diagnostic], None]
    selection: Selection


def has_nested(args: object) -> bool:
    """True if one of the arguments is a nested tensor."""
    return any(isinstance(tensor, PackedSequences) for tensor in tensors_in(args))


# --- in and out -------------------------------------------------------------------------------------------------------


def _lengths(run: NestedRun, mask: Tensor) -> tuple[list[int], bool]:
    """The length of every sequence by a mask that is True where it goes on, and whether it has no gaps.

    Of unknown values it is assumed that nothing is padded, or the share that the user names for sizes that are data.
    """
    values = run.known(mask)
    batch, longest = mask.shape
    if values is None:
        run.assume(UNPADDED)
        share = run.selection.rows(longest)
        return [longest if share is None else max(1, share)] * batch, True
    rows = [[bool(value) for value in row] for row in values.tolist()]
    lengths = [sum(row) for row in rows]
    return lengths, all(all(row[:length]) for row, length in zip(rows, lengths, strict=True))


def _counted(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lengths of sequences, their lengths without a gap, and a column of padding."""
    padding = mask.new_zeros((mask.shape[0], 1))
    joined = torch.cat((mask, padding), 1)
    first_gap = joined.to(torch.int32).argmin(1)
    del joined
    return mask.cumsum(1).select(1, mask.shape[1] - 1), first_gap, padding


def _left_aligned(run: NestedRun, t: Tensor, mask: Tensor) -> bool:
    """``NestedTensor_nested_tensor_from_mask_left_aligned``."""
    del t
    sizes, first_gap, padding = _counted(mask)
    same = sizes.eq(first_gap)
    every = same.all()
    del every, same, first_gap, padding, sizes
    return _lengths(run, mask)[1]


def _from_mask(run: NestedRun, t: Tensor, mask: Tensor, mask_check: bool = True) -> PackedSequences:
    """``NestedTensor_nested_tensor_from_mask``."""
    lengths, aligned = _lengths(run, mask)
    sizes, first_gap, padding = _counted(mask)
    if mask_check:
        same = sizes.eq(first_gap)
        every = same.all()
        del every, same
        if not aligned:
            raise RuntimeError("Mask must be left-aligned without gaps")
    column = sizes.reshape((-1, 1))
    features = torch.full_like(column, t.shape[-1])
    pairs = torch.cat((column, features), 1)
    pairs.cpu()
    del pairs, column, sizes
    packed = PackedSequences(_packed(run, t, lengths), lengths)
    del features, first_gap, padding
    return packed


def _packed(run: NestedRun, padded: Tensor, lengths: Sequence[int], heads_apart: bool = False) -> Tensor:
    """``nested_from_padded_cuda``; ``heads_apart``: of (batch, heads, length, head) whose heads are joined on the way.
    The kernel reads sizes and offsets from the device. Other types are selected by a mask (``_generic``)."""
    features = padded.shape[1] * padded.shape[3] if heads_apart else padded.shape[2]
    if padded.dtype not in _PACKED_BY_KERNEL:
        return _packed_by_mask(run, padded, lengths, features, heads_apart)
    buffer = padded.new_empty((sum(lengths), features))
    count = 2 * len(lengths) + padded.dim() + len(lengths) + 1
    metadata = padded.new_empty(count, dtype=torch.int32)
    copied = padded.new_empty(count, dtype=torch.int64)
    del copied, metadata
    return buffer


def _packed_by_mask(run: NestedRun, padded: Tensor, lengths: Sequence[int], features: int, heads_apart: bool) -> Tensor:
    """``nested_from_padded_generic``: a mask of every sequence, padded as they are, and the selected elements."""
    if heads_apart:
        padded = padded.permute(0, 2, 1, 3).contiguous().view(padded.shape[0], -1, features)
    rows, masks = padded.shape[1], []
    for length in lengths:
        mask = padded.new_full((length, features), True, dtype=torch.bool)
        masks.append(_to_rows(mask, rows))
        del mask
    final = torch.stack(masks)
    with run.selection.exactly(sum(lengths) * features):
        buffer = padded.masked_select(final)
    del final, masks
    return buffer.view(-1, features)


def _padded(run: NestedRun, self: PackedSequences, padding: float, output_size: Sequence[int] | None = None) -> Tensor:
    """``NestedTensor_to_padded_tensor_cuda``, or ``_generic`` for other types."""
    del run
    buffer, lengths = self.buffer, self.lengths
    batch, features = len(lengths), buffer.shape[-1]
    longest = max(lengths)
    rows = output_size[1] if output_size is not None else longest
    if buffer.dtype in _PADDED_BY_KERNEL:
        out = buffer.new_empty((batch, rows, features))
        metadata = buffer.new_empty((batch + 1) + 2 * batch, dtype=torch.int32)
        del metadata
        return out
    sizes = [length * features for length in lengths]
    flat = zip(buffer.view(-1).split_with_sizes(sizes), lengths, strict=True)
    parts = [_to_rows(part.view(length, features), longest, padding) for part, length in flat]
    out = torch.stack(parts)
    if output_size is not None:
        out = _to_rows(out, rows, padding)
    parts.reverse()
    while parts:
        parts.pop()
    return out


def _to_rows(tensor: Tensor, rows: int, value: float = 0) -> Tensor:
    """``pad_tensor_to_shape``: a copy also of tensors that are long enough."""
    padded: Tensor = _aten.constant_pad_nd.default(tensor, (0, 0, 0, rows - tensor.shape[-2]), value)
    return padded


# --- layers -----------------------------------------------------------------------------------------------------------


def _self_attention(
    run: NestedRun, x: PackedSequences, heads: int, qkv: tuple[Tensor, Tensor], projection: tuple[Tensor, Tensor]
) -> Tensor:
    """``native_multi_head_attention_cuda`` of three times the same nested tensor, without a mask or weights."""
    lengths, width = x.lengths, x.buffer.shape[-1]
    head = width // heads
    shape = (len(lengths), heads, max(lengths), head)
    backend = "math" if min(lengths) < 2 else run.attends(shape, x.dtype)
    if backend != "flash" and backend != "efficient":
        return _by_products(run, x, heads, qkv[0], projection)
    packed = F.linear(x.buffer, *qkv)
    context = _attended(x, heads, backend)
    out = F.linear(context, *projection)
    del context, packed
    return out


def _attended(x: PackedSequences, heads: int, backend: str) -> Tensor:
    """``_scaled_dot_product_flash_attention_nestedtensor_cuda`` and ``efficient``: offsets of queries and of keys."""
    buffer, batch = x.buffer, len(x.lengths)
    offsets = [buffer.new_empty(batch + 1, dtype=torch.int32) for _ in range(2)]
    context = torch.empty_like(buffer)
    if backend == "flash":
        sums = buffer.new_empty((heads, buffer.shape[0]), dtype=torch.float32)
        seed, unused = buffer.new_empty(2, dtype=torch.int64), buffer.new_empty((), dtype=torch.int64)
        del sums
        offsets.clear()
        del seed, unused
    return context


def _by_products(
    run: NestedRun, x: PackedSequences, heads: int, weight: Tensor, projection: tuple[Tensor, Tensor]
) -> Tensor:
    """Padded heads, two batched products, and a softmax that knows the lengths. Rows are made a multiple of 8 long for
    the tensor cores (``transform_bias_rescale_qkv_cuda``)."""
    buffer, lengths = x.buffer, x.lengths
    batch, width, rows = len(lengths), buffer.shape[-1], -(-max(lengths) // 8) * 8
    head = width // heads
    packed = torch.matmul(buffer, weight.t())
    split = buffer.new_empty((3, batch, heads, rows, head))
    metadata = buffer.new_empty(2 * batch + 1, dtype=torch.int32)
    del metadata, packed
    scores = torch.bmm(split[0].view(-1, rows, head), split[1].view(-1, rows, head).transpose(1, 2))
    mask = buffer.new_empty((batch, rows), dtype=torch.bool)
    softmax = torch.empty_like(scores)
    del mask, scores, softmax
    context = _packed(run, split[0], lengths, heads_apart=True)  # the attended values overwrote the query
    bias, out = projection[1], projection[0]
    result = torch.addmm(bias, context, out.t())
    del context, split
    return result


@named("aten._transformer_encoder_layer_fwd.default")
def _encoder_layer(run: NestedRun, call: Arguments) -> PackedSequences:
    """Of a nested tensor, which has no mask; nor does the encoder pack for layers that normalize first."""
    src: PackedSequences = call.src
    if not src.buffer.numel():
        return src

    def attend(_: Tensor) -> Tensor:
        qkv, projection = (call.qkv_weight, call.qkv_bias), (call.proj_weight, call.proj_bias)
        return _self_attention(run, src, call.num_heads, qkv, projection)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normalized: Tensor = _aten.native_layer_norm.default(x, (call.embed_dim,), weight, bias, call.eps)[0]
        return normalized

    return PackedSequences(encoder_layer(call, src.buffer, attend, norm), src.lengths)


#: Operators that make a nested tensor, or ask whether one can be made.
MAKING: dict[OpOverload, Decomposition] = {
    _aten._nested_tensor_from_mask_left_aligned.default: _left_aligned,
    _aten._nested_tensor_from_mask.default: _from_mask,
}
#: Operators of nested tensors.
DECOMPOSITIONS: dict[OpOverload, Decomposition] = {
    _aten.to_padded_tensor.default: _padded,
    _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
