"""``torch.use_deterministic_algorithms(True)``: other kernels, other plans of cuDNN, and new memory that is filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.attention import HEADS, HEADS_HALF
from tests.recorded.cases.functions.common import IMAGE, IMAGE_HALF, IMAGE_LAST, SERIES, TABLE, VOLUME, X
from tests.recorded.cases.functions.registry import BF16, BOOL, T, add, group, index, t

group("deterministic")


def case(name: str, run: Callable[..., Any], *tensors: T, make: Callable[[], nn.Module] | None = None) -> None:
    """``run`` forward and backward in deterministic mode, which is the process's and not the case's."""

    def deterministic(*arguments: Any) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            out = run(*arguments)
            if not out.requires_grad:
                return out
            out.backward(torch.empty_like(out))
            return out.detach()
        finally:
            torch.use_deterministic_algorithms(before)

    add(f"deterministic_{name}", deterministic, *tensors, module=make)


ROWS, WHERE = t(1000, 512), index(300)
case("empty", lambda x: x.new_empty(1000, 100), X)
case("embedding", lambda i, w: F.embedding(i, w), index(8, 128), TABLE)
case("embedding_large", lambda i, w: F.embedding(i, w), index(8, 1024), TABLE)
case("embedding_half", lambda i, w: F.embedding(i, w), index(8, 1024), t(10000, 256, dtype=BF16))
case("index_rows", lambda x, i: x[i], ROWS, WHERE)
case("index_columns", lambda x, i: x[:, i], t(64, 1000, 32), WHERE)
case("index_mask", lambda x, m: x[m], ROWS, index(1000, dtype=BOOL))
case("index_assigned", lambda x, i, s: torch.index_put(x, (i,), s), ROWS, WHERE, t(300, 512))
case("index_added", lambda x, i, s: torch.index_put(x, (i,), s, accumulate=True), ROWS, WHERE, t(300, 512))
case("index_select", lambda x, i: x.index_select(0, i), ROWS, WHERE)
case("index_select_1", lambda x, i: x.index_select(1, i), ROWS, WHERE)
case("index_add", lambda x, i, s: x.index_add(0, i, s), ROWS, WHERE, t(300, 512))
case("index_add_1", lambda x, i, s: x.index_add(1, i, s), ROWS, WHERE, t(1000, 300))
case("index_add_vector", lambda x, i, s: x.index_add(0, i, s), t(1000), WHERE, t(300))
case("index_copy", lambda x, i, s: x.index_copy(0, i, s), ROWS, WHERE, t(300, 512))
case("index_fill", lambda x, i: x.index_fill(0, i, 1.0), ROWS, WHERE)
case("gather", lambda x, i: x.gather(1, i), t(64, 1000), index(64, 100))
case("gather_vector", lambda x, i: x.gather(0, i), t(1000), index(300))
case("scatter", lambda x, i, s: x.scatter(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
case("scatter_value", lambda x, i: x.scatter(1, i, 1.0), t(64, 1000), index(64, 100))
case("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), t(64, 1000), index(64, 100), t(64, 100))
case("scatter_add_vector", lambda x, i, s: x.scatter_add(0, i, s), t(1000), index(300), t(300))
case("scatter_reduce", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), t(64, 1000), index(64, 100), t(64, 100))
case("repeat_interleave", lambda x: x.repeat_interleave(3, 0), t(100, 512))
case("sdpa", F.scaled_dot_product_attention, HEADS, HEADS, HEADS)
case("sdpa_bf16", F.scaled_dot_product_attention, HEADS_HALF, HEADS_HALF, HEADS_HALF)
case("sdpa_mask", F.scaled_dot_product_attention, HEADS, HEADS, HEADS, index(4, 1, 128, 128, dtype=BOOL))
case("cross_entropy", lambda x, y: F.cross_entropy(x, y), t(1024, 1000), index(1024))
case("cumsum_integers", lambda x: x.cumsum(0), index(1024, 16))
case("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), t(4, 32, 28, 28))
case("bilinear_half", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), t(4, 32, 28, 28, dtype=BF16))
case("nearest", lambda x: F.interpolate(x, scale_factor=2), t(4, 32, 28, 28))
case("replicate_pad", lambda x: F.pad(x, (2, 2, 2, 2), mode="replicate"), t(4, 32, 28, 28))
case("max_pool", lambda x: F.max_pool2d(x, 2), IMAGE)
case("adaptive_pool_to_one", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE)
case("dropout", lambda x: F.dropout(x, 0.1), X)
case("batch_norm", lambda m, x: m(x), IMAGE, make=lambda: nn.BatchNorm2d(64))
case("layer_norm", lambda m, x: m(x), t(64, 128, 512), make=lambda: nn.LayerNorm(512))
case("linear", lambda m, x: m(x), X, make=lambda: nn.Linear(4096, 1000))
_CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], T]] = {
    "conv1d": (lambda: nn.Conv1d(64, 128, 5, padding=2), SERIES),
    "conv2d": (lambda: nn.Conv2d(64, 128, 3, padding=1), IMAGE),
    "conv2d_first": (lambda: nn.Conv2d(3, 64, 7, 2, 3, bias=False), t(8, 3, 224, 224)),
    "conv2d_pointwise": (lambda: nn.Conv2d(64, 256, 1), IMAGE),
    "conv2d_strided": (lambda: nn.Conv2d(64, 128, 3, 2, 1), IMAGE),
    "conv2d_half": (lambda: nn.Conv2d(64, 128, 3, padding=1, dtype=BF16), IMAGE_HALF),
    "conv2d_channels_last": (
        lambda: nn.Conv2d(64, 128, 3, padding=1).to(memory_format=torch.channels_last),
        IMAGE_LAST,
    ),
    "conv2d_grouped": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=4), IMAGE),
    "conv2d_depthwise": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), IMAGE),
    "conv2d_dilated": (lambda: nn.Conv2d(64, 64, 3, padding=2, dilation=2), IMAGE),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(64, 32, 2, 2), IMAGE),
    "conv3d": (lambda: nn.Conv3d(16, 32, 3, padding=1), VOLUME),
}
for _name, (_make, _input) in _CONVOLUTIONS.items():
    case(_name, lambda m, x: m(x), _input, make=_make)
