"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import LABELS_2D, LOGITS_2D, XH, X, Y
from tests.recorded.cases.functions.registry import BF16, add, group, index, module, t

group("losses")
LOGITS, LABELS = t(512, 10000), index(512)
add("cross_entropy", lambda x, y: F.cross_entropy(x, y), LOGITS, LABELS)
add("cross_entropy_bf16", lambda x, y: F.cross_entropy(x, y), t(512, 10000, dtype=BF16), LABELS)
add("cross_entropy_bf16_float", lambda x, y: F.cross_entropy(x.float(), y), t(512, 10000, dtype=BF16), LABELS)
add("cross_entropy_sum", lambda x, y: F.cross_entropy(x, y, reduction="sum"), LOGITS, LABELS)
add("cross_entropy_none", lambda x, y: F.cross_entropy(x, y, reduction="none"), LOGITS, LABELS)
add("cross_entropy_none_mean", lambda x, y: F.cross_entropy(x, y, reduction="none").mean(), LOGITS, LABELS)
add(
    "cross_entropy_sliced",
    lambda x, y, w: F.cross_entropy(x, y[:, 1], w[::2]),
    LOGITS,
    index(512, 512),
    t(20000, grad=False),
)
add(
    "cross_entropy_none_sliced",
    lambda x, y, w: F.cross_entropy(x, y[:, 1], w[::2], reduction="none").sum(),
    LOGITS,
    index(512, 512),
    t(20000, grad=False),
)
add("cross_entropy_2d_sliced", lambda x, y: F.cross_entropy(x, y[..., 0]), LOGITS_2D, index(4, 128, 128, 3))
add(
    "cross_entropy_2d_none_sliced",
    lambda x, y: F.cross_entropy(x, y[..., 0], reduction="none").mean(),
    LOGITS_2D,
    index(4, 128, 128, 3),
)
add("cross_entropy_weight", lambda x, y, w: F.cross_entropy(x, y, w), LOGITS, LABELS, t(10000, grad=False))
add("cross_entropy_smoothing", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS, LABELS)
add(
    "cross_entropy_smoothing_none",
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"),
    LOGITS,
    LABELS,
)
add(
    "cross_entropy_smoothing_weight",
    lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.1),
    LOGITS,
    LABELS,
    t(10000, grad=False),
)
add(
    "cross_entropy_smoothing_bf16",
    lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    t(512, 10000, dtype=BF16),
    LABELS,
)
add("cross_entropy_ignore", lambda x, y: F.cross_entropy(x, y, ignore_index=0), LOGITS, LABELS)
add("cross_entropy_probabilities", lambda x, y: F.cross_entropy(x, y), LOGITS, t(512, 10000, grad=False))
add(
    "cross_entropy_shifted",
    lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, 10000), y[:, 1:].reshape(-1)),
    t(4, 128, 10000),
    index(4, 128),
)
add("cross_entropy_4d", lambda x, y: F.cross_entropy(x, y), LOGITS_2D, LABELS_2D)
add("cross_entropy_4d_bf16", lambda x, y: F.cross_entropy(x, y), t(4, 21, 128, 128, dtype=BF16), LABELS_2D)
add("cross_entropy_4d_none", lambda x, y: F.cross_entropy(x, y, reduction="none"), LOGITS_2D, LABELS_2D)
add(
    "cross_entropy_4d_weight",
    lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=255),
    LOGITS_2D,
    LABELS_2D,
    t(21, grad=False),
)
add("cross_entropy_4d_smoothing", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), LOGITS_2D, LABELS_2D)
add(
    "cross_entropy_4d_channels_last",
    lambda x, y: F.cross_entropy(x, y),
    t(4, 21, 128, 128, layout="channels_last"),
    LABELS_2D,
)
add("cross_entropy_3d", lambda x, y: F.cross_entropy(x, y), t(4, 1000, 256), index(4, 256))
add("nll_loss", lambda x, y: F.nll_loss(x, y), LOGITS, LABELS)
add("nll_loss_weight_sum", lambda x, y, w: F.nll_loss(x, y, w, reduction="sum"), LOGITS, LABELS, t(10000, grad=False))
for reduction in ("mean", "sum", "none"):
    for name, loss in {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss,
        "huber": F.huber_loss,
        "bce": F.binary_cross_entropy,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
        "kl_div": F.kl_div,
        "soft_margin": F.soft_margin_loss,
        "poisson": F.poisson_nll_loss,
    }.items():
        add(f"{name}_{reduction}", lambda x, y, f=loss, r=reduction: f(x, y, reduction=r), X, Y)
