"""Sparse tensors in COO layout, as gradients of embeddings are: CUDA's operators on their indices and values.

A fake sparse tensor holds fake indices and values, but few operators work on it. Those that optimizers call are spelled
out here by their effect on indices and values, with the temporaries of 2.13's kernels:
``aten/src/ATen/native/sparse/SparseTensor.cpp``, ``SparseTensorMath.cpp`` and ``sparse/cuda/SparseCUDATensor.cu``.
Order and sizes were recorded on the CUDA build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.cub import counted_positions_bytes, sorted_pairs_bytes
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.operators import Decomposition, Perhaps, compressed
from graphmem.capture.torch_internals import OpOverload, current_autograd_node
from graphmem.capture.values.assumed_values import Selection
from graphmem.capture.values.tensors import COMPRESSED, tensors_in
from graphmem.diagnostics import Code

_aten = torch.ops.aten
#: Marks a tensor whose indices are distinct and not in order.
_DISTINCT = "_graphmem_distinct"


def _made(like: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    return _made_of((like.sparse_dim(), like.dense_dim()), list(like.shape), indices, values, coalesced)


def _made_of(dims: tuple[int, int], shape: list[int], indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    made: Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        *dims,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=coalesced,
    )
    return made


def _clone(_: Selection, self: Tensor, **__: object) -> Tensor:
    """``clone_sparse``: the values are copied before the indices, C++ arguments being evaluated from the last.

    A gradient with contiguous parts becomes the parameter's without a copy (``accumulateGrad``,
    torch/csrc/autograd/functions/accumulate_grad.h), which a capture's references to it hide.
    """
    if type(current_autograd_node()).__name__ == "AccumulateGrad" and not torch.is_grad_enabled():
        indices, values = self._indices(), self._values()
        if indices.is_contiguous() and values.is_contiguous():
            return _made(self, indices, values, self.is_coalesced())
    return _copied(self)


def _copied(self: Tensor) -> Tensor:
    values = self._values().clone(memory_format=torch.contiguous_format)
    return _made(self, self._indices().clone(memory_format=torch.contiguous_format), values, self.is_coalesced())


def _detach(_: Selection, self: Tensor) -> Tensor:
    return _made(self, self._indices(), self._values(), self.is_coalesced())


def distinct(indices: Tensor) -> Tensor:
    """The distinct columns of real indices in their order, as coalescing leaves them."""
    return torch.unique(indices, dim=1)


def _rows(selection: Selection, self: Tensor) -> int:
    """The number of distinct indices, which is data. Where they are not known, and without a share, all of them, as far
    as the tensor has rows."""
    count: int = self._nnz()
    if selection.exact is not None:
        return selection.exact
    if hasattr(self, _DISTINCT):
        return count
    if selection.share is not None:
        return min(count, selection.rows(count) or 0)
    selection.distinct += 1
    positions = [int(size) for size in self.shape[: self.sparse_dim()]]
    return min(count, math.prod(positions))


def coalesce(selection: Selection, self: Tensor, *, card: Card) -> Tensor:
    """``_coalesce_sparse_cuda``: sorts flattened indices with their origins, and sums the values of equal ones."""
    if self._nnz() < 2:
        return _clone(selection, self)
    values = self._values().contiguous()
    count, sparse_dim = self._nnz(), self.sparse_dim()
    flattened = values.new_empty((1, count), dtype=torch.int64)
    origins = torch.empty_like(flattened)
    offsets = torch.empty_like(flattened)
    for bytes_ in (sorted_pairs_bytes(count, card), counted_positions_bytes(count, card)):
        values.new_empty(bytes_, dtype=torch.uint8)
    rows = _rows(selection, self)
    summed = values.new_empty((rows, *values.shape[1:]))
    indices = flattened[:, :rows]
    if sparse_dim > 1:
        indices = torch.empty((sparse_dim, rows), dtype=torch.int64, device=values.device)
    del origins, offsets
    return _made(self, indices, summed, True)


def _add(_: Selection, self: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Both sparse: one list after the other. A dense tensor is copied, and the sparse one added to the copy."""
    if self.layout is not other.layout:
        dense = self if self.layout is torch.strided else other
        return torch.empty_like(dense)
    indices = torch.cat([self._indices(), other._indices()], 1)
    added = other._values() if alpha == 1 else other._values() * alpha
    return _made(self, indices, torch.cat([self._values(), added]), False)


