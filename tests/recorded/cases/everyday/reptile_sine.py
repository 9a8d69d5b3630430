"""Reptile on sine waves: inner steps on a copy of the network, the outer step moves towards it."""

import copy
import math

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1)).cuda()
outer, inner = 0.1, 0.02


def wave():
    a, p = torch.rand(1).item() * 4.9 + 0.1, torch.rand(1).item() * 2 * math.pi
    return lambda x: a * torch.sin(x + p)


def fit(model, f, x, steps):
    opt = torch.optim.SGD(model.parameters(), lr=inner)
    for _ in range(steps):
        i = torch.randperm(len(x))[:10]
        loss = ((model(x[i]) - f(x[i])) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss


xs = torch.linspace(-5, 5, 5000)[:, None].cuda()
for iteration in range(60):
    f = wave()
    before = copy.deepcopy(net.state_dict())
    fit(net, f, xs, 8)
    after = net.state_dict()
    rate = outer * (1 - iteration / 60)
    net.load_state_dict({n: before[n] + (after[n] - before[n]) * rate for n in before})
    if iteration % 20 == 0:
        kept = copy.deepcopy(net.state_dict())
        g = wave()
        fit(net, g, xs[:2000], 32)
        with torch.no_grad():
            print(iteration, ((net(xs) - g(xs)) ** 2).mean().item())
        net.load_state_dict(kept)
