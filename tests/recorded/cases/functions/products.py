"""Matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import X
from tests.recorded.cases.functions.registry import BF16, FP16, T, add, group, module, t

group("products")
A, B, AH, BH = t(512, 768), t(768, 1024), t(512, 768, dtype=BF16), t(768, 1024, dtype=BF16)
add("mm", torch.mm, A, B)
add("mm_transposed", lambda a, b: a.t() @ b, t(768, 512), B)
add("mm_sliced", torch.mm, t(512, 768, layout="sliced"), B)
add(
    "mm_sliced_both_bf16", torch.mm, t(512, 768, dtype=BF16, layout="sliced"), t(768, 1024, dtype=BF16, layout="sliced")
)
add("mm_column_slice", lambda a, b: a[:, 256:] @ b, t(512, 1024), B)
add("mm_row_strided", lambda a, b: a[::2] @ b, t(1024, 768), B)
add("mv", torch.mv, A, t(768))
add("dot", torch.dot, t(100000), t(100000))
add("outer", torch.outer, t(2048), t(1024))
add("addmm", lambda c, a, b: torch.addmm(c, a, b), t(1024), A, B)
add("addmm_matrix", lambda c, a, b: torch.addmm(c, a, b), t(512, 1024), A, B)
add("addmm_column", lambda c, a, b: torch.addmm(c, a, b), t(512, 1), A, B)
add("addmm_scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2.0), t(1024), A, B)
add("addmm_bf16", lambda c, a, b: torch.addmm(c, a, b), t(1024, dtype=BF16), AH, BH)
add("addmv", torch.addmv, t(512), A, t(768))
add("linear", lambda x, w, b: F.linear(x, w, b), A, t(1024, 768), t(1024))
add("linear_no_bias", lambda x, w: F.linear(x, w), A, t(1024, 768))
add("linear_3d", lambda x, w, b: F.linear(x, w, b), t(4, 128, 768), t(1024, 768), t(1024))
add(
    "linear_3d_bf16",
    lambda x, w, b: F.linear(x, w, b),
    t(4, 128, 768, dtype=BF16),
    t(1024, 768, dtype=BF16),
    t(1024, dtype=BF16),
)
add(
    "linear_3d_transposed",
    lambda x, w, b: F.linear(x, w, b),
    T((4, 128, 768), layout="transposed"),
    t(1024, 768),
    t(1024),
)
add("linear_3d_transposed_no_bias", lambda x, w: F.linear(x, w), T((4, 128, 768), layout="transposed"), t(1024, 768))
add("linear_3d_permuted", lambda x, w, b: F.linear(x.transpose(0, 1), w, b), t(128, 4, 768), t(1024, 768), t(1024))
for bias in ((), (t(1024),)):
    add(
        f"linear_3d_permuted_inference{'' if bias else '_no_bias'}",
        lambda x, *weights: torch.inference_mode()(F.linear)(x.transpose(0, 1), *weights),
        t(128, 4, 768),
        t(1024, 768),
        *bias,
        grad=False,
    )
add("linear_2d_sliced", lambda x, w, b: F.linear(x, w, b), t(512, 768, layout="sliced"), t(1024, 768), t(1024))
add("linear_1d", lambda x, w, b: F.linear(x, w, b), t(768), t(1024, 768), t(1024))
add("linear_4d", lambda x, w, b: F.linear(x, w, b), t(2, 4, 64, 768), t(1024, 768), t(1024))
add("linear_one_out", lambda x, w, b: F.linear(x, w, b), A, t(1, 768), t(1))
add("linear_last_token", lambda x, w: F.linear(x[:, -1], w), t(4, 128, 768), t(1024, 768))
add("linear_relu", lambda x, w, b: F.relu(F.linear(x, w, b)), A, t(1024, 768), t(1024))
add("linear_gelu_no_grad", lambda x, w, b: F.gelu(F.linear(x, w, b)), A, t(1024, 768), t(1024), grad=False)
add("bmm", torch.bmm, t(16, 128, 64), t(16, 64, 128))
add("bmm_transposed", lambda a, b: a @ b.transpose(-1, -2), t(16, 128, 64), t(16, 128, 64))
add("bmm_expanded", lambda a, b: torch.bmm(a, b.expand(16, -1, -1)), t(16, 128, 64), t(1, 64, 128))
add("bmm_sliced", torch.bmm, t(16, 128, 64, layout="sliced"), t(16, 64, 128))
add("bmm_outer", torch.bmm, t(16, 128, 1), t(16, 1, 256))
add("bmm_outer_expanded", lambda a, b: torch.bmm(a, b.expand(16, -1, -1)), t(16, 128, 1, layout="sliced"), t(1, 1, 256))
add("baddbmm", torch.baddbmm, t(16, 128, 128), t(16, 128, 64), t(16, 64, 128))
add("baddbmm_broadcast", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), t(1, 128), t(16, 128, 64), t(16, 64, 128))
add("addbmm", torch.addbmm, t(128, 128), t(16, 128, 64), t(16, 64, 128))
add("matmul_3d_2d", torch.matmul, t(4, 128, 768), B)
add("matmul_2d_3d", torch.matmul, t(128, 768), t(4, 768, 256))
add("matmul_4d", torch.matmul, t(4, 12, 128, 64), t(4, 12, 64, 128))
add(
    "matmul_heads",
    lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2),
    t(4, 128, 12, 64),
    t(4, 128, 12, 64),
)
add("matmul_broadcast", torch.matmul, t(4, 12, 128, 64), t(1, 12, 64, 128))
add("matmul_broadcast_batch", torch.matmul, t(4, 1, 128, 64), t(12, 64, 128))
add("mv_sliced", torch.mv, t(512, 768, layout="sliced"), t(768))
add("addmm_sliced", lambda c, a, b: torch.addmm(c, a, b), t(512, 1024), t(512, 768, layout="sliced"), B)
add("sum_of_linear", lambda x, w: F.linear(x, w).sum(), A, t(1024, 768))
add("mean_of_bmm", lambda a, b: torch.bmm(a, b).mean(), t(16, 128, 64), t(16, 64, 128))
add("matmul_1d", torch.matmul, t(4, 128, 768), t(768))
add("matmul_1d_3d", torch.matmul, t(768), t(4, 768, 128))
add("einsum_attention", lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), t(4, 12, 128, 64), t(4, 12, 128, 64))
add("einsum_bshd", lambda q, k: torch.einsum("bihd,bjhd->bhij", q, k), t(4, 128, 12, 64), t(4, 128, 12, 64))
add("einsum_linear", lambda x, w: torch.einsum("bsd,de->bse", x, w), t(4, 128, 768), B)
add("einsum_outer", lambda x, y: torch.einsum("i,j->ij", x, y), t(2048), t(1024))
add("einsum_diagonal", lambda x: torch.einsum("bii->bi", x), t(64, 128, 128))
add("einsum_three", lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), A, B, t(1024, 256))
add("tensordot", lambda x, w: torch.tensordot(x, w, dims=([2], [0])), t(4, 128, 768), B)
add("chain_matmul", lambda x, y, z: torch.linalg.multi_dot((x, y, z)), A, B, t(1024, 256))
add("kron", torch.kron, t(16, 16), t(32, 32))
module("bilinear", lambda: nn.Bilinear(64, 64, 32), t(128, 64), t(128, 64))
add("mm_fp16_autocast", lambda a, b: torch.autocast("cuda", FP16)(torch.mm)(a, b), A, B)
add("linear_bf16_autocast", lambda x, w, b: torch.autocast("cuda", BF16)(F.linear)(x, w, b), A, t(1024, 768), t(1024))


# --- products of groups, as in layers of experts ----------------------------------------------------------------------


def _grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ends = torch.arange(128, 1025, 128, device="cuda", dtype=torch.int32)
    return torch.nn.functional.grouped_mm(a, b, offs=ends)


add("grouped_mm_bf16", _grouped, t(1024, 256, dtype=BF16), t(8, 256, 512, dtype=BF16))
add(
    "grouped_mm_bf16_transposed",
    lambda a, b: _grouped(a, b.transpose(-2, -1)),
    t(1024, 256, dtype=BF16),
    t(8, 512, 256, dtype=BF16),
)
add("grouped_mm_fp32", _grouped, t(1024, 256), t(8, 256, 512))
add("einsum_batch_outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), t(64, 256), t(64, 128))
add("einsum_trace", lambda x: torch.einsum("ii->", x), t(512, 512))
add("einsum_heads", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), t(4, 128, 512), t(8, 512, 64))
add("tensordot_two", lambda x, w: torch.tensordot(x, w, 2), t(64, 32, 16), t(32, 16, 128))
add("inner", torch.inner, t(64, 512), t(128, 512))
add("kron_rectangular", torch.kron, t(8, 32), t(64, 4))
add("matrix_power", lambda x: torch.matrix_power(x, 5), t(128, 128))
add("vecdot", torch.linalg.vecdot, X, X)
add("linalg_cross", torch.linalg.cross, t(4096, 3), t(4096, 3))
add("addr", torch.addr, t(512, 256), t(512), t(256))
module("bilinear_unequal", lambda: nn.Bilinear(64, 48, 4, bias=False), t(128, 64), t(128, 48))
module("bilinear_sequence", lambda: nn.Bilinear(32, 32, 8), t(4, 16, 32), t(4, 16, 32))
module("lazy_linear", lambda: nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(64)), t(128, 512))
for _name, _layout in {"": "contiguous", "_gaps": "sliced", "_transposed": "transposed"}.items():
    _matrix = t(256, 256, dtype=BF16, grad=False, layout=_layout)
    _matrices = t(4, 256, 256, dtype=BF16, grad=False, layout=_layout)
    add(f"mm_out_dtype{_name}", lambda a, b: torch.mm(a, b, out_dtype=torch.float32), _matrix, _matrix)
    add(f"bmm_out_dtype{_name}", lambda a, b: torch.bmm(a, b, out_dtype=torch.float32), _matrices, _matrices)
    _bias = t(256, 256, grad=False)
    add(
        f"addmm_out_dtype{_name}",
        lambda bias, a, b: torch.addmm(bias, a, b, out_dtype=torch.float32),
        *(_bias, _matrix, _matrix),
    )


def _by_cublaslt(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product, cublasLt being preferred meanwhile."""

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            return product(*tensors)
        finally:
            torch.backends.cuda.preferred_blas_library("cublas")

    return run


add("preferred_mm", _by_cublaslt(torch.mm), A, B)
add("preferred_bmm_bf16", _by_cublaslt(torch.bmm), t(4, 64, 96, dtype=BF16), t(4, 96, 32, dtype=BF16))
add("preferred_addmm_matrix", _by_cublaslt(torch.addmm), t(512, 1024), A, B)
add("preferred_addbmm", _by_cublaslt(torch.addbmm), t(64, 32), t(4, 64, 96), t(4, 96, 32))
add("preferred_mv", _by_cublaslt(torch.mv), A, t(768))
add("preferred_mv_bf16", _by_cublaslt(torch.mv), AH, t(768, dtype=BF16))
add("preferred_dot", _by_cublaslt(torch.dot), t(100000), t(100000))
