"""MAML with torch.func, then per-sample gradients with vmap, then an ensemble with stacked state."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, stack_module_state, vmap

torch.manual_seed(0)
np.random.seed(0)
device = "cuda"


class Net(nn.Module):
    def __init__(self, ways=5):
        super().__init__()
        block = lambda i, o: nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body, self.head = nn.Sequential(block(1, 32), block(32, 32), block(32, 32)), nn.Linear(32 * 3 * 3, ways)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def tasks(n, shots=5, ways=5):
    x = torch.tensor(np.random.rand(n, shots * ways, 1, 28, 28), dtype=torch.float32, device=device)
    y = torch.tensor(np.tile(np.repeat(np.arange(ways), shots), (n, 1)), device=device)
    return x, y


net = Net().to(device)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for it in range(3):
    xs, ys = tasks(4)
    xq, yq = tasks(4)
    opt.zero_grad()
    losses, accs = [], []
    for t in range(4):
        params = dict(net.named_parameters())
        for _ in range(3):
            loss = F.cross_entropy(functional_call(net, params, (xs[t],)), ys[t])
            g = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {k: p - 0.1 * d for (k, p), d in zip(params.items(), g)}
        out = functional_call(net, params, (xq[t],))
        qloss = F.cross_entropy(out, yq[t])
        losses.append(qloss.detach())
        accs.append((out.argmax(1) == yq[t]).sum().item() / out.shape[0])
        qloss.backward()
    opt.step()
    print(it, (sum(losses) / 4).item(), 100 * sum(accs) / 4)

params = {k: v.detach() for k, v in net.named_parameters()}


def one_loss(params, x, y):
    return F.cross_entropy(functional_call(net, params, (x.unsqueeze(0),)), y.unsqueeze(0))


x, y = tasks(1)
per_sample = vmap(grad(one_loss), in_dims=(None, 0, 0))(params, x[0], y[0])
norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_sample.values()]).norm(dim=0)
clip = (1.0 / (norms + 1e-6)).clamp(max=1.0)
summed = {k: torch.einsum("b...,b->...", g, clip) for k, g in per_sample.items()}
print(len(summed))
models = [Net().to(device) for _ in range(4)]
sp, sb = stack_module_state(models)
base = copy.deepcopy(models[0]).to("meta")
pred = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(sp, sb, x[0])
print(pred.shape)
