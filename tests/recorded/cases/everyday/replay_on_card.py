"""Soft actor-critic on a toy environment, its transitions kept on the GPU in a list that grows."""

import copy
import random

import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
device = "cuda"
S, A = 64, 8


def mlp(i, o, h=256):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


actor, q1, q2 = mlp(S, 2 * A).to(device), mlp(S + A, 1).to(device), mlp(S + A, 1).to(device)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
log_alpha = torch.zeros(1, requires_grad=True, device=device)
oa = torch.optim.Adam(actor.parameters(), 3e-4)
oq = torch.optim.Adam(list(q1.parameters()) + list(q2.parameters()), 3e-4)
ol = torch.optim.Adam([log_alpha], 3e-4)


def act(s):
    mu, ls = actor(s).chunk(2, -1)
    d = torch.distributions.Normal(mu, ls.clamp(-20, 2).exp())
    u = d.rsample()
    a = torch.tanh(u)
    return a, (d.log_prob(u) - torch.log(1 - a**2 + 1e-6)).sum(-1, keepdim=True)


buffer = []
state = torch.randn(S)
for step in range(400):
    with torch.no_grad():
        a, _ = act(state.to(device).unsqueeze(0))
    action = a.squeeze(0).cpu()
    nxt, reward, done = torch.randn(S), random.random(), step % 50 == 49
    buffer.append(
        (
            state.to(device),
            action.to(device),
            torch.tensor([reward], device=device),
            nxt.to(device),
            torch.tensor([float(done)], device=device),
        )
    )
    state = torch.randn(S) if done else nxt
    if len(buffer) < 128:
        continue
    s, a, r, n, d = map(torch.stack, zip(*random.sample(buffer, 128)))
    with torch.no_grad():
        na, nl = act(n)
        target = r + 0.99 * (1 - d) * (
            torch.min(t1(torch.cat([n, na], 1)), t2(torch.cat([n, na], 1))) - log_alpha.exp() * nl
        )
    sa = torch.cat([s, a], 1)
    lq = nn.functional.mse_loss(q1(sa), target) + nn.functional.mse_loss(q2(sa), target)
    oq.zero_grad()
    lq.backward()
    oq.step()
    pa, pl = act(s)
    la = (log_alpha.exp().detach() * pl - torch.min(q1(torch.cat([s, pa], 1)), q2(torch.cat([s, pa], 1)))).mean()
    oa.zero_grad()
    la.backward()
    oa.step()
    ll = -(log_alpha * (pl.detach() - A)).mean()
    ol.zero_grad()
    ll.backward()
    ol.step()
    with torch.no_grad():
        for p, t in zip([*q1.parameters(), *q2.parameters()], [*t1.parameters(), *t2.parameters()]):
            t.mul_(0.995).add_(p, alpha=0.005)
    if step % 100 == 0:
        print(step, lq.item(), la.item())
