"""Backward passes within autocast, as where ``loss.backward()`` is called too early, and in Lightning's manual
optimization: what kernels call of the operators that autocast casts is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import IMAGE, IMAGE_LAST, MODEL, SERIES, VOLUME
from tests.recorded.cases.functions.registry import BF16, FP16, T, group, module, t

group("backward_in_autocast")


class _Cell(nn.Module):
    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.cell(x)
        return found[0] if isinstance(found, tuple) else found


class _Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x * self.scale[:, None, None], x[:, :2, :28, :28].permute(0, 2, 3, 1), align_corners=False)


_LAYERS: dict[str, tuple[Callable[[], nn.Module], T]] = {
    "conv1d": (lambda: nn.Conv1d(64, 128, 5, padding=2), SERIES),
    "conv1d_transposed_input": (lambda: nn.Conv1d(64, 128, 5), t(8, 64, 1000, layout="transposed")),
    "conv2d": (lambda: nn.Conv2d(64, 96, 3, padding=1), IMAGE),
    "conv2d_last": (lambda: nn.Conv2d(64, 96, 3, padding=1).to(memory_format=torch.channels_last), IMAGE_LAST),
    "conv2d_one_output": (lambda: nn.Conv2d(64, 1, 4), IMAGE),
    "conv2d_frozen": (lambda: nn.Conv2d(64, 96, 3).requires_grad_(False), IMAGE),
    "conv2d_deep": (
        lambda: nn.Sequential(nn.Conv2d(64, 96, 3), nn.BatchNorm2d(96), nn.PReLU(), nn.Conv2d(96, 8, 1)),
        IMAGE,
    ),
    "depthwise2d": (lambda: nn.Conv2d(64, 64, 3, groups=64), IMAGE),
    "depthwise3d": (lambda: nn.Conv3d(16, 16, 3, groups=16), VOLUME),
    "conv3d": (lambda: nn.Conv3d(16, 24, 3), VOLUME),
    "transpose2d": (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), IMAGE),
    "transpose1d": (lambda: nn.ConvTranspose1d(64, 32, 4, 2, 1), SERIES),
    "linear": (lambda: nn.Linear(512, 1000), MODEL),
    "encoder": (lambda: nn.TransformerEncoderLayer(512, 8, 1024, 0.0, batch_first=True, norm_first=True), MODEL),
    "group_norm": (lambda: nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 1)), IMAGE),
    "lstm_cell": (lambda: _Cell(nn.LSTMCell(512, 512)), t(256, 512)),
    "gru_cell": (lambda: _Cell(nn.GRUCell(512, 512)), t(256, 512)),
    "bilinear": (lambda: nn.Sequential(nn.Linear(512, 64), nn.Softplus(), nn.Linear(64, 8)), t(256, 512)),
    "sampled": (_Sampled, IMAGE),
}


def _backward(dtype: torch.dtype) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def inside(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            m(x).float().square().mean().backward()
        return x * 2

    return inside


for _name, (_make, _input) in _LAYERS.items():
    module(f"inside_autocast_{_name}", _make, _input, run=_backward(FP16))
module("inside_autocast_conv2d_bf16", _LAYERS["conv2d"][0], IMAGE, run=_backward(BF16))
