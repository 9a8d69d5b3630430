"""Products of groups of matrices (``torch.nn.functional.grouped_mm``), as layers of experts use them.

Sources: ``_grouped_mm_cuda`` and ``_grouped_mm_fallback`` in ATen/native/cuda/GroupedBlas.cpp and
ATen/native/GroupedMMUtils.h, ``bf16bf16_grouped_gemm_impl_sm90_sm100`` in ATen/native/cuda/GroupMM.cu, and the
workspaces of CUTLASS, of PyTorch 2.13; sizes observed on its CUDA build with 114, 132 and 148 multiprocessors.
"""

from __future__ import annotations

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule

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
