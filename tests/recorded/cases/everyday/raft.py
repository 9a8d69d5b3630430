"""RAFT: all-pairs correlation pyramid looked up by grid_sample, convolutional GRU, convex upsampling by unfold, sequence loss, one-cycle, mixed precision."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset


def bilinear_sampler(img, coords):
    H, W = img.shape[-2:]
    x, y = coords.split([1, 1], dim=-1)
    return F.grid_sample(img, torch.cat([2 * x / (W - 1) - 1, 2 * y / (H - 1) - 1], dim=-1), align_corners=True)


def coords_grid(b, h, w, device):
    c = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    return torch.stack(c[::-1], dim=0).float()[None].repeat(b, 1, 1, 1)


class CorrBlock:
    def __init__(self, f1, f2, levels=3, radius=3):
        self.levels, self.r = levels, radius
        b, d, h, w = f1.shape
        corr = torch.matmul(f1.view(b, d, h * w).transpose(1, 2), f2.view(b, d, h * w)).view(
            b, h, w, 1, h, w
        ) / torch.sqrt(torch.tensor(d).float())
        corr = corr.reshape(b * h * w, 1, h, w)
        self.pyramid = [corr]
        for _ in range(levels - 1):
            corr = F.avg_pool2d(corr, 2, stride=2)
            self.pyramid.append(corr)

    def __call__(self, coords):
        r, coords = self.r, coords.permute(0, 2, 3, 1)
        b, h, w, _ = coords.shape
        out = []
        for i in range(self.levels):
            d = torch.linspace(-r, r, 2 * r + 1, device=coords.device)
            delta = torch.stack(torch.meshgrid(d, d, indexing="ij"), axis=-1)
            lvl = coords.reshape(b * h * w, 1, 1, 2) / 2**i + delta.view(1, 2 * r + 1, 2 * r + 1, 2)
            out.append(bilinear_sampler(self.pyramid[i], lvl).view(b, h, w, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2).contiguous().float()


class ResidualBlock(nn.Module):
    def __init__(self, i, o, norm, stride=1):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(i, o, 3, padding=1, stride=stride), nn.Conv2d(o, o, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        make = {"instance": nn.InstanceNorm2d, "batch": nn.BatchNorm2d}[norm]
        self.n1, self.n2 = make(o), make(o)
        self.down = nn.Sequential(nn.Conv2d(i, o, 1, stride=stride), make(o)) if stride > 1 else None

    def forward(self, x):
        y = self.relu(self.n1(self.c1(x)))
        y = self.relu(self.n2(self.c2(y)))
        return self.relu((x if self.down is None else self.down(x)) + y)


class Encoder(nn.Module):
    def __init__(self, out, norm):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3),
            nn.InstanceNorm2d(64) if norm == "instance" else nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            ResidualBlock(64, 64, norm),
            ResidualBlock(64, 96, norm, 2),
            ResidualBlock(96, 128, norm, 2),
            nn.Conv2d(128, out, 1),
        )
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        pair = isinstance(x, (tuple, list))
        if pair:
            n = x[0].shape[0]
            x = torch.cat(x, dim=0)
        x = self.net(x)
        return torch.split(x, [n, n], dim=0) if pair else x


class SepConvGRU(nn.Module):
    def __init__(self, h=96, i=96 + 128):
        super().__init__()
        make = lambda k, p: nn.Conv2d(h + i, h, k, padding=p)
        self.z, self.r, self.q = (nn.ModuleList([make((1, 5), (0, 2)), make((5, 1), (2, 0))]) for _ in range(3))

    def forward(self, h, x):
        for z, r, q in zip(self.z, self.r, self.q):
            hx = torch.cat([h, x], dim=1)
            a, b = torch.sigmoid(z(hx)), torch.sigmoid(r(hx))
            c = torch.tanh(q(torch.cat([b * h, x], dim=1)))
            h = (1 - a) * h + a * c
        return h


class Update(nn.Module):
    def __init__(self, planes):
        super().__init__()
        self.c1, self.c2, self.f1, self.f2, self.c = (
            nn.Conv2d(planes, 192, 1),
            nn.Conv2d(192, 128, 3, padding=1),
            nn.Conv2d(2, 64, 7, padding=3),
            nn.Conv2d(64, 32, 3, padding=1),
            nn.Conv2d(160, 126, 3, padding=1),
        )
        self.gru = SepConvGRU()
        self.head = nn.Sequential(
            nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(128, 2, 3, padding=1)
        )
        self.mask = nn.Sequential(nn.Conv2d(96, 192, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(192, 64 * 9, 1))

    def forward(self, net, inp, corr, flow):
        cor, flo = F.relu(self.c2(F.relu(self.c1(corr)))), F.relu(self.f2(F.relu(self.f1(flow))))
        motion = torch.cat([F.relu(self.c(torch.cat([cor, flo], dim=1))), flow], dim=1)
        net = self.gru(net, torch.cat([inp, motion], dim=1))
        return net, 0.25 * self.mask(net), self.head(net)


class RAFT(nn.Module):
    def __init__(self):
        super().__init__()
        self.fnet, self.cnet, self.update = Encoder(128, "instance"), Encoder(96 + 96, "batch"), Update(3 * 49)

    def freeze_bn(self):
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()

    def upsample(self, flow, mask):
        N, _, H, W = flow.shape
        mask = torch.softmax(mask.view(N, 1, 9, 8, 8, H, W), dim=2)
        up = F.unfold(8 * flow, [3, 3], padding=1).view(N, 2, 9, 1, 1, H, W)
        return torch.sum(mask * up, dim=2).permute(0, 1, 4, 2, 5, 3).reshape(N, 2, 8 * H, 8 * W)

    def forward(self, a, b, iters=6, init=None, test=False):
        a, b = (2 * (x / 255.0) - 1.0 for x in (a.contiguous(), b.contiguous()))
        with autocast("cuda"):
            f1, f2 = self.fnet([a, b])
        corr_fn = CorrBlock(f1.float(), f2.float())
        with autocast("cuda"):
            net, inp = torch.split(self.cnet(a), [96, 96], dim=1)
            net, inp = torch.tanh(net), torch.relu(inp)
        N, _, H, W = a.shape
        c0, c1 = (coords_grid(N, H // 8, W // 8, a.device) for _ in range(2))
        if init is not None:
            c1 = c1 + init
        preds = []
        for _ in range(iters):
            c1 = c1.detach()
            corr = corr_fn(c1)
            flow = c1 - c0
            with autocast("cuda"):
                net, mask, delta = self.update(net, inp, corr, flow)
            c1 = c1 + delta
            up = self.upsample(c1 - c0, mask)
            preds.append(up)
        return (c1 - c0, up) if test else preds


class InputPadder:
    def __init__(self, dims):
        ht, wd = dims[-2:]
        ph, pw = (((ht // 8) + 1) * 8 - ht) % 8, (((wd // 8) + 1) * 8 - wd) % 8
        self._pad = [pw // 2, pw - pw // 2, ph // 2, ph - ph // 2]

    def pad(self, *inputs):
        return [F.pad(x, self._pad, mode="replicate") for x in inputs]

    def unpad(self, x):
        ht, wd = x.shape[-2:]
        return x[..., self._pad[2] : ht - self._pad[3], self._pad[0] : wd - self._pad[1]]


class Flows(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        h, w = self.size
        a, b = (torch.randint(0, 256, (3, h, w)).float() for _ in range(2))
        flow = torch.randn(2, h, w)
        return a, b, flow, (flow[0].abs() < 1000).float()


def sequence_loss(preds, gt, valid, gamma=0.8):
    n, loss = len(preds), 0.0
    mag = torch.sum(gt**2, dim=1).sqrt()
    valid = (valid >= 0.5) & (mag < 400)
    for i in range(n):
        loss += gamma ** (n - i - 1) * (valid[:, None] * (preds[i] - gt).abs()).mean()
    epe = torch.sum((preds[-1].detach() - gt) ** 2, dim=1).sqrt()
    return loss, {"epe": epe.mean().item(), "1px": (epe < 1).float().mean().item()}


def main():
    torch.manual_seed(1234)
    np.random.seed(1234)
    model = nn.DataParallel(RAFT(), device_ids=[0])
    model.cuda()
    model.train()
    model.module.freeze_bn()
    opt = optim.AdamW(model.parameters(), lr=4e-4, weight_decay=1e-4, eps=1e-8)
    sched = optim.lr_scheduler.OneCycleLR(
        opt, 4e-4, 110, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear"
    )
    scaler, running = GradScaler("cuda"), {}
    for i, blob in enumerate(
        DataLoader(Flows(12, (128, 184)), batch_size=3, shuffle=True, pin_memory=True, drop_last=True)
    ):
        opt.zero_grad()
        a, b, flow, valid = [x.cuda() for x in blob]
        if np.random.rand() < 0.5:
            s = np.random.uniform(0.0, 5.0)
            a, b = ((x + s * torch.randn(*x.shape).cuda()).clamp(0.0, 255.0) for x in (a, b))
        preds = model(a, b, iters=6)
        loss, metrics = sequence_loss(preds, flow, valid)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        sched.step()
        scaler.update()
        for k, v in metrics.items():
            running[k] = running.get(k, 0.0) + v
    print(running)
    model.eval()
    prev, errors = None, []
    with torch.no_grad():
        for a, b, flow, _ in DataLoader(Flows(3, (133, 190))):
            a, b = a.cuda(), b.cuda()
            padder = InputPadder(a.shape)
            a, b = padder.pad(a, b)
            low, up = model(a, b, iters=10, init=prev, test=True)
            prev = low.clone()
            out = padder.unpad(up[0]).cpu()
            errors.append(torch.sum((out - flow[0]) ** 2, dim=0).sqrt().view(-1).numpy())
    print(np.mean(np.concatenate(errors)).shape)


if __name__ == "__main__":
    main()
