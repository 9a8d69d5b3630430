"""A state-space language model by hand: depthwise convolution, a selective scan in a Python loop, then recurrent decoding."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class MambaBlock(nn.Module):
    def __init__(self, d, state=16, conv=4, expand=2):
        super().__init__()
        self.inner, self.state, self.rank = d * expand, state, math.ceil(d / 16)
        self.in_proj, self.out_proj = nn.Linear(d, 2 * self.inner, bias=False), nn.Linear(self.inner, d, bias=False)
        self.conv1d = nn.Conv1d(self.inner, self.inner, conv, groups=self.inner, padding=conv - 1)
        self.x_proj, self.dt_proj = (
            nn.Linear(self.inner, self.rank + 2 * state, bias=False),
            nn.Linear(self.rank, self.inner),
        )
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1, dtype=torch.float32).repeat(self.inner, 1)))
        self.D = nn.Parameter(torch.ones(self.inner))

    def forward(self, x):
        b, l, _ = x.shape
        u, z = self.in_proj(x).chunk(2, dim=-1)
        u = F.silu(self.conv1d(u.transpose(1, 2))[..., :l].transpose(1, 2))
        return self.out_proj(self.ssm(u) * F.silu(z))

    def ssm(self, u):
        A = -torch.exp(self.A_log.float())
        dt, B, C = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        dA = torch.exp(torch.einsum("bld,dn->bldn", dt, A))
        dBu = torch.einsum("bld,bln,bld->bldn", dt, B, u)
        h = torch.zeros(u.size(0), self.inner, self.state, device=u.device)
        ys = []
        for t in range(u.size(1)):
            h = dA[:, t] * h + dBu[:, t]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, t]))
        return torch.stack(ys, dim=1) + u * self.D

    def step(self, x, cache):
        h, window = cache
        u, z = self.in_proj(x).chunk(2, dim=-1)
        window = torch.cat([window[:, :, 1:], u.unsqueeze(-1)], dim=-1)
        u = F.silu(torch.sum(window * self.conv1d.weight.squeeze(1), dim=-1) + self.conv1d.bias)
        dt, B, C = self.x_proj(u).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        h = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log)) * h + (dt * u).unsqueeze(-1) * B.unsqueeze(1)
        y = (h @ C.unsqueeze(-1)).squeeze(-1) + self.D * u
        return self.out_proj(y * F.silu(z)), (h, window)


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class LM(nn.Module):
    def __init__(self, vocab=5000, d=256, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.norms, self.blocks = (
            nn.ModuleList(RMSNorm(d) for _ in range(layers)),
            nn.ModuleList(MambaBlock(d) for _ in range(layers)),
        )
        self.norm_f, self.head = RMSNorm(d), nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for n, b in zip(self.norms, self.blocks):
            x = x + b(n(x))
        return self.head(self.norm_f(x))

    @torch.no_grad()
    def generate(self, ids, steps):
        caches = [
            (
                torch.zeros(len(ids), b.inner, b.state, device=ids.device),
                torch.zeros(len(ids), b.inner, 4, device=ids.device),
            )
            for b in self.blocks
        ]
        out = []
        for i in range(ids.shape[1] + steps):
            token = ids[:, i] if i < ids.shape[1] else out[-1]
            x = self.embed(token)
            for k, (n, b) in enumerate(zip(self.norms, self.blocks)):
                y, caches[k] = b.step(n(x), caches[k])
                x = x + y
            if i >= ids.shape[1] - 1:
                out.append(self.head(self.norm_f(x)).argmax(-1))
        return torch.stack(out, 1)


torch.manual_seed(0)
device = torch.device("cuda")
model = LM().to(device)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(0, 5000, (6, 8, 97))
for i, batch in enumerate(data):
    batch = batch.to(device)
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), batch[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, loss.item())
model.eval()
print(model.generate(data[0, :4, :16].to(device), 100).shape)
