"""VQ-VAE with an EMA codebook, perplexity and dead-code restarts; then a gated PixelCNN on the codes."""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.99, eps=1e-5):
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input):
        flatten = input.reshape(-1, self.dim)
        dist_ = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        _, ind = (-dist_).max(1)
        onehot = F.one_hot(ind, self.n_embed).type(flatten.dtype)
        ind = ind.view(*input.shape[:-1])
        quantize = F.embedding(ind, self.embed.transpose(0, 1))
        if self.training:
            onehot_sum, embed_sum = onehot.sum(0), flatten.transpose(0, 1) @ onehot
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(onehot_sum)
                dist.all_reduce(embed_sum)
            self.cluster_size.data.mul_(self.decay).add_(onehot_sum, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.data.copy_(self.embed_avg / size.unsqueeze(0))
        probs = onehot.mean(0)
        perplexity = torch.exp(-torch.sum(probs * torch.log(probs + 1e-10)))
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff, ind, perplexity


class ResBlock(nn.Module):
    def __init__(self, c, hidden):
        super().__init__()
        self.conv = nn.Sequential(
            nn.ReLU(), nn.Conv2d(c, hidden, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(hidden, c, 1)
        )

    def forward(self, x):
        out = self.conv(x)
        out += x
        return out


class VQVAE(nn.Module):
    def __init__(self, c=64, n_res=2, hidden=32, embed_dim=32, n_embed=256):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, c // 2, 4, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(c // 2, c, 4, 2, 1), nn.ReLU(inplace=True),
            nn.Conv2d(c, c, 3, padding=1), *(ResBlock(c, hidden) for _ in range(n_res)), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.to_code, self.quantize, self.from_code = (
            nn.Conv2d(c, embed_dim, 1),
            Quantize(embed_dim, n_embed),
            nn.Conv2d(embed_dim, c, 3, padding=1),
        )
        self.dec = nn.Sequential(
            *(ResBlock(c, hidden) for _ in range(n_res)), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(c, c // 2, 4, 2, 1), nn.ReLU(inplace=True), nn.ConvTranspose2d(c // 2, 3, 4, 2, 1),
        )  # fmt: skip

    def encode(self, x):
        quant, diff, ind, perplexity = self.quantize(self.to_code(self.enc(x)).permute(0, 2, 3, 1))
        return quant.permute(0, 3, 1, 2), diff.unsqueeze(0), ind, perplexity

    def forward(self, x):
        quant, diff, ind, perplexity = self.encode(x)
        return self.dec(self.from_code(quant)), diff, ind, perplexity


class GatedMaskedConv(nn.Conv2d):
    def __init__(self, kind, cin, cout, k):
        super().__init__(cin, 2 * cout, k, padding=k // 2)
        mask = torch.ones_like(self.weight)
        mask[:, :, k // 2, k // 2 + (kind == "B") :] = 0
        mask[:, :, k // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        self.weight.data *= self.mask
        a, b = super().forward(x).chunk(2, 1)
        return torch.tanh(a) * torch.sigmoid(b)


class PixelCNN(nn.Module):
    def __init__(self, n_embed, dim=48, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(n_embed, dim)
        self.layers = nn.ModuleList(
            GatedMaskedConv("A" if i == 0 else "B", dim, dim, 7 if i == 0 else 3) for i in range(layers)
        )
        self.out = nn.Sequential(nn.Conv2d(dim, 128, 1), nn.ReLU(True), nn.Conv2d(128, n_embed, 1))

    def forward(self, codes):
        x = self.embedding(codes).permute(0, 3, 1, 2)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i == 0 else x + layer(x)
        return self.out(x)

    @torch.no_grad()
    def sample(self, shape, device):
        codes = torch.zeros(shape, dtype=torch.long, device=device)
        for i in range(shape[1]):
            for j in range(shape[2]):
                probs = F.softmax(self(codes)[:, :, i, j], -1)
                codes[:, i, j].copy_(probs.multinomial(1).squeeze(-1))
        return codes


class Noise(Dataset):
    def __init__(self, n):
        self.x = np.random.default_rng(3).random((n, 32, 32, 3)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.tensor(self.x[i]).permute(2, 0, 1), i


torch.manual_seed(0)
device = "cuda"
data = Noise(90)
loader = DataLoader(data, batch_size=24, sampler=RandomSampler(data), pin_memory=True, drop_last=True)
model = VQVAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
usage = torch.zeros(256, device=device)
mse_sum, mse_n = 0, 0
for epoch in range(2):
    for i, (img, _) in enumerate(loader):
        model.zero_grad()
        img = img.to(device)
        out, latent_loss, ind, perplexity = model(img)
        recon_loss, latent_loss = F.mse_loss(out, img), latent_loss.mean()
        (recon_loss + 0.25 * latent_loss).backward()
        optimizer.step()
        usage += torch.bincount(ind.flatten(), minlength=256)
        mse_sum += recon_loss.item() * img.shape[0]
        mse_n += img.shape[0]
        if i % 2 == 0:
            print(f"epoch {epoch}; mse {mse_sum / mse_n:.5f}; latent {latent_loss.item():.3f}; {perplexity.item():.1f}")
    with torch.no_grad():
        dead = usage < 1
        fresh = (
            model.to_code(model.enc(img)).permute(0, 2, 3, 1).reshape(-1, 32)[torch.randperm(1536, device=device)[:256]]
        )
        model.quantize.embed.copy_(torch.where(dead[None], fresh.t(), model.quantize.embed))
        usage.zero_()
model.eval()
codes = []
with torch.no_grad():
    for img, _ in DataLoader(data, 32):
        codes.append(model.encode(img.to(device))[2].cpu())
codes = torch.cat(codes)
prior = PixelCNN(256).to(device)
popt = torch.optim.AdamW(prior.parameters(), lr=1e-3)
for batch in codes.split(32):
    batch = batch.to(device)
    loss = F.cross_entropy(prior(batch), batch)
    popt.zero_grad()
    loss.backward()
    popt.step()
    print("prior", loss.item())
drawn = prior.sample((4, 8, 8), device)
with torch.no_grad():
    pictures = model.dec(model.from_code(F.embedding(drawn, model.quantize.embed.t()).permute(0, 3, 1, 2)))
print(pictures.clamp(0, 1).cpu().numpy().shape)
