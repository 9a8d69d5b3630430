"""A one-stage detector by hand: anchors, matching by overlap, focal loss, boxes decoded, suppression written out."""

import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

STRIDES, SIZES, RATIOS, CLASSES, SIDE = (8, 16, 32), (24.0, 48.0, 96.0), (0.5, 1.0, 2.0), 6, 160


class Shapes(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1000 + i)
        image = torch.rand(3, SIDE, SIDE, generator=g)
        count = int(torch.randint(0, 9, (1,), generator=g))
        xy = torch.rand(count, 2, generator=g) * (SIDE - 40)
        wh = torch.rand(count, 2, generator=g) * 60 + 10
        boxes = torch.cat([xy, (xy + wh).clamp(max=SIDE)], 1)
        labels = torch.randint(0, CLASSES, (count,), generator=g)
        return image, {"boxes": boxes, "labels": labels, "image_id": i}


def collate(batch):
    images, targets = list(zip(*batch))
    return torch.stack(images), list(targets)


def box_area(b):
    return (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)


def box_iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (box_area(a)[:, None] + box_area(b) - inter)


def nms(boxes, scores, threshold):
    keep, order = [], scores.argsort(descending=True)
    queue = deque(range(len(order)))
    iou = box_iou(boxes[order], boxes[order]).cpu().tolist()
    while queue:
        i = queue.popleft()
        keep.append(i)
        queue = deque(j for j in queue if iou[i][j] <= threshold)
    return order[torch.tensor(keep, dtype=torch.long, device=boxes.device)]


class Detector(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        w = width
        conv = lambda i, o, s: nn.Sequential(
            nn.Conv2d(i, o, 3, s, 1, bias=False), nn.GroupNorm(8, o), nn.ReLU(inplace=True)
        )
        self.stem = nn.Sequential(conv(3, w, 2), conv(w, w, 2))
        self.c3, self.c4, self.c5 = conv(w, 2 * w, 2), conv(2 * w, 4 * w, 2), conv(4 * w, 8 * w, 2)
        self.lateral = nn.ModuleList(nn.Conv2d(c * w, 64, 1) for c in (2, 4, 8))
        self.smooth = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))
        a = len(RATIOS)
        self.cls = nn.Sequential(conv(64, 64, 1), conv(64, 64, 1), nn.Conv2d(64, a * CLASSES, 3, padding=1))
        self.reg = nn.Sequential(conv(64, 64, 1), conv(64, 64, 1), nn.Conv2d(64, a * 4, 3, padding=1))
        nn.init.constant_(self.cls[-1].bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, x):
        c3 = self.c3(self.stem(x))
        c4 = self.c4(c3)
        c5 = self.c5(c4)
        p5 = self.lateral[2](c5)
        p4 = self.lateral[1](c4) + F.interpolate(p5, scale_factor=2.0, mode="nearest")
        p3 = self.lateral[0](c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        logits, deltas = [], []
        for p, smooth in zip((p3, p4, p5), self.smooth):
            f = smooth(p)
            logits.append(self.cls(f).permute(0, 2, 3, 1).reshape(x.size(0), -1, CLASSES))
            deltas.append(self.reg(f).permute(0, 2, 3, 1).reshape(x.size(0), -1, 4))
        return torch.cat(logits, 1), torch.cat(deltas, 1)


def make_anchors(device):
    every = []
    for stride, size in zip(STRIDES, SIZES):
        n = SIDE // stride
        shift = (torch.arange(n, device=device) + 0.5) * stride
        cy, cx = torch.meshgrid(shift, shift, indexing="ij")
        base = torch.tensor([[size * r**-0.5, size * r**0.5] for r in RATIOS], device=device)
        centers = torch.stack([cx, cy], -1).reshape(-1, 1, 2).expand(-1, len(RATIOS), 2)
        every.append(torch.cat([centers - base / 2, centers + base / 2], -1).reshape(-1, 4))
    return torch.cat(every)


def encode(boxes, anchors):
    awh, acxy = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
    wh, cxy = boxes[:, 2:] - boxes[:, :2], (boxes[:, 2:] + boxes[:, :2]) / 2
    return torch.cat([(cxy - acxy) / awh, torch.log(wh / awh)], 1)


def decode(deltas, anchors):
    awh, acxy = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
    cxy, wh = deltas[:, :2] * awh + acxy, deltas[:, 2:].clamp(max=4.0).exp() * awh
    return torch.cat([cxy - wh / 2, cxy + wh / 2], 1).clamp(0, SIDE)


def focal(logits, targets, alpha=0.25, gamma=2.0):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    pt = p * targets + (1 - p) * (1 - targets)
    return ((alpha * targets + (1 - alpha) * (1 - targets)) * (1 - pt) ** gamma * ce).sum()


def losses(logits, deltas, anchors, targets, device):
    cls_loss, reg_loss = [], []
    for logit, delta, target in zip(logits, deltas, targets):
        boxes, labels = target["boxes"].to(device), target["labels"].to(device)
        if boxes.numel() == 0:
            cls_loss.append(focal(logit, torch.zeros_like(logit)))
            continue
        best, index = box_iou(anchors, boxes).max(dim=1)
        wanted = torch.zeros_like(logit)
        positive = best > 0.4
        wanted[torch.arange(len(anchors), device=device), labels[index]] = positive.float()
        ignored = (best >= 0.3) & ~positive
        weight = (~ignored).float().unsqueeze(1)
        cls_loss.append(focal(logit * weight, wanted))
        off = F.smooth_l1_loss(delta, encode(boxes[index], anchors), reduction="none").sum(1)
        reg_loss.append((off * positive).sum() / positive.sum().clamp(min=1))
    return torch.stack(cls_loss).mean() / 10, sum(reg_loss) / max(len(reg_loss), 1)


def main():
    random.seed(0)
    torch.manual_seed(0)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model = Detector().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 5))
    loader = DataLoader(Shapes(18, 1), 6, shuffle=True, collate_fn=collate, num_workers=2, persistent_workers=True)
    anchors = make_anchors(device)
    model.train()
    for epoch in range(2):
        for images, targets in loader:
            images = images.to(device)
            cls_loss, reg_loss = losses(*model(images), anchors, targets, device)
            loss = cls_loss + reg_loss
            if not math.isfinite(loss.item()):
                raise SystemExit(f"loss is {loss}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            warmup.step()
        print(f"epoch {epoch} cls {cls_loss.item():.3f} reg {float(reg_loss):.3f}")
    model.eval()
    found = 0
    with torch.no_grad():
        for images, _ in DataLoader(Shapes(4, 2), 2, collate_fn=collate):
            logits, deltas = model(images.to(device))
            for logit, delta in zip(logits, deltas):
                scores, labels = logit.sigmoid().max(1)
                scores, top = scores.topk(100)
                boxes = decode(delta[top], anchors[top])
                keep = nms(boxes + labels[top, None] * SIDE, scores, 0.5)
                found += len(boxes[keep][:20])
    print("detections", found)


if __name__ == "__main__":
    main()
