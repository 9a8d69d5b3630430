"""A range test of the learning rate on a copy of the weights, then training with them as they were."""

import copy
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(960, 128, 16), torch.randint(0, 6, (960,))), batch_size=32, shuffle=True)


class Mixer(nn.Module):
    def __init__(self, d=16, n=128, h=512):
        super().__init__()
        self.token = nn.Sequential(nn.Linear(n, h), nn.GELU(), nn.Linear(h, n))
        self.channel = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, d))
        self.out = nn.Linear(d, 6)

    def forward(self, x):
        x = x + self.token(x.transpose(1, 2)).transpose(1, 2)
        return self.out((x + self.channel(x)).mean(1))


def find_lr(model, start=1e-6, end=1.0, iterations=60):
    saved = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=start)
    factor, losses, data = (end / start) ** (1 / iterations), [], iter(loader)
    for _ in range(iterations):
        try:
            x, y = next(data)
        except StopIteration:
            data = iter(loader)
            x, y = next(data)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] *= factor
        if math.isnan(losses[-1]):
            break
    model.load_state_dict(saved)
    return min(zip(losses, range(len(losses))))[1]


model = Mixer().cuda()
print("best at", find_lr(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
print("done")
