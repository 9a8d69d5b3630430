"""Denoising diffusion from scratch: U-Net, EMA copy, sampling."""

import copy
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half = self.dim // 2
        emb = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, tdim):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.t = nn.Linear(tdim, cout)
        self.n2, self.c2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        h = h + self.t(F.silu(t))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, c, heads=4):
        super().__init__()
        self.norm, self.qkv, self.out, self.heads = (
            nn.GroupNorm(8, c),
            nn.Conv2d(c, 3 * c, 1),
            nn.Conv2d(c, c, 1),
            heads,
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        attn = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k).softmax(-1)
        return self.out(torch.einsum("bhij,bhdj->bhdi", attn, v).reshape(b, c, h, w)) + x


class Unet(nn.Module):
    def __init__(self, dim=32, mults=(1, 2, 4)):
        super().__init__()
        t = dim * 4
        self.time = nn.Sequential(SinusoidalPosEmb(dim), nn.Linear(dim, t), nn.GELU(), nn.Linear(t, t))
        self.inc = nn.Conv2d(3, dim, 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        dims = [dim] + [dim * m for m in mults]
        for i, o in zip(dims[:-1], dims[1:]):
            self.downs.append(nn.ModuleList([ResBlock(i, i, t), ResBlock(i, i, t), nn.Conv2d(i, o, 4, 2, 1)]))
        self.mid1, self.attn, self.mid2 = (
            ResBlock(dims[-1], dims[-1], t),
            Attention(dims[-1]),
            ResBlock(dims[-1], dims[-1], t),
        )
        for i, o in zip(reversed(dims[:-1]), reversed(dims[1:])):
            self.ups.append(
                nn.ModuleList([nn.ConvTranspose2d(o, i, 4, 2, 1), ResBlock(2 * i, i, t), ResBlock(i, i, t)])
            )
        self.out = nn.Sequential(nn.GroupNorm(8, dim), nn.SiLU(), nn.Conv2d(dim, 3, 1))

    def forward(self, x, time):
        t, x, hs = self.time(time), self.inc(x), []
        for a, b, down in self.downs:
            x = b(a(x, t), t)
            hs.append(x)
            x = down(x)
        x = self.mid2(self.attn(self.mid1(x, t)), t)
        for up, a, b in self.ups:
            x = b(a(torch.cat((up(x), hs.pop()), 1), t), t)
        return self.out(x)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_model_average(self, ma_model, current_model):
        for cur, ma in zip(current_model.parameters(), ma_model.parameters()):
            ma.data = ma.data * self.beta + (1 - self.beta) * cur.data


class Diffusion(nn.Module):
    def __init__(self, model, size, timesteps=20):
        super().__init__()
        self.model, self.size, self.T = model, size, timesteps
        betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
        ac = torch.cumprod(1 - betas, 0)
        reg = lambda n, v: self.register_buffer(n, v.to(torch.float32))
        (
            reg("betas", betas),
            reg("ac", ac),
            reg("sac", ac.sqrt()),
            reg("s1ac", (1 - ac).sqrt()),
            reg("sra", (1 / (1 - betas)).sqrt()),
        )

    def forward(self, x):
        b = x.shape[0]
        t = torch.randint(0, self.T, (b,), device=x.device).long()
        noise = torch.randn_like(x)
        xt = self.sac.gather(-1, t).view(b, 1, 1, 1) * x + self.s1ac.gather(-1, t).view(b, 1, 1, 1) * noise
        return F.mse_loss(self.model(xt, t), noise)

    @torch.inference_mode()
    def sample(self, n):
        img = torch.randn(n, 3, self.size, self.size, device=self.betas.device)
        for i in reversed(range(self.T)):
            t = torch.full((n,), i, device=img.device, dtype=torch.long)
            eps = self.model(img, t)
            mean = self.sra[i] * (img - self.betas[i] / self.s1ac[i] * eps)
            img = mean + (self.betas[i].sqrt() * torch.randn_like(img) if i > 0 else 0.0)
        return (img.clamp(-1, 1) + 1) * 0.5


def main():
    seed_all(7)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(torch.rand(48, 3, 32, 32) * 2 - 1)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    diffusion = Diffusion(Unet(), 32).to(device)
    ema_model = copy.deepcopy(diffusion)
    ema = EMA(0.995)
    opt = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
    for epoch in range(1):
        for step, (x,) in enumerate(loader):
            loss = diffusion(x.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(diffusion.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            ema.update_model_average(ema_model, diffusion)
            print(f"{epoch}/{step} loss {loss.item():.4f}")
    ema_model.eval()
    images = ema_model.sample(8)
    grid = (images.permute(0, 2, 3, 1).cpu().numpy() * 255).astype(np.uint8)
    print(grid.shape)


if __name__ == "__main__":
    main()