def _add_(selection: Selection, self: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """A dense tensor takes the sparse one's values where they belong, without a buffer."""
    if self.layout is torch.strided:
        return self
    return _became(self, _add(selection, self, other, alpha=alpha))


def _mul(_: Selection, self: Tensor, other: Tensor | float) -> Perhaps:
    """By a number: new indices, then new values."""
    if not isinstance(self, Tensor) or self.layout is not torch.sparse_coo or not _is_number(other):
        return NotImplemented
    indices = self._indices().clone()
    return _made(self, indices, self._values() * other, self.is_coalesced())


def _neg(_: Selection, self: Tensor) -> Tensor:
    """``neg_sparse``: a copy, whose values are turned in place."""
    return _copied(self)


def _mul_(selection: Selection, self: Tensor, other: Tensor | float) -> Perhaps:
    product = _mul(selection, self, other)
    return product if product is NotImplemented else _became(self, product)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _became(tensor: Tensor, result: Tensor) -> Tensor:
    """The tensor gets the indices and values of ``result`` and drops its own."""
    indices = tensor._indices()
    tensor.data = result  # drops the values
    del indices
    return tensor


def _sparse_mask(selection: Selection, self: Tensor, mask: Tensor) -> Perhaps:
    """A dense tensor's rows, multiplied by a one that is expanded to the mask's shape."""
    if self.layout is not torch.strided:
        return NotImplemented
    if not mask._nnz():
        return _clone(selection, mask)
    one = mask._values().new_ones(1)
    rows = mask._indices()
    selected = self[tuple(rows)] if mask.sparse_dim() > 1 else self.index_select(0, rows[0])
    indices = mask._indices().clone()
    masked = _made(mask, indices, selected * one, mask.is_coalesced())
    del selected
    return masked


def _one_by_one(func: OpOverload) -> Callable[..., None]:
    """Lists with a sparse tensor take the slow path: one operator a tensor (``can_use_fast_route``, ForeachUtils.h)."""

    def run(_: Selection, tensors: Sequence[Tensor], others: Sequence[Tensor] | float, **options: float) -> None:
        each = others if isinstance(others, (list, tuple)) else [others] * len(tensors)
        for tensor, other in zip(tensors, each, strict=True):
            func(tensor, other, **options)

    return run


def _of_dense_as(
    selection: Selection,
    self: Tensor,
    *,
    layout: torch.layout | None = None,
    dense_dim: int | None = None,
    blocksize: Sequence[int] | None = None,
) -> Perhaps:
    """``_to_sparse`` of a tensor that is not sparse; the other layouts are operators of their own."""
    if layout is torch.sparse_csr:
        return compressed.to_csr(selection, self, dense_dim)
    if layout not in (None, torch.sparse_coo):
        return NotImplemented
    return _of_dense(selection, self, self.dim() - (dense_dim or 0))


def _of_dense(_: Selection, self: Tensor, sparse_dim: int) -> Perhaps:
    """``dense_to_sparse`` (TensorConversions.cpp): what is not zero, its distinct places where rows stay dense."""
    if self.layout is not torch.strided or not self.dim():
        return NotImplemented
    found = self.nonzero().t()
    if sparse_dim == self.dim():
        indices = found.clone()
    else:
        rows = math.prod(self.shape[:sparse_dim])  # of places that are not known all are taken
        indices = _aten.unique_dim.default(found[:sparse_dim], 1)[0][:, :rows].contiguous()
    values = self[tuple(indices.chunk(sparse_dim))].squeeze(0).clone()
    return _made_of((sparse_dim, self.dim() - sparse_dim), list(self.shape), indices, values, coalesced=True)


def _transpose(selection: Selection, self: Tensor, dim0: int = 0, dim1: int = 1) -> Perhaps:
    """``sparse_transpose_`` of a copy: two rows of its indices change places by way of a third."""
    dims = [dim % self.dim() for dim in (dim0, dim1)]
    if max(dims) >= self.sparse_dim():
        return NotImplemented
    values = self._values().clone(memory_format=torch.contiguous_format)
    indices = self._indices().clone(memory_format=torch.contiguous_format)
    torch.empty_like(indices[0])
    shape = list(self.shape)
    shape[dims[0]], shape[dims[1]] = shape[dims[1]], shape[dims[0]]
    coalesced = dims[0] == dims[1] and self.is_coalesced()
    out = _made_of((self.sparse_dim(), self.dense_dim()), shape, indices, values, coalesced)
    if self.is_coalesced():
        setattr(out, _DISTINCT, True)
    return out


def _to_copy(_: Selection, self: Tensor, **options: object) -> Perhaps:
    """To another device: indices, then values (``copy_sparse_to_sparse_``); a new dtype is that of the values alone."""
    dtype, device = options.get("dtype"), options.get("device")
    moved = device is not None and torch.device(device).type != self.device.type
    indices = _aten._to_copy.default(self._indices(), device=device if moved else None)
    values = _aten._to_copy.default(self._values(), device=device if moved else None, dtype=dtype)
    return _made(self, indices, values, self.is_coalesced())


def _mm(selection: Selection, self: Tensor, mat2: Tensor) -> Perhaps:
    """``_sparse_mm``: added to zeros, of which nothing is left."""
    if self.layout is not torch.sparse_coo or mat2.layout is not torch.strided:
        return NotImplemented
    zeros = mat2.new_zeros((self.shape[0], mat2.shape[1]))
    return _addmm(selection, zeros, self, mat2)


def _mv(selection: Selection, self: Tensor, vec: Tensor) -> Perhaps:
    product = _mm(selection, self, vec.unsqueeze(-1))
    return product.squeeze(-1) if isinstance(product, Tensor) else product


def _addmm(selection: Selection, self: Tensor, mat1: Tensor, mat2: Tensor, **_: object) -> Perhaps:
    """``s_addmm_out_sparse_dense_cuda`` (``sparse/cuda/SparseCUDATensorMath.cu``, ``SparseCUDABlas.cpp``): cuSPARSE
    multiplies compressed rows of 32-bit indices into a result that lies by columns."""
    if mat1.layout is not torch.sparse_coo or mat2.layout is not torch.strided:
        return NotImplemented
    out = mat2.new_empty((mat1.shape[0], mat2.shape[1]))
    sparse = mat1 if mat1.is_coalesced() else _aten._coalesce.default(mat1)
    if not sparse._nnz():
        out.new_empty(())  # the factor of what is added to
        return out
    compressed = out.new_empty(mat1.shape[0] + 1, dtype=torch.int32)
    out.new_empty(sparse._nnz(), dtype=torch.int32)  # the rows' numbers, of which the compressed ones are made
    columns = out.new_empty(sparse._nnz(), dtype=torch.int32)
    by_columns = torch.empty_like(out, memory_format=torch.contiguous_format)
    by_rows = mat2 if mat2.stride() in ((1, mat2.shape[0]), (mat2.shape[1], 1)) else mat2.clone()
    del by_rows, by_columns
    del columns
    del compressed
    return out


_COO: dict[OpOverload, Decomposition] = {
    _aten.clone.default: _clone,
    _aten.detach.default: _detach,
    _aten._coalesce.default: coalesce,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_,
    _aten.mul.Tensor: _mul,
    _aten.mul_.Tensor: _mul_,
    _aten.neg.default: _neg,
    _aten.sparse_mask.default: _sparse_mask,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten._to_copy.default: _to_copy,
    _aten.mm.default: _mm,
    _aten.mv.default: _mv,
    _aten.addmm.default: _addmm,
    _aten._sparse_addmm.default: _addmm,
    _aten._foreach_mul_.Scalar: _one_by_one(_aten.mul_.Tensor),
    _aten._foreach_add_.List: _one_by_one(_aten.add_.Tensor),
}


def _by_layout(func: OpOverload) -> Decomposition:
    coo, rows = _COO.get(func), compressed.DECOMPOSITIONS.get(func)

    def run(selection: Selection, *args: object, **kwargs: object) -> object:
        is_compressed = any(tensor.layout in COMPRESSED for tensor in tensors_in(args))
        chosen = rows if is_compressed else coo
        return NotImplemented if chosen is None else chosen(selection, *args, **kwargs)

    return run


#: Operators on sparse tensors -> what they are made of.
DECOMPOSITIONS: dict[OpOverload, Decomposition] = {
    func: _by_layout(func) for func in (*_COO, *compressed.DECOMPOSITIONS)
}
DECOMPOSITIONS |= dict.fromkeys(compressed.MAKING, compressed.of_parts)

#: Those that make a sparse tensor of one that is not, as large as what is not zero in it.
OF_DENSE: dict[OpOverload, Decomposition] = {
    _aten._to_sparse.default: _of_dense_as,
    _aten._to_sparse.sparse_dim: _of_dense,
    _aten._to_sparse_csr.default: compressed.to_csr,
}

#: Those that cuSPARSE multiplies, and the remark about them: PyTorch gives the library a buffer of the size it asks for
#: (``cusparseSpMM_bufferSize``), which no source documents.
PRODUCTS = frozenset({_aten.mm.default, _aten.mv.default, _aten.addmm.default, _aten._sparse_addmm.default})
CUSPARSE = Code.NOT_MODELLED.about(operator="products with sparse matrices", memory="cuSPARSE's buffer")

#: What reads a sparse tensor's parts, or puts parts together: nothing is allocated.
PARTS = frozenset(
    getattr(_aten, name).default
    for name in (
        "_indices", "_values", "_nnz", "dense_dim", "sparse_dim", "is_coalesced", "_coalesced_",
        "_sparse_coo_tensor_with_dims_and_tensors",
    )
) | compressed.PARTS  # fmt: skip
