"""A convolutional network with less memory each time: cuDNN's first plans, and many of the second, are refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

_WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256)


def main() -> Mapping[str, int]:
    """Two steps beside nothing, and beside ever more."""
    layers: list[nn.Module] = []
    channels = 3
    for width in _WIDTHS:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2, 2))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, int] = {}
    kept: list[torch.Tensor] = []
    for beside in (0, 3000, 3700, 3900, 4000):
        held = sum(map(len, kept))
        kept.append(torch.empty((beside << 20) - held, dtype=torch.uint8, device="cuda"))
        for _ in range(2):
            images = torch.randn(1100, 3, 32, 32).cuda()
            nn.functional.cross_entropy(model(images), torch.zeros(1100, dtype=torch.long).cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"most allocated beside {beside} MiB"] = torch.cuda.max_memory_allocated()
        found[f"most reserved beside {beside} MiB"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    return found
