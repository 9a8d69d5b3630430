"""Embeddings on a ball of learnt curvature: scripted functions that choose a formula by a value on the card."""

import torch
import torch.nn.functional as F
from torch import nn


@torch.jit.script
def artan_k(x: torch.Tensor, k: torch.Tensor):
    zero = torch.zeros((), device=k.device, dtype=k.dtype)
    is_flat = k.isclose(zero)
    sign = torch.masked_fill(k.sign(), is_flat, zero.to(k.dtype))
    if torch.all(is_flat):
        return x - k * x.pow(3) / 3
    root = k.abs().clamp_min(1e-15).sqrt()
    scaled = x * root
    if torch.all(sign.lt(0)):
        return scaled.clamp(-1 + 1e-7, 1 - 1e-7).atanh() / root
    return torch.where(k.gt(0), scaled.atan(), scaled.clamp(-1 + 1e-7, 1 - 1e-7).atanh()) / root


@torch.jit.script
def add(x: torch.Tensor, y: torch.Tensor, k: torch.Tensor):
    xx, yy, xy = x.pow(2).sum(-1, keepdim=True), y.pow(2).sum(-1, keepdim=True), (x * y).sum(-1, keepdim=True)
    above = (1 - 2 * k * xy - k * yy) * x + (1 + k * xx) * y
    return above / (1 - 2 * k * xy + k.pow(2) * xx * yy).clamp_min(1e-15)


@torch.jit.script
def distance(x: torch.Tensor, y: torch.Tensor, k: torch.Tensor):
    return 2.0 * artan_k(add(-x, y, k).norm(dim=-1, p=2), k)


class Ball(nn.Module):
    def __init__(self, count, size):
        super().__init__()
        self.table = nn.Parameter(torch.randn(count, size) * 1e-2)
        self.curvature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, child, others):
        return distance(self.table[child].unsqueeze(1), self.table[others], self.curvature)


def main():
    torch.manual_seed(0)
    model = Ball(20000, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(30):
        child = torch.randint(1, 20000, (1024,))
        others = torch.cat([((child - 1) // 4)[:, None], torch.randint(0, 20000, (1024, 30))], 1)
        scores = -model(child.cuda(), others.cuda())
        loss = F.cross_entropy(scores, torch.zeros(1024, dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item(), model.curvature.item())


main()
