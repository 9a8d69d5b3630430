"""SimCLR: two views, NT-Xent with a mask, AMP, cosine schedule, top-k accuracy."""

import logging

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
args = dict(device=torch.device("cuda"), batch_size=32, n_views=2, temperature=0.07, fp16=True)


class Views(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        img = torch.rand(3, 40, 40, generator=g)
        views = []
        for _ in range(2):
            top, left = np.random.randint(0, 8), np.random.randint(0, 8)
            v = img[:, top : top + 32, left : left + 32]
            views.append(torch.flip(v, (2,)) if torch.rand(1) < 0.5 else v)
        return views, i % 10


class Basic(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o)
        self.c2, self.b2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.short = (
            nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o)) if s != 1 or i != o else nn.Sequential()
        )

    def forward(self, x):
        return F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.short(x), inplace=True)


class Net(nn.Module):
    def __init__(self, out_dim=128):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            Basic(64, 64, 1),
            Basic(64, 128, 2),
            Basic(128, 256, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.g = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, out_dim))

    def forward(self, x):
        return self.g(self.f(x))


def info_nce_loss(features):
    labels = torch.cat([torch.arange(args["batch_size"]) for _ in range(args["n_views"])], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(args["device"])
    features = F.normalize(features, dim=1)
    sim = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool).to(args["device"])
    labels = labels[~mask].view(labels.shape[0], -1)
    sim = sim[~mask].view(sim.shape[0], -1)
    positives = sim[labels.bool()].view(labels.shape[0], -1)
    negatives = sim[~labels.bool()].view(sim.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / args["temperature"], torch.zeros(logits.shape[0], dtype=torch.long).to(args["device"])


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


loader = DataLoader(
    Views(), batch_size=args["batch_size"], shuffle=True, num_workers=2, pin_memory=True, drop_last=True
)
model = Net().to(args["device"])
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader), eta_min=0, last_epoch=-1)
criterion = nn.CrossEntropyLoss().to(args["device"])
scaler = GradScaler("cuda", enabled=args["fp16"])
n_iter = 0
for epoch in range(1):
    for images, _ in loader:
        images = torch.cat(images, dim=0).to(args["device"])
        with autocast("cuda", enabled=args["fp16"]):
            logits, labels = info_nce_loss(model(images))
            loss = criterion(logits, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        top1, top5 = accuracy(logits, labels, topk=(1, 5))
        logging.info(
            "loss %s top1 %s top5 %s lr %s", loss.item(), top1[0].item(), top5[0].item(), scheduler.get_last_lr()[0]
        )
        n_iter += 1
    scheduler.step()
