"""More of everything."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import (
    IMAGE_LAST,
    LABELS_2D,
    LOGITS_2D,
    MLP,
    MODEL,
    SCORES,
    SERIES,
    SMALL,
    TABLE,
    TOKENS,
    VOLUME,
    XH,
    X,
    Y,
)
from tests.recorded.cases.functions.registry import BF16, BOOL, FP16, I32, add, group, index, module, t

group("more")
add("cummin", lambda x: x.cummin(-1)[0], X)
add("cumprod_grad", lambda x: x.cumprod(-1), t(64, 512))
add("kthvalue_first", lambda x: x.kthvalue(5, 0)[0], X)
add("nanmedian", lambda x: x.nanmedian(), X)
add("nanmedian_dim", lambda x: x.nanmedian(-1)[0], X)
add("quantile_all", lambda x: torch.quantile(x, 0.9), t(64, 1000))
add("quantile_many", lambda x, q: torch.quantile(x, q, dim=0), X, t(3, grad=False))
add("nanquantile", lambda x: torch.nanquantile(x, 0.5, 1), X)
add("std_mean", lambda x: torch.std_mean(x, -1), X)
add("var_keepdim", lambda x: x.var(-1, keepdim=True), X)
add("nansum", lambda x: x.nansum(-1), X)
add("nanmean", lambda x: x.nanmean(-1), X)
add("amin_amax", lambda x: torch.aminmax(x), X)
add("logsumexp_two", lambda x: torch.logsumexp(x, (1, 2)), SCORES)
add("log_softmax_gather", lambda x, i: F.log_softmax(x, -1).gather(-1, i), SCORES, index(8, 128, 1))
add("count_nonzero", lambda x: torch.count_nonzero(x, -1), X, grad=False)
add("prod_all", lambda x: x.prod(), t(1000), grad=False)
add("index_add_last", lambda x, i, s: x.index_add(1, i, s, alpha=2.0), t(64, 1000), index(300), t(64, 300))
add("index_reduce", lambda x, i, s: x.index_reduce(0, i, s, "mean"), t(1000, 64), index(300), t(300, 64), grad=False)
add("put", lambda x, i, s: x.put(i, s), t(64, 1000), index(500), t(500))
add("put_accumulate", lambda x, i, s: x.put(i, s, accumulate=True), t(64, 1000), index(500), t(500))
add("scatter_reduce_sum", lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), t(64, 1000), index(64, 100), t(64, 100))
add(
    "scatter_reduce_mean_exclusive",
    lambda x, i, s: x.scatter_reduce(1, i, s, "mean", include_self=False),
    t(64, 1000),
    index(64, 100),
    t(64, 100),
)
add("scatter_multiply", lambda x, i: x.scatter(1, i, 2.0, reduce="multiply"), t(64, 1000), index(64, 100), grad=False)
add("select_scatter", lambda x, s: torch.select_scatter(x, s, 0, 3), X, t(4096))
add("slice_scatter", lambda x, s: torch.slice_scatter(x, s, 0, 8, 24), X, t(16, 4096))
add("diagonal_scatter", lambda x, s: torch.diagonal_scatter(x, s), t(512, 512), t(512))
add("masked_scatter_broadcast", lambda x, m, s: x.masked_scatter(m, s), X, index(64, 1, dtype=BOOL), X)
add("index_put_mask_fill", lambda x, m: _fill_masked(x, m), X, index(64, 4096, dtype=BOOL))
add("bincount_minlength", lambda i: torch.bincount(i, minlength=64), index(100000), grad=False)
add("bincount_weights", lambda i, w: torch.bincount(i, w, 64), index(1000), t(1000, grad=False), grad=False)
add(
    "unique_inverse",
    lambda i: i.unique(return_inverse=True, return_counts=True),
    index(5000),
)
add("unique_float", lambda x: x.unique(), t(100000), refused="needs the values", grad=False)
add("unique_rows_consecutive", lambda i: torch.unique_consecutive(i), index(5000))
add("where_positions", lambda m: torch.where(m), index(64, 4096, dtype=BOOL))
add("index_mask_elements", lambda x, m: x[m], X, index(64, 4096, dtype=BOOL))
add("masked_select_row", lambda x, m: x.masked_select(m), X, index(64, 1, dtype=BOOL))
add("repeat_interleave_int32", lambda x, n: x.repeat_interleave(n, 0, output_size=128), X, index(64, dtype=I32))
add("bucketize_int32", lambda x, b: torch.bucketize(x, b, out_int32=True), X, t(100, grad=False), grad=False)
add("searchsorted_rows", lambda b, x: torch.searchsorted(b, x), t(64, 100, grad=False), t(64, 50), grad=False)
add("histogram_like", lambda x: torch.histc(x.float(), 64), XH, grad=False)
add("renorm", lambda x: x.renorm(2, 0, 1.0), X, grad=False)
add("embedding_max_norm", lambda i, w: F.embedding(i, w.detach(), max_norm=1.0), index(8, 128), TABLE, grad=False)
add("embedding_scaled", lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), index(8, 1024), TABLE)
add("einsum_batch_outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), t(64, 256), t(64, 128))
add("einsum_trace", lambda x: torch.einsum("ii->", x), t(512, 512))
add("einsum_heads", lambda x, w: torch.einsum("bsd,hde->bhse", x, w), t(4, 128, 512), t(8, 512, 64))
add("tensordot_two", lambda x, w: torch.tensordot(x, w, 2), t(64, 32, 16), t(32, 16, 128))
add("inner", torch.inner, t(64, 512), t(128, 512))
add("kron_rectangular", torch.kron, t(8, 32), t(64, 4))
add("block_diag", lambda x, y: torch.block_diag(x, y), t(64, 64), t(128, 32))
add("matrix_power", lambda x: torch.matrix_power(x, 5), t(128, 128))
add("vecdot", torch.linalg.vecdot, X, X)
add("linalg_cross", torch.linalg.cross, t(4096, 3), t(4096, 3))
add("addr", torch.addr, t(512, 256), t(512), t(256))
add("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z), X, X, X)
add("cosine_similarity_rows", lambda x, y: F.cosine_similarity(x[:, None], y[None], -1), t(64, 128), t(32, 128))
add("pairwise_1", lambda x, y: F.pairwise_distance(x, y, 1.0, keepdim=True), X, X)
add("gumbel_hard", lambda x: F.gumbel_softmax(x, hard=True), X)
add("local_response_norm_1d", lambda x: F.local_response_norm(x, 3), SERIES)
add("pixel_unshuffle_channels_last", lambda x: F.pixel_unshuffle(x, 2), IMAGE_LAST)
add("unfold_strided", lambda x: F.unfold(x, 3, dilation=2, stride=2), SMALL)
add("grid_sample_border", lambda x, g: F.grid_sample(x, g, "bilinear", "border"), SMALL, t(4, 14, 14, 2))
add("grid_sample_reflection", lambda x, g: F.grid_sample(x, g, "nearest", "reflection"), SMALL, t(4, 14, 14, 2))
add("grid_sample_bf16", F.grid_sample, t(4, 32, 28, 28, dtype=BF16), t(4, 14, 14, 2, dtype=BF16))
add("lp_pool3d", lambda x: F.lp_pool3d(x, 2.0, 2), VOLUME)
add("max_unpool1d", lambda x, i: F.max_unpool1d(x, i, 2), t(8, 64, 100), index(8, 64, 100))
add("l1_smooth_beta", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), X, Y)
add("mse_weight", lambda x, y, w: F.mse_loss(x, y, weight=w), X, Y, Y)
add("cross_entropy_4d_probabilities", lambda x, y: F.cross_entropy(x, y), LOGITS_2D, t(4, 21, 128, 128, grad=False))
add("nll_loss_2d", lambda x, y: F.nll_loss(x, y), LOGITS_2D, LABELS_2D)
add("multi_margin_p2", lambda x, y: F.multi_margin_loss(x, y, p=2), X, index(64))
add("gaussian_nll_full", lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True), X, Y, t(64, 1))
add("triplet_p1", lambda a, p, n: F.triplet_margin_loss(a, p, n, p=1), X, X, X)
add("ctc_sum", lambda x, y: F.ctc_loss(x, y, (200,) * 16, (30,) * 16, reduction="sum"), t(200, 16, 64), index(16, 30))
add("multinomial_row", lambda x: torch.multinomial(x, 10), t(4096, grad=False))
add("multinomial_row_many", lambda x: torch.multinomial(x, 10, replacement=True), t(4096, grad=False))
add("multinomial_half", lambda x: torch.multinomial(x, 10), t(64, 4096, dtype=FP16, grad=False))
add("poisson", torch.poisson, t(64, 4096, grad=False))
add("cauchy", lambda x: torch.empty_like(x).cauchy_(), X, grad=False)
add("log_normal", lambda x: torch.empty_like(x).log_normal_(), X, grad=False)
add("fused_dropout_bf16", lambda x: F.dropout(x, 0.1), XH)
add("rand_generator", lambda x: x + torch.rand(4096, device="cuda", generator=torch.Generator("cuda")), X)
module("bilinear_unequal", lambda: nn.Bilinear(64, 48, 4, bias=False), t(128, 64), t(128, 48))
module("bilinear_sequence", lambda: nn.Bilinear(32, 32, 8), t(4, 16, 32), t(4, 16, 32))
module("lazy_linear", lambda: nn.Sequential(nn.LazyLinear(256), nn.ReLU(), nn.LazyLinear(64)), t(128, 512))
module("decoder", lambda: nn.TransformerDecoder(DECODER(), 2), MODEL, t(8, 64, 512))
module(
    "transformer",
    lambda: nn.Transformer(256, 4, 2, 2, 512, batch_first=True),
    t(4, 64, 256),
    t(4, 32, 256),
)
module("embedding_bag_module", lambda: nn.EmbeddingBag(10000, 256, include_last_offset=True), index(1024), index(65))
module(
    "adaptive_softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 500]),
    t(128, 64),
    run=lambda m, x: m.log_prob(x),
)
module("double_backward_weights", MLP, TOKENS, run=lambda m, x: _meta_step(m, x))
module("hessian_vector_product", MLP, t(64, 512), run=lambda m, x: _hessian_vector(m, x))
module("lstm_cell", lambda: nn.LSTMCell(64, 128), t(32, 64))
module("gru_cell", lambda: nn.GRUCell(64, 128), t(32, 64), t(32, 128))


def DECODER() -> nn.Module:
    return nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)


def _fill_masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[m] = 2.0
    return y


def _meta_step(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One inner step of gradient descent that is differentiated again."""
    weights = dict(m.named_parameters())
    loss = torch.func.functional_call(m, weights, x).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(m, moved, x).mean()


def _hessian_vector(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    parameters = list(m.parameters())
    gradients = torch.autograd.grad(m(x).pow(2).sum(), parameters, create_graph=True)
    return sum((g * g.detach()).sum() for g in gradients)
