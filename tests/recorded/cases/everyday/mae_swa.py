"""A masked autoencoder with SWA averaging, cosine warm-up by LambdaLR, old amp API, and a linear probe afterwards."""

import math

import numpy as np
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

np.random.seed(0)
torch.manual_seed(0)


class Images(Dataset):
    def __init__(self, n):
        self.x = np.random.randint(0, 256, (n, 64, 64, 3), dtype=np.uint8)
        self.y = np.random.randint(0, 10, n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        img = torch.from_numpy(self.x[i]).permute(2, 0, 1).float() / 255.0
        if np.random.rand() > 0.5:
            img = img.flip(-1)
        return img, self.y[i]


class MAE(nn.Module):
    def __init__(self, p=8, dim=192, ddim=96, depth=4, ratio=0.75):
        super().__init__()
        n = (64 // p) ** 2
        self.p, self.ratio = p, ratio
        self.embed = nn.Conv2d(3, dim, p, p)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, n + 1, dim) * 0.02)
        layer = lambda d: nn.TransformerEncoderLayer(
            d, 4, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.enc = nn.TransformerEncoder(layer(dim), depth, nn.LayerNorm(dim), enable_nested_tensor=False)
        self.to_dec, self.mask_token = nn.Linear(dim, ddim), nn.Parameter(torch.zeros(1, 1, ddim))
        self.dpos = nn.Parameter(torch.randn(1, n + 1, ddim) * 0.02)
        self.dec = nn.TransformerEncoder(layer(ddim), 2, nn.LayerNorm(ddim), enable_nested_tensor=False)
        self.head = nn.Linear(ddim, p * p * 3)

    def patchify(self, x):
        b, c, h, w = x.shape
        p = self.p
        return x.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)

    def random_masking(self, x):
        N, L, D = x.shape
        keep = int(L * (1 - self.ratio))
        noise = torch.rand(N, L, device=x.device)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        ids = shuffle[:, :keep]
        masked = torch.gather(x, 1, ids.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :keep] = 0
        return masked, torch.gather(mask, 1, restore), restore

    def features(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2) + self.pos[:, 1:]
        return self.enc(torch.cat((self.cls.expand(len(x), -1, -1) + self.pos[:, :1], x), 1))[:, 0]

    def forward(self, img):
        x = self.embed(img).flatten(2).transpose(1, 2) + self.pos[:, 1:]
        x, mask, restore = self.random_masking(x)
        x = self.enc(torch.cat(((self.cls + self.pos[:, :1]).expand(len(x), -1, -1), x), 1))
        x = self.to_dec(x)
        tokens = self.mask_token.repeat(x.shape[0], restore.shape[1] + 1 - x.shape[1], 1)
        y = torch.cat([x[:, 1:], tokens], 1)
        y = torch.gather(y, 1, restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        y = self.head(self.dec(torch.cat([x[:, :1], y], 1) + self.dpos))[:, 1:]
        loss = ((y - self.patchify(img)) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum()


device = torch.device("cuda")
data = Images(160)
loader = DataLoader(data, 48, shuffle=True, num_workers=0, drop_last=False)
model = MAE().to(device)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
decay = [p for n, p in model.named_parameters() if p.ndim > 1]
rest = [p for n, p in model.named_parameters() if p.ndim <= 1]
opt = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=1.5e-4, betas=(0.9, 0.95)
)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 10, 0.5 * (math.cos(s / 100 * math.pi) + 1)))
scaler = GradScaler()
for img, _ in loader:
    img = img.to(device, non_blocking=True)
    with autocast():
        loss = model(img)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    gn = torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    sched.step()
    ema.update_parameters(model)
    print(loss.item(), gn.item(), opt.param_groups[0]["lr"])
probe = nn.Linear(192, 10).to(device)
popt = torch.optim.SGD(probe.parameters(), lr=0.1, momentum=0.9)
ema.eval()
hits, seen = 0, 0
for img, y in DataLoader(data, 64):
    with torch.no_grad():
        f = ema.module.features(img.to(device))
    y = torch.as_tensor(y).to(device)
    out = probe(f)
    loss = nn.functional.cross_entropy(out, y)
    popt.zero_grad()
    loss.backward()
    popt.step()
    hits += (out.argmax(1) == y).sum().item()
    seen += y.numel()
print("acc", hits / seen)
