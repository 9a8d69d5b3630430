"""U-Net on odd-sized pictures: padding to fit, dice and cross-entropy, gradient accumulation, mean IoU, plateau."""

import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split

logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")


class Cars(Dataset):
    def __init__(self, n, size=(101, 75)):
        rng = np.random.default_rng(12)
        self.images = [rng.random((3, *size), dtype=np.float32) for _ in range(n)]
        self.masks = [rng.integers(0, 4, size) for _ in range(n)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"image": torch.as_tensor(self.images[i]), "mask": torch.as_tensor(self.masks[i]).long()}


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout, mid=None):
        mid = mid or cout
        super().__init__(
            nn.Conv2d(cin, mid, 3, padding=1, bias=False),
            nn.BatchNorm2d(mid),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    def __init__(self, cin, cout, bilinear):
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(cin, cout, cin // 2)
        else:
            self.up = nn.ConvTranspose2d(cin, cin // 2, 2, stride=2)
            self.conv = DoubleConv(cin, cout)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, classes, base=24, bilinear=False):
        super().__init__()
        f = 2 if bilinear else 1
        self.n_classes = classes
        self.inc = DoubleConv(3, base)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(base * a, base * b)) for a, b in ((1, 2), (2, 4), (4, 8 // f))
        )
        self.up = nn.ModuleList(
            (Up(8 * base, 4 * base // f, bilinear), Up(4 * base, 2 * base // f, bilinear), Up(2 * base, base, bilinear))
        )
        self.outc = nn.Conv2d(base, classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.outc(x)


def dice_coeff(input, target, reduce_batch_first=False, epsilon=1e-6):
    dims = (-1, -2) if input.dim() == 2 or not reduce_batch_first else (-1, -2, -3)
    inter = 2 * (input * target).sum(dim=dims)
    sets = input.sum(dim=dims) + target.sum(dim=dims)
    sets = torch.where(sets == 0, inter, sets)
    return ((inter + epsilon) / (sets + epsilon)).mean()


def dice_loss(input, target):
    return 1 - dice_coeff(input.flatten(0, 1), target.flatten(0, 1), reduce_batch_first=True)


@torch.inference_mode()
def evaluate(net, loader, device):
    net.eval()
    score, union, inter = 0, torch.zeros(net.n_classes, device=device), torch.zeros(net.n_classes, device=device)
    for batch in loader:
        image = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
        mask = batch["mask"].to(device=device, dtype=torch.long)
        pred = net(image)
        hist = torch.bincount(mask.flatten() * net.n_classes + pred.argmax(1).flatten(), minlength=net.n_classes**2)
        hist = hist.reshape(net.n_classes, net.n_classes).float()
        inter += hist.diag()
        union += hist.sum(0) + hist.sum(1) - hist.diag()
        one = F.one_hot(mask, net.n_classes).permute(0, 3, 1, 2).float()
        hot = F.one_hot(pred.argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
        score += dice_coeff(hot[:, 1:].flatten(0, 1), one[:, 1:].flatten(0, 1))
    net.train()
    logging.info("mean IoU %.3f", (inter / union.clamp(min=1)).mean().item())
    return score / max(len(loader), 1)


def train_net(net, device, epochs=2, batch_size=4, accumulate=2, lr=1e-5):
    dataset = Cars(22)
    n_val = int(len(dataset) * 0.2)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val], torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size, pin_memory=True)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=2)
    optimizer = optim.RMSprop(net.parameters(), lr=lr, weight_decay=1e-8, momentum=0.999, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    criterion, step = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.0, 2.0]).to(device)), 0
    for epoch in range(1, epochs + 1):
        net.train()
        for i, batch in enumerate(train_loader):
            images, true = batch["image"], batch["mask"]
            images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true = true.to(device=device, dtype=torch.long)
            pred = net(images)
            loss = criterion(pred, true)
            hot = F.one_hot(true, net.n_classes).permute(0, 3, 1, 2).float()
            loss = (loss + dice_loss(F.softmax(pred, dim=1).float(), hot)) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(train_loader):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
        score = evaluate(net, val_loader, device)
        scheduler.step(score)
        logging.info("epoch %d step %d dice %.4f", epoch, step, score)
    histograms = {tag: value.data.cpu().numpy().mean() for tag, value in net.named_parameters()}
    logging.info("%d histograms", len(histograms))


if __name__ == "__main__":
    torch.manual_seed(5)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for bilinear in (False, True):
        net = UNet(4, bilinear=bilinear).to(memory_format=torch.channels_last).to(device)
        try:
            train_net(net, device, epochs=1 if bilinear else 2)
        except torch.cuda.OutOfMemoryError:
            logging.error("out of memory: try a smaller batch")
            torch.cuda.empty_cache()
    logging.info("%s", Path(__file__).name)
