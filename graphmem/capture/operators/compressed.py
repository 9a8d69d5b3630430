"""Sparse matrices in CSR and CSC layout: CUDA's operators on their compressed indices, plain indices and values.

What 2.13 does: ``aten/src/ATen/native/TensorConversions.cpp``, ``TensorShape.cpp``, ``sparse/SparseCsrTensorMath.cpp``
and ``sparse/cuda/SparseBlas.cpp``, ``SparseBlasImpl.cpp``. Order and sizes were recorded on the CUDA build.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphmem.capture.operators import Decomposition, Perhaps
from graphmem.capture.torch_internals import FakeTensor, OpOverload, in_kernel_invocation_manager
from graphmem.capture.values.assumed_values import Selection
from graphmem.capture.values.tensors import COMPRESSED, sparse_parts

_aten = torch.ops.aten


def _made(shape: list[int], layout: torch.layout, compressed: Tensor, plain: Tensor, values: Tensor) -> Tensor:
    """A matrix of fake parts, made below the fake mode, which has no operator for it."""
    mode, device = values.fake_mode, values.fake_device
    with in_kernel_invocation_manager(mode):
        bare = _aten._sparse_compressed_tensor_unsafe.default(
            compressed, plain, values, shape, dtype=values.dtype, layout=layout, device="meta"
        )
    made: Tensor = FakeTensor(mode, bare, device)
    return made


def of_parts(
    _: Selection, compressed: Tensor, plain: Tensor, values: Tensor, shape: list[int] | None = None, **options: Any
) -> Perhaps:
    """``sparse_compressed_tensor``, which keeps the parts that it is given; some may be real."""
    parts = (compressed, plain, values)
    mode = next((part.fake_mode for part in parts if isinstance(part, FakeTensor)), None)
    if mode is None or options["layout"] not in COMPRESSED:
        return NotImplemented
    if shape is None:
        shape = [compressed.shape[-1] - 1, int(plain.max()) + 1]
        shape = shape if options["layout"] is torch.sparse_csr else shape[::-1]
    fakes = (part if isinstance(part, FakeTensor) else mode.from_tensor(part) for part in parts)
    return _made(list(shape), options["layout"], *fakes)


def _flip(layout: torch.layout) -> torch.layout:
    return torch.sparse_csc if layout is torch.sparse_csr else torch.sparse_csr


def _detach(_: Selection, self: Tensor) -> Tensor:
    return _made(list(self.shape), self.layout, *sparse_parts(self))


def _clone(_: Selection, self: Tensor, **__: object) -> Tensor:
    """The values are copied first, C++ arguments being evaluated from the last."""
    copies = [part.clone() for part in reversed(sparse_parts(self))]
    return _made(list(self.shape), self.layout, *reversed(copies))


def _to_copy(_: Selection, self: Tensor, **options: object) -> Tensor:
    """Values, compressed indices, plain indices; a new dtype is that of the values alone."""
    dtype, device = options.get("dtype"), options.get("device")
    compressed, plain, values = sparse_parts(self)
    values = _aten._to_copy.default(values, dtype=dtype, device=device)
    compressed = _aten._to_copy.default(compressed, device=device)
    plain = _aten._to_copy.default(plain, device=device)
    return _made(list(self.shape), self.layout, compressed, plain, values)


def _transpose(_: Selection, self: Tensor, dim0: int = 0, dim1: int = 1) -> Perhaps:
    """The same parts are the transposed matrix in the other layout."""
    if self.dim() != 2:
        return NotImplemented
    if dim0 % 2 == dim1 % 2:
        return self
    return _made(list(reversed(self.shape)), _flip(self.layout), *sparse_parts(self))


def to_csr(selection: Selection, self: Tensor, dense_dim: int | None = None) -> Perhaps:
    """``_to_sparse_csr`` of each layout. A COO matrix gives its columns and values away, and a CSR one all it has."""
    if self.dim() != 2 or dense_dim:
        return NotImplemented
    if self.layout is torch.sparse_coo:
        coalesced = self.coalesce()
        rows, columns = coalesced._indices().unbind(0)
        return _made(list(self.shape), torch.sparse_csr, _counted(rows, self.shape[0]), columns, coalesced._values())
    if self.layout is torch.sparse_csc:
        return _flipped(self)
    if self.layout is torch.sparse_csr:
        return _made(list(self.shape), torch.sparse_csr, *sparse_parts(self))
    return _of_dense(selection, self)


def _counted(rows: Tensor, size: int) -> Tensor:
    """``_convert_indices_from_coo_to_csr``: where each row begins."""
    return rows.new_empty(size + 1)


def _of_dense(selection: Selection, self: Tensor) -> Perhaps:
    """``dense_to_sparse_compressed``: what is not zero is looked for twice, for the indices and for the values."""
    mask = self != 0
    rows, columns = mask.nonzero().unbind(1)
    compressed = _counted(rows, self.shape[0])
    values = self.flatten().index_select(0, mask.flatten().nonzero().flatten())
    return of_parts(selection, compressed, columns, values, list(self.shape), layout=torch.sparse_csr)


def _flipped(self: Tensor) -> Tensor:
    """``sparse_compressed_to_flipped``: the indices as those of a COO matrix, sorted the other way. Batches are put
    into one matrix and taken apart again, even where there is one."""
    compressed, plain, values = sparse_parts(self)
    size = self.shape[0] if self.layout is torch.sparse_csc else self.shape[1]
    count = plain.new_empty(1)
    offset = count.cumsum(-1)
    del count
    shifted = compressed[:-1] + offset
    joined = torch.empty_like(compressed)
    del shifted
    pairs = plain.new_empty((2, plain.shape[0]))
    batch = pairs[1].div(max(size, 1), rounding_mode="trunc")
    batch * size
    del batch
    hashed = torch.empty_like(pairs[0])
    order = hashed.sort()[1]
    ordered = pairs.index_select(1, order)
    chosen = values.index_select(0, order)
    counted = _counted(ordered[0], size)
    parted = torch.empty_like(counted)
    counted[1:] - counted[:1]
    del counted, order, hashed, pairs, joined, offset
    return _made(list(self.shape), _flip(self.layout), parted, ordered[1], chosen)


def _mm(selection: Selection, self: Tensor, mat2: Tensor) -> Perhaps:
    """Added to zeros, of which nothing is left."""
    if not _multiplies(self, mat2):
        return NotImplemented
    rows = _flipped(self) if self.layout is torch.sparse_csc else self
    zeros = mat2.new_zeros((self.shape[0], mat2.shape[1]))
    out = _addmm(selection, zeros, rows, mat2)
    del zeros
    return out


def _addmm(_: Selection, self: Tensor, mat1: Tensor, mat2: Tensor, **__: object) -> Perhaps:
    """``addmm_out_sparse_compressed_cuda``: cuSPARSE reads dense matrices that lie by rows or by columns."""
    if not _multiplies(mat1, mat2):
        return NotImplemented
    out = mat2.new_empty((mat1.shape[0], mat2.shape[1]))
    rows = _flipped(mat1) if mat1.layout is torch.sparse_csc else mat1
    if rows._nnz() and not (_lies_by_rows(mat2) or _lies_by_rows(mat2.t())):
        mat2.clone(memory_format=torch.contiguous_format)
    return out


def _lies_by_rows(matrix: Tensor) -> bool:
    """``is_blas_compatible_row_major_order`` (LinearAlgebraUtils.h): a slice of columns is read where it lies."""
    between, within = matrix.stride()
    return bool(within == 1 and between >= max(1, matrix.shape[1]))


def _mv(_: Selection, self: Tensor, vec: Tensor) -> Perhaps:
    if not _multiplies(self, vec):
        return NotImplemented
    out = vec.new_empty(self.shape[0])
    if self.layout is torch.sparse_csc:
        self = _flipped(self)  # held while it is multiplied
    if self._nnz() and not vec.is_contiguous():
        vec.clone(memory_format=torch.contiguous_format)
    return out


def _multiplies(sparse: Tensor, dense: Tensor) -> bool:
    return sparse.layout in COMPRESSED and sparse.dim() == 2 and dense.layout is torch.strided


#: Operators on compressed matrices -> what they are made of.
DECOMPOSITIONS: dict[OpOverload, Decomposition] = {
    _aten.clone.default: _clone,
    _aten.detach.default: _detach,
    _aten._to_copy.default: _to_copy,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.mm.default: _mm,
    _aten.mv.default: _mv,
    _aten.addmm.default: _addmm,
    _aten._sparse_addmm.default: _addmm,
}

#: What puts a matrix together.
MAKING = frozenset(
    {_aten.sparse_compressed_tensor.comp_plain_value_size, _aten.sparse_compressed_tensor.comp_plain_value}
)

#: What reads a compressed matrix's parts: nothing is allocated.
PARTS = frozenset(
    getattr(_aten, name).default for name in ("crow_indices", "col_indices", "ccol_indices", "row_indices", "values")
)
