"""Pooling."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812

from tests.recorded.cases.functions.common import IMAGE, IMAGE_HALF, IMAGE_LAST, SERIES, VOLUME, VOLUME_LAST
from tests.recorded.cases.functions.registry import BF16, add, group, index, t

group("pooling")
IMAGE_HALF_LAST = t(8, 64, 56, 56, dtype=BF16, layout="channels_last")

add("max_pool1d", lambda x: F.max_pool1d(x, 3, 2), SERIES)
add("max_pool1d_no_grad", lambda x: F.max_pool1d(x, 3, 2), SERIES, grad=False)
add("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE)
add("max_pool2d_bf16", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE_HALF)
add("max_pool2d_channels_last", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE_LAST)
add("max_pool2d_ceil", lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), IMAGE)
add("max_pool2d_indices", lambda x: F.max_pool2d(x, 2, return_indices=True)[0], IMAGE)
add("max_pool2d_no_grad", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, grad=False)
add("max_pool2d_sliced", lambda x: F.max_pool2d(x, 3, 2, 1), t(8, 64, 56, 56, layout="sliced"))
add("max_pool3d", lambda x: F.max_pool3d(x, 3, 2, 1), VOLUME)
add("max_pool3d_channels_last", lambda x: F.max_pool3d(x, 3, 2, 1), VOLUME_LAST)
add("max_unpool2d", lambda x, i: F.max_unpool2d(x, i, 2), t(8, 64, 28, 28), index(8, 64, 28, 28))
add("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2), SERIES)
add("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE)
add("avg_pool2d_channels_last", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE_HALF_LAST)
add("avg_pool3d", lambda x: F.avg_pool3d(x, 3, 2, 1), VOLUME)
add("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 7), SERIES)
add("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 7), IMAGE)
add("adaptive_avg_pool2d_one", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE)
add("adaptive_avg_pool2d_one_channels_last", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE_HALF_LAST)
add("adaptive_avg_pool2d_channels_last", lambda x: F.adaptive_avg_pool2d(x, 7), IMAGE_LAST)
add("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 4), VOLUME)
add("adaptive_avg_pool3d_one", lambda x: F.adaptive_avg_pool3d(x, 1), VOLUME)
add("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 7), SERIES)
add("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 7), IMAGE)
add("adaptive_max_pool2d_channels_last", lambda x: F.adaptive_max_pool2d(x, 7), IMAGE_LAST)
add("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 4), VOLUME)
add("lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 3), SERIES)
add("lp_pool2d", lambda x: F.lp_pool2d(x, 2.0, 3), IMAGE)
add("fractional_max_pool2d", lambda x: F.fractional_max_pool2d(x, 3, output_size=(20, 20)), IMAGE)
add("fractional_max_pool3d", lambda x: F.fractional_max_pool3d(x, 3, output_size=(8, 8, 8)), VOLUME)
add(
    "adaptive_avg_pool1d_permuted",
    lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 7).transpose(1, 2).contiguous(),
    t(8, 1000, 64),
)
add(
    "avg_pool2d_permuted",
    lambda x: F.avg_pool2d(x.permute(3, 2, 1, 0), 2).permute(3, 2, 1, 0).contiguous(),
    t(56, 56, 64, 8),
)
add("lp_pool3d", lambda x: F.lp_pool3d(x, 2.0, 2), VOLUME)
add("max_unpool1d", lambda x, i: F.max_unpool1d(x, i, 2), t(8, 64, 100), index(8, 64, 100))
