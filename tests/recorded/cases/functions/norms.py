"""Normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import IMAGE, IMAGE_HALF, IMAGE_LAST, X
from tests.recorded.cases.functions.registry import BF16, add, group, module, t

group("norms")
add("normalize", lambda x: F.normalize(x, dim=-1), X)
add("layer_norm", lambda x: F.layer_norm(x, (4096,)), X)
module("layer_norm_affine", lambda: nn.LayerNorm(768), t(8, 128, 768))
module("layer_norm_bf16", lambda: nn.LayerNorm(768, dtype=BF16), t(8, 128, 768, dtype=BF16))
module("layer_norm_no_bias", lambda: nn.LayerNorm(768, bias=False), t(8, 128, 768))
module("rms_norm", lambda: nn.RMSNorm(768), t(8, 128, 768))
add("rms_norm_functional", lambda x: F.rms_norm(x, (4096,)), X)
module("rms_norm_of_float_by_bf16", lambda: nn.RMSNorm(768, dtype=BF16), t(8, 128, 768))
module("rms_norm_of_bf16_by_float", lambda: nn.RMSNorm(768), t(8, 128, 768, dtype=BF16))
module("rms_norm_channels_last", lambda: nn.RMSNorm(56), IMAGE_LAST)
module("rms_norm_complex", lambda: nn.RMSNorm(768, dtype=torch.complex64), t(8, 128, 768, dtype=torch.complex64))
module("group_norm", lambda: nn.GroupNorm(8, 64), IMAGE)
module("group_norm_no_affine", lambda: nn.GroupNorm(8, 64, affine=False), IMAGE)
module("group_norm_channels_last", lambda: nn.GroupNorm(8, 64), IMAGE_LAST)
module("group_norm_bf16", lambda: nn.GroupNorm(8, 64, dtype=BF16), IMAGE_HALF)
module("instance_norm", lambda: nn.InstanceNorm2d(64), IMAGE)
module("instance_norm_affine", lambda: nn.InstanceNorm2d(64, affine=True), IMAGE)
module("instance_norm_tracked", lambda: nn.InstanceNorm2d(64, track_running_stats=True), IMAGE)
module("batch_norm_eval", lambda: nn.BatchNorm2d(64).eval(), IMAGE)
module("batch_norm_eval_frozen", lambda: nn.BatchNorm2d(64).eval().requires_grad_(False), IMAGE)
module("batch_norm_1d", lambda: nn.BatchNorm1d(4096), X)
module("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(512, 1024)), t(64, 512))
module("weight_norm_old", lambda: nn.utils.weight_norm(nn.Linear(512, 1024)), t(64, 512))
module("weight_norm_dim_none", lambda: nn.utils.weight_norm(nn.Linear(512, 1024), dim=None), t(64, 512))
module("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(512, 1024)), t(64, 512))
module("spectral_norm_old", lambda: nn.utils.spectral_norm(nn.Linear(512, 1024)), t(64, 512))
module(
    "layer_norm_permuted",
    lambda: nn.LayerNorm(768),
    t(768, 128, 8),
    run=lambda m, x: m(x.permute(2, 1, 0)).mT.contiguous(),
)


def _parts_of_sync_batch_norm(x: torch.Tensor) -> torch.Tensor:
    """What ``SyncBatchNorm`` does between its collectives, with eight processes like this one."""
    x, channels = x.detach(), x.shape[1]
    mean, deviation = torch.batch_norm_stats(x, 1e-5)
    everyone = [part.expand(8, channels).contiguous() for part in (mean, deviation)]
    running = [torch.zeros(channels, device=x.device) for _ in range(2)]
    counts = torch.full((8,), float(x.numel() // channels), device=x.device)
    mean, deviation = torch.batch_norm_gather_stats_with_counts(x, *everyone, *running, 0.1, 1e-5, counts)
    weight = torch.ones(channels, device=x.device)
    out = torch.batch_norm_elemt(x, weight, weight, mean, deviation, 1e-5)
    sums = torch.batch_norm_backward_reduce(out, x, mean, deviation, weight, True, True, True)
    del everyone, running
    return torch.batch_norm_backward_elemt(out, x, mean, deviation, weight, sums[0], sums[1], counts.int())


for name, images in (("contiguous", IMAGE), ("channels_last", IMAGE_LAST), ("bf16", IMAGE_HALF)):
    add(f"sync_batch_norm_{name}", _parts_of_sync_batch_norm, images)
add("sync_batch_norm_rows", _parts_of_sync_batch_norm, X)
