"""Decompositions of CUDA kernels: operators whose kernel calls other operators, spelled out so that each is recorded.

A function here runs in place of an operator's fake kernel, below autograd. It is handed the recorder's
:class:`Selection` for sizes that depend on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition, Perhaps
from graphmem.capture.operators.deterministic import DETERMINISTIC
from graphmem.capture.operators.linear_algebra import LINEAR_ALGEBRA
from graphmem.capture.operators.sparse import OF_DENSE
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.assumed_values import Selection
from graphmem.torch_names import private

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


# --- bilinear forms (_trilinear and sumproduct_pair of ATen/native/Linear.cpp, 2.13) ----------------------------------


@named("aten._trilinear.default")
def _trilinear(_: Selection, call: Arguments) -> Tensor:
    """The sum over ``sumdim`` of a product of three, one position of ``unroll_dim`` after the other."""
    expanded, unroll = (call.expand1, call.expand2, call.expand3), call.unroll_dim
    operands = [call.i1, call.i2, call.i3]
    dims = call.i1.dim() + len(call.expand1)
    for place, missing in enumerate(expanded):
        for dim in sorted(missing):
            operands[place] = operands[place].unsqueeze(dim)
    sizes = torch.broadcast_shapes(*(tensor.shape for tensor in operands))
    shape = [1 if dim in call.sumdim else sizes[dim] for dim in range(dims)]
    output = torch.zeros(shape, dtype=call.i1.dtype, device=call.i1.device)
    first = [dim for dim in call.sumdim if dim in call.expand3]
    second = [dim for dim in call.sumdim if dim not in call.expand3]
    for k in range(sizes[unroll] if all(tensor.numel() for tensor in operands) else 0):
        places = [0 if unroll in missing else k for missing in expanded]
        parts = [tensor.narrow(unroll, place, 1) for tensor, place in zip(operands, places, strict=True)]
        product = _sum_of_products(parts[0], parts[1], first)
        product = _sum_of_products(product, parts[2], second)
        (output if unroll in call.sumdim else output.narrow(unroll, k, 1)).add_(product)
        del product
    for dim in sorted(call.sumdim, reverse=True):
        output.squeeze_(dim)
    return output


def _sum_of_products(left: Tensor, right: Tensor, sum_dims: Sequence[int]) -> Tensor:
    """One batched matrix product; summed dimensions are kept with size 1."""
    if not sum_dims:
        return left * right
    for dim in sorted(sum_dims):
        if (left.shape[dim] != 1) != (right.shape[dim] != 1):
            if left.shape[dim] != 1:
                left = left.sum(dim, keepdim=True)
            else:
                right = right.sum(dim, keepdim=True)
    summed = [dim for dim in range(left.dim()) if dim in sum_dims]
    kept = [dim for dim in range(left.dim()) if dim not in sum_dims]
    both = [dim for dim in kept if left.shape[dim] != 1 and right.shape[dim] != 1]
    only_left = [dim for dim in kept if left.shape[dim] != 1 and right.shape[dim] == 1]
    only_right = [dim for dim in kept if left.shape[dim] == 1]

    def size(tensor: Tensor, dims: list[int]) -> int:
        return math.prod(tensor.shape[dim] for dim in dims)

    shape = [left.shape[dim] for dim in (*both, *only_left)]
    shape += [1 for _ in summed] + [right.shape[dim] for dim in only_right]
    order = [*both, *only_left, *summed, *only_right]
    flat_left = left.permute(order).reshape(size(left, both), size(left, only_left), size(left, summed))
    flat_right = right.permute([*both, *summed, *only_right, *only_left])
    flat_right = flat_right.reshape(size(right, both), size(right, summed), size(right, only_right))
    back = [order.index(dim) for dim in range(left.dim())]
    return torch.bmm(flat_left, flat_right).view(shape).permute(back)


# --- masks (expandTensors of ATen/native/IndexingUtils.h) -------------------------------------------------------------


_Indices = Sequence["Tensor | None"]


def _has_mask(indices: _Indices) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in indices)


def _positions(indices: _Indices) -> list[Tensor | None]:
    """Every mask becomes the positions that it selects, one tensor a dimension."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            expanded.extend(torch.nonzero(index).unbind(1))
        else:
            expanded.append(index)
    return expanded


def _index(_: Selection, self: Tensor, indices: _Indices) -> Perhaps:
    if not _has_mask(indices):
        return NotImplemented
    return _aten.index.Tensor(self, _positions(indices))


def _selected_rows(self: Tensor, indices: _Indices, values: Tensor) -> int | None:
    """The number of positions that the masks select, where the shape of ``values`` shows it. They are one dimension of
    the written values, the last of the indices' own; where indices are not neighbours, theirs come first."""
    taken: list[int] = []
    dim, broadcast = 0, 1
    for index in indices:
        is_mask = index is not None and index.dtype in _MASKS
        width = index.dim() if index is not None and is_mask else 1
        if index is not None:
            taken += range(dim, dim + width)
            broadcast = max(broadcast, 1 if is_mask else index.dim())
        dim += width
    are_neighbours = taken == list(range(taken[0], taken[0] + len(taken)))
    place = (taken[0] if are_neighbours else 0) + broadcast - 1
    place -= self.dim() - len(taken) + broadcast - values.dim()
    return values.shape[place] if place >= 0 and values.shape[place] != 1 else None