add("mse_bf16", lambda x, y: F.mse_loss(x, y), XH, t(64, 4096, dtype=BF16, grad=False))
add("mse_target_grad", lambda x, y: F.mse_loss(x, y), X, X)
add("mse_broadcast", lambda x, y: F.mse_loss(x, y), X, t(1, 4096, grad=False))
add("kl_div_batchmean", lambda x, y: F.kl_div(x, y, reduction="batchmean"), X, Y)
add("kl_div_log_target", lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True), X, Y)
add("kl_div_target_grad", lambda x, y: F.kl_div(x, y, reduction="batchmean"), X, X)
add("bce_weight", lambda x, y, w: F.binary_cross_entropy(x, y, w), X, Y, Y)
add("bce_with_logits_weight", lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w), X, Y, Y)
add(
    "bce_with_logits_pos_weight",
    lambda x, y, p: F.binary_cross_entropy_with_logits(x, y, pos_weight=p),
    X,
    Y,
    t(4096, grad=False),
)
add("poisson_full", lambda x, y: F.poisson_nll_loss(x, y, full=True), X, Y)
add("gaussian_nll", lambda x, y, v: F.gaussian_nll_loss(x, y, v), X, Y, t(64, 4096))
add("hinge_embedding", lambda x, y: F.hinge_embedding_loss(x, y), X, Y)
add("margin_ranking", lambda x, z, y: F.margin_ranking_loss(x, z, y), t(4096), t(4096), t(4096, grad=False))
add("cosine_embedding", lambda x, z, y: F.cosine_embedding_loss(x, z, y), X, X, t(64, grad=False))
add("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n), X, X, X)
add("triplet_swap", lambda a, p, n: F.triplet_margin_loss(a, p, n, swap=True), X, X, X)
add("triplet_with_distance", lambda a, p, n: F.triplet_margin_with_distance_loss(a, p, n), X, X, X)
add("multi_margin", lambda x, y: F.multi_margin_loss(x, y), X, index(64))
add("multilabel_margin", lambda x, y: F.multilabel_margin_loss(x, y), X, index(64, 4096))
add("multilabel_soft_margin", lambda x, y: F.multilabel_soft_margin_loss(x, y), X, Y)
add("ctc", lambda x, y: F.ctc_loss(x, y, (200,) * 16, (30,) * 16), t(200, 16, 64), index(16, 30))
add("l1_smooth_beta", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), X, Y)
add("mse_weight", lambda x, y, w: F.mse_loss(x, y, weight=w), X, Y, Y)
add("cross_entropy_4d_probabilities", lambda x, y: F.cross_entropy(x, y), LOGITS_2D, t(4, 21, 128, 128, grad=False))
add("nll_loss_2d", lambda x, y: F.nll_loss(x, y), LOGITS_2D, LABELS_2D)
add("multi_margin_p2", lambda x, y: F.multi_margin_loss(x, y, p=2), X, index(64))
add("gaussian_nll_full", lambda x, y, v: F.gaussian_nll_loss(x, y, v, full=True), X, Y, t(64, 1))
add("triplet_p1", lambda a, p, n: F.triplet_margin_loss(a, p, n, p=1), X, X, X)
add("ctc_sum", lambda x, y: F.ctc_loss(x, y, (200,) * 16, (30,) * 16, reduction="sum"), t(200, 16, 64), index(16, 30))
module(
    "adaptive_softmax",
    lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 1000, [100, 500]),
    t(128, 64),
    run=lambda m, x: m.log_prob(x),
)
_LENGTHS = (200,) * 16, (30,) * 16
add("ctc_zero_infinity", lambda x, y: F.ctc_loss(x, y, *_LENGTHS, zero_infinity=True), t(200, 16, 64), index(16, 30))
add("ctc_of_32_bits", lambda x: F.ctc_loss(x, _labels("cuda"), *_LENGTHS), t(200, 16, 64))
add("ctc_by_cudnn", lambda x: F.ctc_loss(x, _labels("cpu"), *_LENGTHS), t(200, 16, 64))
add("ctc_by_cudnn_none", lambda x: F.ctc_loss(x, _labels("cpu"), *_LENGTHS, reduction="none"), t(200, 16, 64))
add(
    "ctc_by_cudnn_zero_infinity", lambda x: F.ctc_loss(x, _labels("cpu"), *_LENGTHS, zero_infinity=True), t(200, 16, 64)
)
add("ctc_by_cudnn_on_the_card", lambda x: F.ctc_loss(x, _labels("cuda"), *_on_card()), t(200, 16, 64))


def _labels(device: str) -> torch.Tensor:
    return torch.ones(480, dtype=torch.int32, device=device)


def _on_card() -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((16,), length, dtype=torch.int32, device="cuda") for length in (200, 30))
