"""A world model in Dreamer's manner: RSSM with categorical states, symlog, two-hot critic, imagination, slow critic, percentile returns."""

import copy

import numpy as np
import torch
import torch.distributions as td
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
np.random.seed(0)
device = torch.device("cuda")
B, T, H, A, DET, CAT, CLS = 16, 24, 12, 6, 512, 32, 32


def symlog(x):
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x):
    return torch.sign(x) * (torch.exp(torch.abs(x)) - 1)


class Replay:
    """Ring buffer kept on the card, frames as uint8."""

    def __init__(self, n):
        self.obs = torch.zeros(n, 3, 64, 64, dtype=torch.uint8, device=device)
        self.act = torch.zeros(n, A, device=device)
        self.rew = torch.zeros(n, device=device)
        self.done = torch.zeros(n, dtype=torch.bool, device=device)
        self.i, self.n, self.full = 0, n, False

    def add(self, o, a, r, d):
        self.obs[self.i].copy_(torch.as_tensor(o))
        self.act[self.i] = a
        self.rew[self.i] = r
        self.done[self.i] = bool(d)
        self.i = (self.i + 1) % self.n

    def sample(self):
        st = torch.randint(0, self.i - T, (B,), device=device)
        idx = st[:, None] + torch.arange(T, device=device)[None]
        return self.obs[idx].float() / 255.0 - 0.5, self.act[idx], self.rew[idx], self.done[idx].float()


class Encoder(nn.Sequential):
    def __init__(self, d=32):
        ls, c = [], 3
        for k in (d, 2 * d, 4 * d, 8 * d):
            ls += [nn.Conv2d(c, k, 4, 2, 1, bias=False), nn.GroupNorm(1, k), nn.SiLU()]
            c = k
        super().__init__(*ls, nn.Flatten())