def _index_put(func: OpOverload) -> Callable[..., Any]:
    def index_put(
        selection: Selection,
        self: Tensor,
        indices: _Indices,
        values: Tensor,
        *rest: object,
        **kwargs: object,
    ) -> Perhaps:
        """One host number under one mask is a fill; other values may show how many are selected."""
        if not _has_mask(indices):
            return NotImplemented
        rows = _selected_rows(self, indices, values)
        fills = values.numel() == 1 and values.device.type == "cpu"
        if fills or (rows is None and selection.share is None):
            return NotImplemented
        in_place, written = func, self
        if func is _aten.index_put.default:  # ATen/native/TensorAdvancedIndexing.cpp: a copy, written in place
            in_place, written = _aten.index_put_.default, self.clone(memory_format=torch.preserve_format)
        with selection.exactly(rows):
            positions = _positions(indices)
        return in_place(written, positions, values, *rest, **kwargs)

    return index_put


def _masked_select(_: Selection, self: Tensor, mask: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    return _aten.index.Tensor(self.expand(shape), _positions([mask.expand(shape)]))


def _masked_scatter_backward(selection: Selection, grad: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """The mask is taken to select as many elements as the source has, for which programs use it."""
    wanted = math.prod(sizes)
    with selection.exactly(min(wanted, mask.numel()) if selection.share is None else None):
        selected = torch.masked_select(grad, mask)
    if selected.numel() < wanted:
        selected = torch.cat([selected, selected.new_zeros(wanted - selected.numel())])
    return selected.view(sizes)


# --- sparse gradients of bags (ATen/native/EmbeddingBag.cpp and Embedding.cpp, 2.13) ----------------------------------

_MEAN = 1


@named("aten._embedding_bag_backward.default")
def _embedding_bag_backward(_: Selection, call: Arguments) -> Perhaps:
    """``_embedding_bag_sparse_backward`` and ``embedding_sparse_backward``: a row for every index but the padding."""
    if not call.sparse:
        return NotImplemented
    rows = call.grad.index_select(0, call.offset2bag)
    if call.mode == _MEAN:
        counts = call.bag_size.to(rows.dtype)
        share = torch.reciprocal(counts)
        shares = share.unsqueeze(1).index_select(0, call.offset2bag)
        del share, counts
        rows.mul_(shares)
        del shares
    if call.per_sample_weights is not None:
        rows.mul_(call.per_sample_weights.unsqueeze(1))
    indices, values, shape = call.indices, rows, (call.num_weights, rows.shape[-1])
    if call.padding_idx != -1:  # all rows are held by the caller to the end
        kept = indices != call.padding_idx
        indices, values = indices[kept], rows[kept]
        del kept
    return _aten._sparse_coo_tensor_unsafe.default(indices.reshape(1, -1), values.reshape(-1, shape[1]), shape)


# --- quantisation-aware training (ATen/native/quantized/FakeQuantPer*Affine.cpp, cuda/FusedObsFakeQuant.cu, 2.13) -----


def _quantized(_: Selection, self: Tensor, *__: object) -> tuple[Tensor, Tensor]:
    """The tensor in steps, and where it was in range; scale, zero point and range change no size."""
    out = torch.empty_like(self)
    return out, torch.empty_like(self, dtype=torch.bool)


def _quantized_by_channel(_: Selection, self: Tensor, scale: Tensor, zero_point: Tensor, *__: object) -> Perhaps:
    """The same, after whole zero points were looked at for their range."""
    if not zero_point.is_floating_point():
        extremes = zero_point.min(), zero_point.max()
        del extremes
    return _quantized(_, self)


@named("aten._fused_moving_avg_obs_fq_helper.default")
def _observed(_: Selection, call: Arguments) -> Perhaps:
    """``fused_moving_avg_obs_fake_quant_cuda``: extremes of the whole, or of every channel; the first call gives the
    observer's buffers a number a channel."""
    seen = call.self.contiguous()
    if not call.per_row_fake_quant:
        extremes = torch.aminmax(seen)
    else:
        rows = call.self.transpose(0, call.ch_axis).flatten(1) if call.self.dim() != 2 else call.self
        buffers = (call.running_min, call.running_max, call.scale, call.zero_point)
        for buffer in buffers if not call.running_min.numel() else ():
            buffer.resize_(rows.shape[0])
        extremes = torch.aminmax(rows, dim=1)
        del rows
    del extremes
    if not call.per_row_fake_quant:
        return _quantized(_, call.self)
    if call.fake_quant_on.item():
        return _quantized_by_channel(_, call.self, call.scale, call.zero_point)
    mask = torch.ones_like(call.self, dtype=torch.bool)
    return call.self.clone(), mask


# --- normal numbers (normal_impl and normal_out_impl of ATen/native/DistributionTemplates.h, 2.13) --------------------


def _normal(_: Selection, mean: Tensor | float, std: Tensor | float = 1.0, **__: object) -> Tensor:
    """Means and deviations, of which one at least is a tensor, are put onto normal numbers; whether all deviations are
    positive is asked before and after the result is there."""
    shapes = [number.shape for number in (mean, std) if isinstance(number, Tensor)]
    given = mean if isinstance(mean, Tensor) else std
    assert isinstance(given, Tensor)
    _look_at_least(std)
    drawn = torch.empty(torch.broadcast_shapes(*shapes), dtype=given.dtype, device=given.device)
    if not isinstance(std, Tensor):
        like_it = torch.empty_like(drawn)
        drawn.normal_(0, std).add_(mean)
        del like_it
        return drawn
    _look_at_least(std)
    means = mean if isinstance(mean, Tensor) else torch.full((), mean, dtype=drawn.dtype, device=drawn.device)
    return drawn.normal_(0, 1).mul_(std).add_(means)


def _look_at_least(std: Tensor | float) -> None:
    if isinstance(std, Tensor) and std.numel():
        least = std.min()
        is_positive = least.ge(0)
        del is_positive, least


# --- products with powers of two (ATen/native/BinaryOps.cpp, 2.13) ----------------------------------------------------


def _ldexp(_: Selection, self: Tensor, other: Tensor) -> Tensor:
    powers = torch.pow(2.0, other)
    return self * powers


# --- the multivariate log-gamma function (ATen/native/UnaryOps.cpp, 2.13) ---------------------------------------------


def _mvlgamma(_: Selection, self: Tensor, p: int) -> Tensor:
    dtype = self.dtype if self.is_floating_point() else torch.get_default_dtype()
    steps = torch.arange(-p * 0.5 + 0.5, 0.5, 0.5, dtype=dtype, device=self.device)
    terms = steps + self.unsqueeze(-1)
    del steps
    result = terms.lgamma_().sum(-1)
    return result.add_(p * (p - 1) * math.log(math.pi) / 4)


# --- comparisons of whole tensors (ATen/native/TensorCompare.cpp, ATen/native/cuda/Equal.cpp, 2.13) -------------------


def _isclose(
    _: Selection, self: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    floating = self.is_floating_point() or self.is_complex()
    close = self.eq(other)
    if equal_nan and floating:
        close |= self.isnan().__iand__(other.isnan())
    if not rtol and not atol:
        return close
    left = self.to(torch.get_default_dtype()) if self.dtype == torch.bool else self
    right = other if floating else other.to(torch.get_default_dtype())
    scaled = right * rtol
    absolute = scaled.abs()
    allowed = absolute + atol
    del absolute, scaled
    difference = left - right
    error = difference.abs()
    del difference
    finite = error.isfinite()
    small = error <= allowed
    close |= finite.__iand__(small)
    return close


def _allclose(self: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> None:
    close = torch.isclose(self, other, rtol, atol, equal_nan)
    close.all()


_is_alias: Any = private("torch._C._is_alias_of", "torch.equal of a tensor and its view is computed", lambda *_: False)


def _equal(self: Tensor, other: Tensor) -> bool | None:
    """Sizes that differ and two names of one tensor are answered on the host."""
    if self.shape != other.shape:
        return False
    if not self.numel():
        return True
    if _is_alias(self, other) and self.stride() == other.stride() and self.storage_offset() == other.storage_offset():
        return True
    same = self.eq(other)
    same.all()
    return None


#: Comparison that answers with one Python value -> what it computes on the device before that is read, and the answer
#: where the host has it.
COMPARISONS: dict[OpOverload, Callable[..., bool | None]] = {
    _aten.allclose.default: _allclose,
    _aten.equal.default: _equal,
}

#: Operator -> its decomposition, which may answer ``NotImplemented`` for calls that are one kernel after all.
DECOMPOSITIONS: dict[OpOverload, Decomposition] = {
    _aten._trilinear.default: _trilinear,
    _aten.index.Tensor: _index,
    _aten.index_put.default: _index_put(_aten.index_put.default),
    _aten.index_put_.default: _index_put(_aten.index_put_.default),
    _aten._index_put_impl_.default: _index_put(_aten._index_put_impl_.default),
    _aten.masked_select.default: _masked_select,
    _aten._embedding_bag_backward.default: _embedding_bag_backward,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _quantized,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _quantized,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _quantized_by_channel,
    _aten._fused_moving_avg_obs_fq_helper.default: _observed,
    _aten.masked_scatter_backward.default: _masked_scatter_backward,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.ldexp.Tensor: _ldexp,
    _aten.mvlgamma.default: _mvlgamma,
    _aten.isclose.default: _isclose,
    **DETERMINISTIC,
    **LINEAR_ALGEBRA,
    **OF_DENSE,
}
