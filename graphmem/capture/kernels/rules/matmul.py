"""Matrix products: copies of operands that cuBLAS cannot read as they lie in memory.

cuBLAS takes a matrix whose rows or whose columns are contiguous, with any distance between them. Anything else (a slice
with steps, an expanded gradient) is copied first. Source: ``prepare_matrix_for_cublas``,
``prepare_batch_matrix_for_cublas``, ``addmm_out_cuda_impl`` and ``bmm_out_cuda_impl`` in ATen/native/cuda/Blas.cpp;
order observed on the CUDA build of 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import bytes_of, is_dense
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


def _readable(tensor: torch.Tensor) -> bool:
    """True if cuBLAS reads this matrix, or batch of matrices, where it is."""
    if tensor.dim() == 2 and is_dense(tensor):
        return True
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    return bool(by_columns or by_rows)


def _product(matrices: Sequence[torch.Tensor]) -> Script | None:
    """The result is row-major and cuBLAS column-major, so the operands are prepared in reverse order."""
    copied = [matrix for matrix in reversed(matrices) if not (_readable(matrix) or matrix.is_contiguous())]
    if not copied or any(matrix.numel() == 0 for matrix in matrices):
        return None
    script = Script().output(0)
    tokens = [script.take(bytes_of(matrix), "operand for cuBLAS") for matrix in copied]
    return script.give(*reversed(tokens))


def is_outer_product(matrices: Sequence[torch.Tensor], torch_version: tuple[int, int]) -> bool:
    """True if ``bmm`` of these does not call cuBLAS, but a kernel that reads any layout and takes no workspace."""
    first, second = matrices
    return (
        versions.OUTER_PRODUCTS_BY_TRITON.holds(torch_version)
        and first.shape[2] == 1
        and second.shape[1] == 1
        and first.numel() > 0
        and second.numel() > 0
        and not first.is_complex()
    )


@recorded_rule("aten.bmm.default", "aten.bmm.dtype")
def bmm_rule(call: Call) -> Script | None:
    matrices = [call.self, call.mat2]
    return None if is_outer_product(matrices, call.card.torch_version) else _product(matrices)


@recorded_rule(
    "aten.mm.default", "aten.mm.out", "aten.mm.dtype", "aten.mm.dtype_out", "aten.bmm.out", "aten.bmm.dtype_out"
)
def mm_rule(call: Call) -> Script | None:
    return _product([call.self, call.mat2])


@recorded_rule(
    "aten.addmm.default", "aten.addmm.out", "aten.addmm.dtype", "aten.addmm.dtype_out",
    "aten.baddbmm.default", "aten.baddbmm.out", "aten.baddbmm.dtype", "aten.baddbmm.dtype_out",
)  # fmt: skip
def addmm_rule(call: Call) -> Script | None:
    return _product(call.all_tensors[1:3])


@recorded_rule("aten.mv.default", "aten.addmv.default")
def mv_rule(call: Call) -> Script | None:
    """``addmv``: a matrix without a contiguous row or column is copied."""
    return _product([call.all_tensors[-2]])
