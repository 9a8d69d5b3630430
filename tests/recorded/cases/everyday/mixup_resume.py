"""Image classification: mixup and CutMix, EMA of weights, linear warm-up into cosine, resumed from a checkpoint."""

import argparse
import copy
import os
import random
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(
            name=self.name, val=self.val, avg=self.avg
        )


class Pictures(Dataset):
    def __init__(self, n, train):
        rng = np.random.RandomState(0 if train else 1)
        self.images = rng.randint(0, 255, (n, 48, 48, 3), dtype=np.uint8)
        self.labels = rng.randint(0, 20, n)
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index].copy()).permute(2, 0, 1).float().div_(255)
        if self.train:
            if random.random() < 0.5:
                image = image.flip(2)
            image = F.pad(image, (4, 4, 4, 4))
            y, x = random.randint(0, 8), random.randint(0, 8)
            image = image[:, y : y + 48, x : x + 48]
        return image, int(self.labels[index])


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduction=8):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, channels // reduction, 1)
        self.fc2 = nn.Conv2d(channels // reduction, channels, 1)

    def forward(self, x):
        s = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(s), inplace=True)))


class Bottleneck(nn.Module):
    def __init__(self, cin, cout, stride, drop_path):
        super().__init__()
        mid = cout // 4
        self.conv1, self.bn1 = nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride, 1, groups=4, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout)
        self.se, self.drop_path = SqueezeExcite(cout), drop_path
        self.down = None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(
                nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity(),
                nn.Conv2d(cin, cout, 1, bias=False),
                nn.BatchNorm2d(cout),
            )
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x):
        out = F.silu(self.bn1(self.conv1(x)), inplace=True)
        out = F.silu(self.bn2(self.conv2(out)), inplace=True)
        out = self.se(self.bn3(self.conv3(out)))
        if self.training and self.drop_path:
            keep = torch.empty(x.size(0), 1, 1, 1, device=x.device).bernoulli_(1 - self.drop_path)
            out = out.div(1 - self.drop_path) * keep
        return F.silu(out + (x if self.down is None else self.down(x)), inplace=True)


class Net(nn.Module):
    def __init__(self, classes=20):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True))
        blocks, cin = [], 32
        for stage, (cout, depth) in enumerate(((64, 2), (128, 2), (256, 2))):
            for i in range(depth):
                blocks.append(Bottleneck(cin, cout, 2 if i == 0 and stage else 1, 0.1 * stage / 2))
                cin = cout
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(cin, classes)

    def forward(self, x):
        return self.head(F.dropout(self.blocks(self.stem(x)).mean((2, 3)), 0.2, self.training))


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def mix(x, y, alpha, classes):
    y = F.one_hot(y, classes).float()
    lam = float(np.random.beta(alpha, alpha))
    perm = torch.randperm(x.size(0), device=x.device)
    if random.random() < 0.5:
        return lam * x + (1 - lam) * x[perm], lam * y + (1 - lam) * y[perm]
    h, w = x.shape[-2:]
    cut = (1 - lam) ** 0.5
    cy, cx = random.randrange(h), random.randrange(w)
    y1, y2 = max(cy - int(h * cut) // 2, 0), min(cy + int(h * cut) // 2, h)
    x1, x2 = max(cx - int(w * cut) // 2, 0), min(cx + int(w * cut) // 2, w)
    x[:, :, y1:y2, x1:x2] = x[perm, :, y1:y2, x1:x2]
    lam = 1 - (y2 - y1) * (x2 - x1) / (h * w)
    return x, lam * y + (1 - lam) * y[perm]


def accuracy(output, target, topk=(1, 5)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)).item() for k in topk]


@torch.inference_mode()
def validate(model, loader, device):
    model.eval()
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    for images, target in loader:
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        losses.update(F.cross_entropy(output, target).item(), images.size(0))
        top1.update(accuracy(output, target)[0], images.size(0))
    print(f" * {losses} {top1}")
    return top1.avg


def run(args, epochs, resume=None):
    device = torch.device(args.device)
    model = Net().to(device)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    other = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decay, "weight_decay": 5e-4}, {"params": other, "weight_decay": 0.0}],
        lr=args.lr,
        momentum=0.9,
        nesterov=True,
    )
    scheduler = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.01, total_iters=1), CosineAnnealingLR(optimizer, args.epochs)], [1]
    )
    ema, start = ModelEma(model, 0.9), 0
    if resume is not None:
        checkpoint = torch.load(resume, map_location=device, weights_only=False)
        model.load_state_dict(checkpoint["model"])
        ema.module.load_state_dict(checkpoint["ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"] + 1
        print(f"=> loaded checkpoint (epoch {checkpoint['epoch']})")
    loader = DataLoader(Pictures(112, True), args.batch_size, shuffle=True, num_workers=args.workers, drop_last=False)
    valid = DataLoader(Pictures(70, False), args.batch_size * 2, num_workers=args.workers, pin_memory=True)
    for epoch in range(start, epochs):
        model.train()
        end, losses = time.time(), AverageMeter("Loss", ":.4e")
        for i, (images, target) in enumerate(loader):
            images, target = images.to(device), target.to(device)
            images, soft = mix(images, target, args.alpha, 20)
            loss = F.cross_entropy(model(images), soft, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            losses.update(loss.item(), images.size(0))
            if i % args.print_freq == 0:
                print(f"Epoch: [{epoch}][{i}/{len(loader)}] {time.time() - end:.3f} {losses}")
        scheduler.step()
        validate(model, valid, device)
        best = validate(ema.module, valid, device)
        torch.save(
            {
                "epoch": epoch,
                "model": model.state_dict(),
                "ema": ema.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "best": best,
            },
            args.checkpoint,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--alpha", default=0.4, type=float)
    parser.add_argument("--workers", default=2, type=int)
    parser.add_argument("--print-freq", default=2, type=int)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = False
    args.checkpoint = os.path.join(tempfile.mkdtemp(), "checkpoint.pth")
    run(args, 1)
    run(args, args.epochs, args.checkpoint)
