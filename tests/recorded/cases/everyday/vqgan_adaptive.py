"""A VQGAN: discriminator from some step on, adaptive weight by gradients of the last layer, images every few steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Res(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, c),
            nn.SiLU(),
            nn.Conv2d(c, c, 3, 1, 1),
            nn.GroupNorm(8, c),
            nn.SiLU(),
            nn.Conv2d(c, c, 3, 1, 1),
        )

    def forward(self, x):
        return x + self.body(x)


class VQ(nn.Module):
    def __init__(self, n, dim, beta=0.25):
        super().__init__()
        self.beta, self.embedding = beta, nn.Embedding(n, dim)
        self.embedding.weight.data.uniform_(-1 / n, 1 / n)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        w = self.embedding.weight
        d = flat.pow(2).sum(1, keepdim=True) + w.pow(2).sum(1) - 2 * flat @ w.t()
        idx = torch.argmin(d, 1)
        q = self.embedding(idx).view(z.shape)
        loss = ((q.detach() - z) ** 2).mean() + self.beta * ((q - z.detach()) ** 2).mean()
        q = z + (q - z).detach()
        return q.permute(0, 3, 1, 2).contiguous(), loss


class VQGAN(nn.Module):
    def __init__(self, c=64, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 3, 1, 1),
            Res(c),
            nn.Conv2d(c, c, 4, 2, 1),
            Res(c),
            nn.Conv2d(c, 2 * c, 4, 2, 1),
            Res(2 * c),
            nn.Conv2d(2 * c, dim, 1),
        )
        self.vq = VQ(512, dim)
        self.up = nn.Sequential(
            nn.Conv2d(dim, 2 * c, 1),
            Res(2 * c),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1),
            Res(c),
            nn.ConvTranspose2d(c, c, 4, 2, 1),
            Res(c),
            nn.GroupNorm(8, c),
            nn.SiLU(),
        )
        self.last = nn.Conv2d(c, 3, 3, 1, 1)

    def forward(self, x):
        q, loss = self.vq(self.encoder(x))
        return self.last(self.up(q)), loss

    def weight(self, perceptual, gan):
        last = self.last.weight
        p = torch.autograd.grad(perceptual, last, retain_graph=True)[0]
        g = torch.autograd.grad(gan, last, retain_graph=True)[0]
        return torch.clamp(torch.norm(p) / (torch.norm(g) + 1e-4), 0, 1e4).detach() * 0.8


def discriminator(c=64):
    layers = [nn.Conv2d(3, c, 4, 2, 1), nn.LeakyReLU(0.2)]
    for i in range(1, 3):
        layers += [
            nn.Conv2d(c * 2 ** (i - 1), c * 2**i, 4, 2, 1, bias=False),
            nn.BatchNorm2d(c * 2**i),
            nn.LeakyReLU(0.2, True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(c * 4, 1, 4, 1, 1))


def main():
    torch.manual_seed(0)
    gan, disc = VQGAN().cuda(), discriminator().cuda()
    opt_vq = torch.optim.Adam(gan.parameters(), 2e-4, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), 2e-4, betas=(0.5, 0.9))
    loader = DataLoader(TensorDataset(torch.rand(200, 3, 64, 64)), batch_size=12, shuffle=True)
    start = 8
    for epoch in range(2):
        for i, (imgs,) in enumerate(loader):
            imgs = imgs.to("cuda")
            decoded, q_loss = gan(imgs)
            real, fake = disc(imgs), disc(decoded)
            factor = 1.0 if epoch * len(loader) + i >= start else 0.0
            rec = torch.abs(imgs - decoded).mean()
            g_loss = -torch.mean(fake)
            lam = gan.weight(rec, g_loss)
            vq_loss = rec + q_loss + factor * lam * g_loss
            d_loss = factor * 0.5 * (torch.mean(F.relu(1.0 - real)) + torch.mean(F.relu(1.0 + fake)))
            opt_vq.zero_grad()
            vq_loss.backward(retain_graph=True)
            opt_d.zero_grad()
            d_loss.backward()
            opt_vq.step()
            opt_d.step()
            if i % 10 == 0:
                with torch.no_grad():
                    pair = torch.cat((imgs[:4], decoded.add(1).mul(0.5)[:4]))
                    print(epoch, i, pair.cpu().shape, vq_loss.item(), d_loss.item())


if __name__ == "__main__":
    main()
