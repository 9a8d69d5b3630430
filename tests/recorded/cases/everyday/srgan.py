"""Super-resolution GAN: residual blocks, pixel shuffle, perceptual loss, spectral norm, R1 penalty, PSNR."""

import math
import os
import tempfile
from collections import OrderedDict, defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

UPSCALE, PATCH, EPOCHS, R1_EVERY = 4, 64, 2, 2
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(8)


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1, self.prelu = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.PReLU(),
        )
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.prelu(self.bn1(self.conv1(x)))))


class Generator(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, 64, kernel_size=9, padding=4), nn.PReLU())
        self.body = nn.Sequential(*[ResidualBlock(64) for _ in range(4)])
        self.block7 = nn.Sequential(nn.Conv2d(64, 64, kernel_size=3, padding=1), nn.BatchNorm2d(64))
        tail = []
        for _ in range(int(math.log2(scale))):
            tail += [nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        self.tail = nn.Sequential(*tail, nn.Conv2d(64, 3, kernel_size=9, padding=4))

    def forward(self, x):
        first = self.block1(x)
        return (torch.tanh(self.tail(first + self.block7(self.body(first)))) + 1) / 2


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        layers = OrderedDict()
        cin = 3
        for i, (cout, stride) in enumerate(((32, 1), (32, 2), (64, 1), (64, 2), (128, 2))):
            layers[f"conv{i}"] = spectral_norm(nn.Conv2d(cin, cout, 3, stride, 1))
            layers[f"act{i}"] = nn.LeakyReLU(0.2)
            cin = cout
        layers["pool"], layers["fc1"] = nn.AdaptiveAvgPool2d(1), nn.Conv2d(cin, 256, 1)
        layers["act"], layers["fc2"] = nn.LeakyReLU(0.2), nn.Conv2d(256, 1, 1)
        self.net = nn.Sequential(layers)

    def forward(self, x):
        return self.net(x).view(x.size(0))


class TVLoss(nn.Module):
    def forward(self, x):
        h = torch.pow(x[:, :, 1:, :] - x[:, :, :-1, :], 2).sum()
        w = torch.pow(x[:, :, :, 1:] - x[:, :, :, :-1], 2).sum()
        return 2 * (h / x[:, :, 1:, :].numel() + w / x[:, :, :, 1:].numel()) / x.size(0)


features = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
).to(device).eval()  # fmt: skip
for param in features.parameters():
    param.requires_grad = False

netG, netD = Generator(UPSCALE).to(device), Discriminator().to(device)
print("# generator parameters:", sum(p.numel() for p in netG.parameters()))
optG = torch.optim.Adam(netG.parameters())
optD = torch.optim.Adam(netD.parameters(), betas=(0.0, 0.99))
tv, mse = TVLoss(), nn.MSELoss()
hr = torch.rand(40, 3, PATCH, PATCH)
loader = DataLoader(TensorDataset(F.interpolate(hr, scale_factor=1 / UPSCALE, mode="bicubic", antialias=True), hr), 16)
results, step = defaultdict(list), 0
out = tempfile.mkdtemp()
for epoch in range(1, EPOCHS + 1):
    running = defaultdict(float)
    netG.train()
    netD.train()
    for lr_img, target in loader:
        running["n"] += lr_img.size(0)
        real_img = target.to(device)
        z = lr_img.to(device)
        fake_img = netG(z)
        netD.zero_grad()
        real_img.requires_grad_(step % R1_EVERY == 0)
        real_out = netD(real_img)
        d_loss = F.softplus(-real_out).mean() + F.softplus(netD(fake_img.detach())).mean()
        if step % R1_EVERY == 0:
            (g,) = torch.autograd.grad(real_out.sum(), real_img, create_graph=True)
            d_loss = d_loss + 5.0 * g.square().sum((1, 2, 3)).mean()
        d_loss.backward()
        optD.step()
        real_img = real_img.detach()
        netG.zero_grad()
        adversarial = F.softplus(-netD(fake_img)).mean()
        g_loss = mse(fake_img, real_img) + 0.001 * adversarial + 0.006 * mse(features(fake_img), features(real_img))
        g_loss = g_loss + 2e-8 * tv(fake_img)
        g_loss.backward()
        optG.step()
        running["g"] += g_loss.item() * lr_img.size(0)
        running["d"] += d_loss.item() * lr_img.size(0)
        step += 1
    netG.eval()
    with torch.no_grad():
        for lr_img, target in loader:
            sr = netG(lr_img.to(device))
            bicubic = F.interpolate(lr_img.to(device), size=sr.shape[-2:], mode="bicubic", align_corners=False)
            error = ((sr - target.to(device)) ** 2).mean()
            running["psnr"] += 10 * math.log10(1.0 / max(error.item(), 1e-12))
            del bicubic
    torch.save(netG.state_dict(), os.path.join(out, f"netG_epoch_{UPSCALE}_{epoch}.pth"))
    results["psnr"].append(running["psnr"] / len(loader))
    print(f"[{epoch}/{EPOCHS}] G {running['g'] / running['n']:.4f} D {running['d'] / running['n']:.4f}")
