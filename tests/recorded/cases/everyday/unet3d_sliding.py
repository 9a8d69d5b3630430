"""A 3-D U-Net with deep supervision on crops; whole volumes are segmented window by window."""

import os
import random
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CHECKPOINT = os.path.join(tempfile.gettempdir(), "unet3d.pt")
torch.manual_seed(42)
np.random.seed(42)
random.seed(42)


class Vols(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        v = np.random.randn(1, 110, 120, 100).astype(np.float32)
        m = (np.random.rand(110, 120, 100) > 0.9).astype(np.int64)
        z, y, x = (random.randint(0, s - 64) for s in v.shape[1:])
        return torch.from_numpy(v[:, z : z + 64, y : y + 64, x : x + 64].copy()), torch.from_numpy(
            m[z : z + 64, y : y + 64, x : x + 64].copy()
        )


def block(i, o):
    return nn.Sequential(
        nn.Conv3d(i, o, 3, padding=1, bias=False),
        nn.InstanceNorm3d(o, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
        nn.Conv3d(o, o, 3, padding=1, bias=False),
        nn.InstanceNorm3d(o, affine=True),
        nn.LeakyReLU(0.01, inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, c=(24, 48, 96, 192)):
        super().__init__()
        self.down = nn.ModuleList([block(i, o) for i, o in zip((1,) + c, c)])
        self.ups = nn.ModuleList([nn.ConvTranspose3d(a, b, 2, 2) for a, b in zip(c[:0:-1], c[-2::-1])])
        self.dec = nn.ModuleList([block(2 * b, b) for b in c[-2::-1]])
        self.heads = nn.ModuleList([nn.Conv3d(b, 3, 1) for b in c[-2::-1]])

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.down):
            x = d(x if i == 0 else F.max_pool3d(x, 2))
            skips.append(x)
        outs = []
        for up, dec, head, s in zip(self.ups, self.dec, self.heads, skips[-2::-1]):
            x = dec(torch.cat([up(x), s], 1))
            outs.append(head(x))
        return outs[::-1] if self.training else outs[-1]


def dice_ce(logits, y):
    ce = F.cross_entropy(logits, y)
    p = logits.softmax(1)
    oh = F.one_hot(y, 3).permute(0, 4, 1, 2, 3).float()
    inter = (p * oh).sum((2, 3, 4))
    return ce + 1 - ((2 * inter + 1e-5) / (p.sum((2, 3, 4)) + oh.sum((2, 3, 4)) + 1e-5))[:, 1:].mean()


def sliding(model, vol, size=64, overlap=0.5):
    out = torch.zeros((1, 3) + vol.shape[2:], device=vol.device)
    count = torch.zeros((1, 1) + vol.shape[2:], device=vol.device)
    step = int(size * (1 - overlap))
    starts = [sorted(set(list(range(0, s - size, step)) + [s - size])) for s in vol.shape[2:]]
    for z in starts[0]:
        for y in starts[1]:
            for x in starts[2]:
                out[:, :, z : z + size, y : y + size, x : x + size] += model(
                    vol[:, :, z : z + size, y : y + size, x : x + size]
                )
                count[:, :, z : z + size, y : y + size, x : x + size] += 1
    return out / count


device = "cuda"
model = UNet().to(device)
opt = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.99, nesterov=True, weight_decay=3e-5)
sched = torch.optim.lr_scheduler.PolynomialLR(opt, 10, 0.9)
scaler = torch.amp.GradScaler("cuda")
train = DataLoader(Vols(16), 2, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
best = 0.0
for epoch in range(3):
    model.train()
    run = 0.0
    for x, y in train:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            outs = model(x)
            loss = 0
            for i, o in enumerate(outs):
                t = y if i == 0 else F.interpolate(y[:, None].float(), o.shape[2:], mode="nearest")[:, 0].long()
                loss = loss + dice_ce(o, t) / 2**i
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 12)
        scaler.step(opt)
        scaler.update()
        run += loss.item()
    sched.step()
    print(f"epoch {epoch} loss {run / len(train):.4f}")
    if epoch % 2 == 0:
        model.eval()
        dices = []
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            for _ in range(2):
                v = torch.randn(1, 1, 110, 120, 100, device=device)
                m = torch.randint(0, 3, (110, 120, 100), device=device)
                pred = sliding(model, v).argmax(1)[0]
                dices.append(
                    [
                        ((2 * ((pred == c) & (m == c)).sum()) / ((pred == c).sum() + (m == c).sum() + 1e-8)).item()
                        for c in (1, 2)
                    ]
                )
        d = float(np.mean(dices))
        if d >= best:
            best = d
            torch.save(
                {"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, CHECKPOINT
            )
ck = torch.load(CHECKPOINT, map_location=device)
model.load_state_dict(ck["model"])
print("restored")
