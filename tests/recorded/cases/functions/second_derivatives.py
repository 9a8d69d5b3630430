"""Second derivatives of convolutions: penalties on gradients, and gradients of gradients by the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.recorded.cases.functions.common import IMAGE, IMAGE_HALF, IMAGE_LAST, SERIES, VOLUME
from tests.recorded.cases.functions.registry import BF16, T, group, module, t

group("second_derivatives")


def _penalty(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """WGAN-GP's: the gradient by the input, differentiated by the weights and the input."""
    (grad,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    return grad.flatten(1).norm(dim=1).sub(1).square().mean()


def _meta(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """MAML's: gradients by the weights, differentiated by them and the input."""
    gradients = torch.autograd.grad(m(x).square().mean(), list(m.parameters()), create_graph=True)
    return torch.stack([grad.square().sum() for grad in gradients]).sum()


def _both(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """All first derivatives, differentiated by everything."""
    gradients = torch.autograd.grad(m(x).square().mean(), [x, *m.parameters()], create_graph=True)
    return torch.stack([grad.square().sum() for grad in gradients]).sum()


_LAYERS: dict[str, tuple[Callable[[], nn.Module], T]] = {
    "conv1d": (lambda: nn.Conv1d(64, 128, 5, padding=2), SERIES),
    "conv1d_dilated": (lambda: nn.Conv1d(64, 128, 3, padding=4, dilation=4), SERIES),
    "conv2d": (lambda: nn.Conv2d(64, 128, 3, padding=1), IMAGE),
    "conv2d_plain": (lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), IMAGE),
    "conv2d_critic": (lambda: nn.Conv2d(64, 32, 4, 2, 1), IMAGE),
    "conv2d_left_over": (lambda: nn.Conv2d(64, 32, 3, 2, 0), IMAGE),
    "conv2d_half": (lambda: nn.Conv2d(64, 128, 3, padding=1, dtype=BF16), IMAGE_HALF),
    "conv2d_channels_last": (
        lambda: nn.Conv2d(64, 128, 3, padding=1).to(memory_format=torch.channels_last),
        IMAGE_LAST,
    ),
    "conv2d_grouped": (lambda: nn.Conv2d(64, 128, 3, padding=1, groups=4), IMAGE),
    "conv2d_depthwise": (lambda: nn.Conv2d(64, 64, 3, padding=1, groups=64), IMAGE),
    "conv2d_dilated": (lambda: nn.Conv2d(64, 48, 3, padding=2, dilation=2), IMAGE),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1), IMAGE),
    "conv_transpose2d_extra": (lambda: nn.ConvTranspose2d(64, 32, 3, 2, 1, output_padding=1), IMAGE),
    "conv_transpose2d_grouped": (lambda: nn.ConvTranspose2d(64, 32, 2, 2, groups=2), IMAGE),
    "conv_transpose2d_channels_last": (
        lambda: nn.ConvTranspose2d(64, 32, 2, 2).to(memory_format=torch.channels_last),
        IMAGE_LAST,
    ),
    "conv3d": (lambda: nn.Conv3d(16, 32, 3, padding=1), VOLUME),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(16, 8, 2, 2), VOLUME),
}
for _name, (_make, _input) in _LAYERS.items():
    module(f"both_{_name}", _make, _input, run=_both)
for _name in ("conv2d_channels_last", "conv_transpose2d", "conv_transpose2d_channels_last"):
    module(f"penalty_{_name}", *_LAYERS[_name], run=_penalty)
    module(f"meta_{_name}", *_LAYERS[_name], run=_meta)


def _critic() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.InstanceNorm2d(64, affine=True),
        nn.LeakyReLU(0.2), nn.Conv2d(64, 1, 4),
    )  # fmt: skip


module("penalty_critic", _critic, t(16, 3, 32, 32), run=_penalty)
module("penalty_critic_last", lambda: _critic().to(memory_format=torch.channels_last), t(16, 3, 32, 32), run=_penalty)
