"""A text-conditioned diffusion UNet of Stable Diffusion's shape (arXiv 2112.10752), at half its width.

Latents of 64 x 64, 77 text tokens of width 768; residual blocks that know the time, attention to the image and to the
text on the three upper levels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .recipe import Device, Recipe

WIDTHS, ATTENTION_LEVELS, HEADS = (160, 320, 640, 640), 3, 8
LATENT_CHANNELS, LATENT_SIDE, TEXT_LENGTH, TEXT_WIDTH = 4, 64, 77, 768


class TimedBlock(nn.Module):
    """Two 3x3 convolutions with group norm; the time is added between them."""

    def __init__(self, channels: int, width: int, time_width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, width)
        self.conv1, self.conv2 = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time_width, width)
        self.shortcut = nn.Conv2d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        y = y + self.time(functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class Attention(nn.Module):
    """Multi-head attention of a sequence to another, or to itself."""

    def __init__(self, width: int, context_width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(context_width, width, bias=False) for _ in range(2))
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(context), self.value(context))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.project(mixed.transpose(1, 2).flatten(2))


class TextBlock(nn.Module):
    """Attention to the image, attention to the text, and a gated perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.image, self.text = Attention(width, width), Attention(width, TEXT_WIDTH)
        self.widen, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        x = image.flatten(2).transpose(1, 2)
        y = self.norms[0](x)
        x = x + self.image(y, y)
        x = x + self.text(self.norms[1](x), text)
        value, gate = self.widen(self.norms[2](x)).chunk(2, dim=-1)
        x = x + self.narrow(value * functional.gelu(gate))
        return x.transpose(1, 2).unflatten(2, image.shape[2:])


class Level(nn.Module):
    """A residual block, then attention where the level has it."""

    def __init__(self, channels: int, width: int, time_width: int, *, attends: bool) -> None:
        super().__init__()
        self.block = TimedBlock(channels, width, time_width)
        self.text = TextBlock(width) if attends else None

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.block(x, time)
        return x if self.text is None else self.text(x, text)


class DiffusionUNet(nn.Module):
    """Two blocks a level on the way down, three on the way up; every output of the way down is used again."""

    def __init__(self) -> None:
        super().__init__()
        first, time_width = WIDTHS[0], 4 * WIDTHS[0]
        self.time = nn.Sequential(nn.Linear(first, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.enter = nn.Conv2d(LATENT_CHANNELS, first, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skipped, channels = [first], first
        for index, width in enumerate(WIDTHS):
            for _ in range(2):
                self.down.append(Level(channels, width, time_width, attends=index < ATTENTION_LEVELS))
                skipped.append(channels := width)
            if index + 1 < len(WIDTHS):
                self.down.append(nn.Conv2d(width, width, 3, 2, 1))
                skipped.append(width)
        self.middle = Level(channels, channels, time_width, attends=True)
        for index, width in reversed(list(enumerate(WIDTHS))):
            for _ in range(3):
                level = Level(channels + skipped.pop(), width, time_width, attends=index < ATTENTION_LEVELS)
                self.up.append(level)
                channels = width
            if index:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.leave = nn.Sequential(
            nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, LATENT_CHANNELS, 3, padding=1)
        )

    def forward(self, latents: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        time = self.time(sinusoids(steps, WIDTHS[0]))
        x = self.enter(latents)
        skipped = [x]
        for layer in self.down:
            x = layer(x, time, text) if isinstance(layer, Level) else layer(x)
            skipped.append(x)
        x = self.middle(x, time, text)
        for layer in self.up:
            if isinstance(layer, Level):
                x = layer(torch.cat([x, skipped.pop()], 1), time, text)
            else:
                x = layer(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.leave(x)


def sinusoids(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of ``steps``, a row of ``width`` each."""
    half = width // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, device=steps.device, dtype=torch.float32) / half)
    angles = steps[:, None].float() * rates[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _batch(batch: int, device: Device) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    latents = torch.zeros(batch, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE, device=device)
    steps = torch.zeros(batch, dtype=torch.long, device=device)
    text = torch.zeros(batch, TEXT_LENGTH, TEXT_WIDTH, device=device)
    return (latents, steps, text), torch.zeros_like(latents)


diffusion_unet = Recipe(DiffusionUNet, _batch, functional.mse_loss)
