"""Matrix products: copies of operands that cuBLAS cannot read as they lie in memory.

cuBLAS takes a matrix whose rows or whose columns are contiguous, with any distance between them. Anything else (a slice
with steps, an expanded gradient) is copied first. It conjugates what it transposes, so a conjugate whose rows are
contiguous is copied too. Source: ``prepare_matrix_for_cublas``, ``prepare_batch_matrix_for_cublas``,
``resolve_conj_if_indicated``, ``addmm_out_cuda_impl`` and ``bmm_out_cuda_impl`` in ATen/native/cuda/Blas.cpp; order
observed on the CUDA build of 2.13.
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


def _is_copied(matrix: torch.Tensor) -> bool:
    if matrix.is_conj() and (matrix.is_contiguous() or matrix.stride(-1) == 1):
        return True
    return not (_readable(matrix) or matrix.is_contiguous())


def _product(matrices: Sequence[torch.Tensor]) -> Script | None:
    """The result is row-major and cuBLAS column-major, so the operands are prepared in reverse order."""
    copied = [matrix for matrix in reversed(matrices) if _is_copied(matrix)]
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


# --- products of groups of matrices (``torch.nn.functional.grouped_mm``), as layers of experts use them ---------------
# Sources: ``_grouped_mm_cuda`` and ``_grouped_mm_fallback`` in ATen/native/cuda/GroupedBlas.cpp and
# ATen/native/GroupedMMUtils.h, ``bf16bf16_grouped_gemm_impl_sm90_sm100`` in ATen/native/cuda/GroupMM.cu, and the
# workspaces of CUTLASS, of PyTorch 2.13; sizes observed on its CUDA build with 114, 132 and 148 multiprocessors.


#: Three pointers, three strides and three 32-bit sizes of every group (GroupMM.cu).
_GROUP_ARGUMENTS = 3 * 8 + 3 * 8 + 3 * 4
#: Groups of at most this many rows or columns have tiles of one multiprocessor.
_SMALL_GROUP = 128


@recorded_rule("aten._grouped_mm.default")
def grouped_mm_rule(call: Call) -> Script | None:
    """bfloat16 runs as one kernel on 9.x and 10.x; anything else is a product of cuBLAS per group."""
    first, second = call.self, call.mat2
    script = Script().output(0)
    workspaces = call.card.limits.grouped_product_bytes
    if workspaces is None or any(tensor.dtype != torch.bfloat16 for tensor in (first, second, call.outputs[0])):
        script.product()
        return script
    offsets = call.offs
    groups = int(first.shape[0] if offsets is None else offsets.shape[0])
    arguments = script.take(groups * _GROUP_ARGUMENTS, "arguments of every group")
    one, two = workspaces
    per_multiprocessor = one if _has_small_groups(first, second, groups) else two
    if not versions.GROUPED_PRODUCTS_SMALLER.holds(call.card.torch_version):
        per_multiprocessor += 128
    workspace = script.take(per_multiprocessor * call.card.sm_count, "workspace of CUTLASS")
    return script.give(workspace, arguments)


def _has_small_groups(first: torch.Tensor, second: torch.Tensor, groups: int) -> bool:
    """Groups along the rows of the first or the columns of the second matrix are taken to be of equal size."""
    rows, columns = int(first.shape[-2]), int(second.shape[-1])
    if first.dim() == 2 and second.dim() == 3:
        rows //= groups
    if first.dim() == 3 and second.dim() == 2:
        columns //= groups
    return rows <= _SMALL_GROUP or columns <= _SMALL_GROUP
