"""Normalization."""

from __future__ import annotations

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
module("group_norm", lambda: nn.GroupNorm(8, 64), IMAGE)
module("group_norm_no_affine", lambda: nn.GroupNorm(8, 64, affine=False), IMAGE)
module("group_norm_channels_last", lambda: nn.GroupNorm(8, 64), IMAGE_LAST)
module("group_norm_bf16", lambda: nn.GroupNorm(8, 64, dtype=BF16), IMAGE_HALF)
module("instance_norm", lambda: nn.InstanceNorm2d(64), IMAGE)
module("instance_norm_affine", lambda: nn.InstanceNorm2d(64, affine=True), IMAGE)
module("instance_norm_tracked", lambda: nn.InstanceNorm2d(64, track_running_stats=True), IMAGE)
module("batch_norm_eval", lambda: nn.BatchNorm2d(64).eval(), IMAGE)
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
