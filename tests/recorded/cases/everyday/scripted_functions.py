"""Scripted functions between ordinary layers: a GELU and a dropout-add, as Megatron's fused functions are."""

import torch
from torch import nn


@torch.jit.script
def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def bias_dropout_add(x, bias, residual, prob: float, training: bool):
    out = torch.nn.functional.dropout(x + bias, p=prob, training=training)
    return residual + out


torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.b1, self.b2 = nn.Parameter(torch.zeros(4 * d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        h = bias_gelu(self.b1, self.up(self.norm(x)))
        return bias_dropout_add(self.down(h), self.b2.expand_as(x), x, 0.1, self.training)


net = nn.Sequential(*(Block(256) for _ in range(4)), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(6):
    x = torch.randn(16, 256, 256, device="cuda")
    loss = net(x).float().mean((0, 1)).logsumexp(-1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
