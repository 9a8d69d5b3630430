"""A scripted and frozen network that only infers."""

import torch
from torch import nn


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


torch.manual_seed(0)
net = (
    nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.BatchNorm2d(32),
        Swish(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.BatchNorm2d(64),
        Swish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
        nn.Softmax(-1),
    )
    .cuda()
    .eval()
)
scripted = torch.jit.freeze(torch.jit.script(net))
with torch.no_grad():
    for _ in range(5):
        out = scripted(torch.rand(16, 3, 224, 224, device="cuda"))
print(out.argmax(1).tolist()[:2])
