"""Elastic weight consolidation over five tasks, with a rehearsal memory on the GPU that grows task by task."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda"


def task(t):
    g = torch.Generator().manual_seed(t)
    return TensorDataset(torch.randn(600, 784, generator=g), torch.randint(0, 10, (600,), generator=g))


net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
fishers, anchors, memory = [], [], None


def penalty():
    total = 0.0
    for fisher, anchor in zip(fishers, anchors):
        for name, p in net.named_parameters():
            total = total + (fisher[name] * (p - anchor[name]) ** 2).sum()
    return total


for t in range(5):
    loader = DataLoader(task(t), batch_size=64, shuffle=True)
    for epoch in range(2):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            if memory is not None:
                i = torch.randint(0, len(memory[0]), (32,), device=device)
                x, y = torch.cat([x, memory[0][i]]), torch.cat([y, memory[1][i]])
            loss = F.cross_entropy(net(x), y) + 100 * penalty()
            opt.zero_grad()
            loss.backward()
            opt.step()
    fisher = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for x, y in DataLoader(task(t), batch_size=50):
        net.zero_grad()
        logp = F.log_softmax(net(x.to(device)), 1)
        F.nll_loss(logp, logp.argmax(1)).backward()
        for n, p in net.named_parameters():
            fisher[n] += p.grad.detach() ** 2 / 12
    fishers.append(fisher)
    anchors.append({n: p.detach().clone() for n, p in net.named_parameters()})
    mx, my = (v[:100].to(device) for v in task(t).tensors)
    memory = (mx, my) if memory is None else (torch.cat([memory[0], mx]), torch.cat([memory[1], my]))
    net.eval()
    with torch.no_grad():
        acc = [
            (net(task(k).tensors[0].to(device)).argmax(1).cpu() == task(k).tensors[1]).float().mean().item()
            for k in range(t + 1)
        ]
    net.train()
    print(t, acc)