class Decoder(nn.Module):
    def __init__(self, inp, d=32):
        super().__init__()
        self.fc = nn.Linear(inp, 8 * d * 16)
        self.d = d
        self.net = nn.Sequential(
            nn.ConvTranspose2d(8 * d, 4 * d, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(4 * d, 2 * d, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * d, d, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(d, 3, 4, 2, 1),
        )

    def forward(self, x):
        return self.net(self.fc(x).view(-1, 8 * self.d, 4, 4))


def mlp(i, o, h=512, n=2):
    ls = []
    for _ in range(n):
        ls += [nn.Linear(i, h, bias=False), nn.LayerNorm(h), nn.SiLU()]
        i = h
    return nn.Sequential(*ls, nn.Linear(i, o))


class RSSM(nn.Module):
    def __init__(self, emb):
        super().__init__()
        self.inp = nn.Sequential(nn.Linear(CAT * CLS + A, DET), nn.LayerNorm(DET), nn.SiLU())
        self.cell = nn.GRUCell(DET, DET)
        self.prior_net = mlp(DET, CAT * CLS, n=1)
        self.post_net = mlp(DET + emb, CAT * CLS, n=1)

    def dist(self, logit):
        logit = logit.view(*logit.shape[:-1], CAT, CLS)
        p = 0.99 * logit.softmax(-1) + 0.01 / CLS
        return td.Independent(td.OneHotCategoricalStraightThrough(probs=p), 1)

    def step(self, h, z, a):
        return self.cell(self.inp(torch.cat([z, a], -1)), h)

    def observe(self, e, a, first):
        h = e.new_zeros(e.size(0), DET)
        z = e.new_zeros(e.size(0), CAT * CLS)
        hs, zs, pri, pos = [], [], [], []
        for t in range(e.size(1)):
            m = (1 - first[:, t])[:, None]
            h = self.step(h * m, z * m, a[:, t] * m)
            pl = self.prior_net(h)
            ql = self.post_net(torch.cat([h, e[:, t]], -1))
            z = self.dist(ql).rsample().flatten(-2)
            hs.append(h)
            zs.append(z)
            pri.append(pl)
            pos.append(ql)
        return [torch.stack(x, 1) for x in (hs, zs, pri, pos)]

    def imagine(self, h, z, actor):
        fs, acts = [torch.cat([h, z], -1)], []
        for _ in range(H):
            d = td.OneHotCategorical(logits=actor(fs[-1].detach()))
            a = d.sample()
            acts.append(a)
            h = self.step(h, z, a)
            z = self.dist(self.prior_net(h)).rsample().flatten(-2)
            fs.append(torch.cat([h, z], -1))
        return torch.stack(fs), torch.stack(acts)


class TwoHot:
    def __init__(self, logits):
        self.l = logits
        self.b = torch.linspace(-20, 20, 255, device=logits.device)

    @property
    def mean(self):
        return symexp((self.l.softmax(-1) * self.b).sum(-1))

    def log_prob(self, x):
        x = symlog(x)
        below = (self.b <= x[..., None]).to(torch.int32).sum(-1) - 1
        above = 255 - (self.b > x[..., None]).to(torch.int32).sum(-1)
        below, above = below.clip(0, 254), above.clip(0, 254)
        eq = below == above
        db = torch.where(eq, 1, (self.b[below] - x).abs())
        da = torch.where(eq, 1, (self.b[above] - x).abs())
        tot = db + da
        t = F.one_hot(below.long(), 255) * (da / tot)[..., None] + F.one_hot(above.long(), 255) * (db / tot)[..., None]
        return (t * self.l.log_softmax(-1)).sum(-1)


enc, dec = Encoder().to(device), None
feat = DET + CAT * CLS
rssm = RSSM(256 * 16).to(device)
dec = Decoder(feat).to(device)
reward, cont = mlp(feat, 255).to(device), mlp(feat, 1).to(device)
actor, critic = mlp(feat, A).to(device), mlp(feat, 255).to(device)
slow = copy.deepcopy(critic).requires_grad_(False)
world = nn.ModuleList([enc, rssm, dec, reward, cont])
wo = torch.optim.Adam(world.parameters(), 1e-4, eps=1e-8)
ao, co = torch.optim.Adam(actor.parameters(), 3e-5, eps=1e-5), torch.optim.Adam(critic.parameters(), 3e-5, eps=1e-5)
buf = Replay(5000)
rng = np.random.RandomState(1)
ema_lo = ema_hi = torch.zeros((), device=device)


def kl(l, r, free=1.0):
    a, b = rssm.dist(l), rssm.dist(r)
    return (
        td.kl.kl_divergence(
            td.Independent(td.OneHotCategorical(logits=a.base_dist.logits), 1),
            td.Independent(td.OneHotCategorical(logits=b.base_dist.logits), 1),
        )
        .clamp(min=free)
        .mean()
    )


h, z, last = (
    torch.zeros(1, DET, device=device),
    torch.zeros(1, CAT * CLS, device=device),
    torch.zeros(1, A, device=device),
)
for step in range(72):
    obs = rng.randint(0, 256, (3, 64, 64), dtype=np.uint8)
    with torch.no_grad():
        if step < 40:
            a = F.one_hot(torch.randint(A, (1,), device=device), A).float()
        else:
            e = enc(torch.from_numpy(obs).to(device).float()[None] / 255 - 0.5)
            h = rssm.step(h, z, last)
            z = rssm.dist(rssm.post_net(torch.cat([h, e], -1))).sample().flatten(-2)
            a = td.OneHotCategorical(logits=actor(torch.cat([h, z], -1))).sample()
        last = a
    buf.add(obs, a[0], float(rng.randn()), rng.rand() < 0.02)
    if step >= 40 and step % 16 == 0:
        o, ac, r, d = buf.sample()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            e = enc(o.flatten(0, 1)).unflatten(0, (B, T)).float()
        first = torch.cat([torch.ones_like(d[:, :1]), d[:, :-1]], 1)
        hs, zs, pri, pos = rssm.observe(e, ac, first)
        f = torch.cat([hs, zs], -1)
        rec = F.mse_loss(dec(f.flatten(0, 1)), o.flatten(0, 1), reduction="none").sum((1, 2, 3)).mean()
        rl = -TwoHot(reward(f)).log_prob(r).mean()
        cl = F.binary_cross_entropy_with_logits(cont(f).squeeze(-1), 1 - d)
        loss = rec + rl + cl + 0.5 * kl(pos.detach(), pri) + 0.1 * kl(pos, pri.detach())
        wo.zero_grad(set_to_none=True)
        loss.backward()
        gn = nn.utils.clip_grad_norm_(world.parameters(), 1000.0)
        wo.step()
        world.requires_grad_(False)
        fs, acts = rssm.imagine(hs.detach().flatten(0, 1), zs.detach().flatten(0, 1), actor)
        with torch.no_grad():
            rew = TwoHot(reward(fs)).mean[1:]
            c = 0.997 * torch.sigmoid(cont(fs)).squeeze(-1)[1:]
            v = TwoHot(slow(fs)).mean
            ret, out = v[-1], []
            for t in reversed(range(H)):
                ret = rew[t] + c[t] * (0.05 * v[t + 1] + 0.95 * ret)
                out.append(ret)
            ret = torch.stack(out[::-1])
            ema_lo = 0.99 * ema_lo + 0.01 * torch.quantile(ret, 0.05)
            ema_hi = 0.99 * ema_hi + 0.01 * torch.quantile(ret, 0.95)
            w = torch.cumprod(torch.cat([torch.ones_like(c[:1]), c[:-1]]), 0)
            adv = (ret - v[:-1]) / torch.clip(ema_hi - ema_lo, min=1.0)
        pi = td.OneHotCategorical(logits=actor(fs[:-1].detach()))
        al = -(w * (pi.log_prob(acts) * adv + 3e-4 * pi.entropy())).mean()
        ao.zero_grad()
        al.backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 100.0)
        ao.step()
        vd = TwoHot(critic(fs[:-1].detach()))
        vl = -(w * (vd.log_prob(ret) + vd.log_prob(TwoHot(slow(fs[:-1])).mean.detach()))).mean()
        co.zero_grad()
        vl.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 100.0)
        co.step()
        world.requires_grad_(True)
        with torch.no_grad():
            for s, q in zip(slow.parameters(), critic.parameters()):
                s.lerp_(q, 0.02)
        print(step, f"world {loss.item():.1f} actor {al.item():.4f} value {vl.item():.3f} grad {gn:.2f}")
print(torch.cuda.max_memory_allocated() / 1e6, "MB")
