"""A denoising diffusion trainer: U-Net with time embedding, endless loader, EMA copy, sampling at the end."""

import argparse
import copy
import math
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def cycle(dl):
    while True:
        for data in dl:
            yield data


class Images(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, self.size, self.size)


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half = self.dim // 2
        emb = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.conv1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(8, dim_out)
        self.conv2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(8, dim_out)
        self.res = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, t):
        scale, shift = self.mlp(t)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm1(self.conv1(x)) * (scale + 1) + shift)
        return F.silu(self.norm2(self.conv2(h))) + self.res(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, dim)
        self.to_qkv = nn.Conv2d(dim, dim * 3, 1, bias=False)
        self.to_out = nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(self.norm(x)).reshape(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2)
        q, k, v = qkv.unbind(1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.to_out(out.transpose(-1, -2).reshape(b, c, h, w))


class Unet(nn.Module):
    def __init__(self, dim=32, mults=(1, 2, 4)):
        super().__init__()
        time_dim = dim * 4
        self.init_conv = nn.Conv2d(3, dim, 7, padding=3)
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        dims = [dim, *(dim * m for m in mults)]
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for i, (a, b) in enumerate(zip(dims[:-1], dims[1:])):
            last = i == len(mults) - 1
            down = nn.Conv2d(a, b, 3, padding=1) if last else nn.Conv2d(a, b, 4, 2, 1)
            self.downs.append(nn.ModuleList([ResnetBlock(a, a, time_dim), ResnetBlock(a, a, time_dim), down]))
        self.mid1, self.attn = ResnetBlock(dims[-1], dims[-1], time_dim), Attention(dims[-1])
        self.mid2 = ResnetBlock(dims[-1], dims[-1], time_dim)
        for i, (a, b) in enumerate(reversed(list(zip(dims[:-1], dims[1:])))):
            last = i == len(mults) - 1
            up = (
                nn.Conv2d(b, a, 3, padding=1)
                if last
                else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 3, padding=1))
            )
            self.ups.append(nn.ModuleList([ResnetBlock(a + b, b, time_dim), ResnetBlock(a + b, b, time_dim), up]))
        self.final = nn.Conv2d(dim, 3, 1)

    def forward(self, x, time):
        x, t, h = self.init_conv(x), self.time_mlp(time), []
        for block1, block2, down in self.downs:
            x = block1(x, t)
            h.append(x)
            x = block2(x, t)
            h.append(x)
            x = down(x)
        x = self.mid2(self.attn(self.mid1(x, t)), t)
        for block1, block2, up in self.ups:
            x = block1(torch.cat((x, h.pop()), dim=1), t)
            x = block2(torch.cat((x, h.pop()), dim=1), t)
            x = up(x)
        return self.final(x)


class GaussianDiffusion(nn.Module):
    def __init__(self, model, image_size, timesteps=1000):
        super().__init__()
        self.model, self.image_size, self.num_timesteps = model, image_size, timesteps
        betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        for name, value in {
            "betas": betas,
            "alphas_cumprod": alphas_cumprod,
            "sqrt_alphas_cumprod": torch.sqrt(alphas_cumprod),
            "sqrt_one_minus_alphas_cumprod": torch.sqrt(1.0 - alphas_cumprod),
        }.items():
            self.register_buffer(name, value.to(torch.float32))

    def extract(self, a, t, shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        x_start = img * 2 - 1
        noise = torch.randn_like(x_start)
        x = self.extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
        x = x + self.extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        loss = F.mse_loss(self.model(x, t), noise, reduction="none")
        return loss.flatten(1).mean(1).mean()

    @torch.inference_mode()
    def sample(self, batch_size, steps):
        device = self.betas.device
        img = torch.randn((batch_size, 3, self.image_size, self.image_size), device=device)
        for t in reversed(range(0, steps)):
            times = torch.full((batch_size,), t, device=device, dtype=torch.long)
            pred = self.model(img, times)
            alpha = self.extract(self.alphas_cumprod, times, img.shape)
            beta = self.extract(self.betas, times, img.shape)
            mean = (img - beta / (1 - alpha).sqrt() * pred) / (1 - beta).sqrt()
            img = mean + beta.sqrt() * torch.randn_like(img) if t > 0 else mean
        return (img.clamp(-1, 1) + 1) / 2


class EMA:
    def __init__(self, model, beta=0.995):
        self.beta, self.online = beta, model
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.ema_model.eval()

    @torch.no_grad()
    def update(self):
        for ma, p in zip(self.ema_model.parameters(), self.online.parameters()):
            ma.lerp_(p, 1 - self.beta)
        for ma, b in zip(self.ema_model.buffers(), self.online.buffers()):
            ma.copy_(b)


class Trainer:
    def __init__(self, diffusion, args):
        self.args, self.device = args, torch.device("cuda")
        self.model = diffusion.to(self.device)
        self.ds = Images(args.images, args.image_size)
        self.dl = cycle(DataLoader(self.ds, batch_size=args.batch_size, shuffle=True, pin_memory=True, num_workers=0))
        self.opt = torch.optim.Adam(diffusion.parameters(), lr=8e-5, betas=(0.9, 0.99))
        self.ema = EMA(self.model)
        self.step = 0

    def train(self):
        while self.step < self.args.train_num_steps:
            total_loss = 0.0
            for _ in range(self.args.gradient_accumulate_every):
                data = next(self.dl).to(self.device)
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.args.amp):
                    loss = self.model(data) / self.args.gradient_accumulate_every
                    total_loss += loss.item()
                loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.ema.update()
            print(f"loss: {total_loss:.4f}")
        images = self.ema.ema_model.sample(self.args.samples, self.args.sampling_steps)
        path = os.path.join(self.args.results, "model.pt")
        torch.save({"step": self.step, "model": self.model.state_dict(), "ema": self.ema.ema_model.state_dict()}, path)
        os.remove(path)
        print(tuple(images.cpu().shape))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-num-steps", type=int, default=700_000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--gradient-accumulate-every", type=int, default=2)
    parser.add_argument("--sampling-steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--results", default=tempfile.gettempdir())
    args = parser.parse_args()
    Trainer(GaussianDiffusion(Unet(), args.image_size), args).train()
