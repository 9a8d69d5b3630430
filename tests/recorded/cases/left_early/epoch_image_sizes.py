"""Pictures of many sizes for a segmentation network, padded to the largest of their batch and a multiple of 32."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __init__(self, count=56, seed=0):
        draw = random.Random(seed)
        self.sizes = [(draw.randint(80, 200), draw.randint(80, 200)) for _ in range(count - 6)]
        self.sizes += [(draw.randint(260, 352), draw.randint(200, 320)) for _ in range(6)]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        h, w = self.sizes[i]
        return torch.rand(1, h, w), torch.randint(0, 4, (h, w))


def pad(batch):
    height = -(-max(x.shape[1] for x, _ in batch) // 32) * 32
    width = -(-max(x.shape[2] for x, _ in batch) // 32) * 32
    images = torch.stack([F.pad(x, (0, width - x.shape[2], 0, height - x.shape[1])) for x, _ in batch])
    masks = torch.stack([F.pad(y, (0, width - y.shape[1], 0, height - y.shape[0]), value=255) for _, y in batch])
    return images, masks


def double(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(),
        nn.Conv2d(o, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=32, classes=4):
        super().__init__()
        self.a, self.b, self.c = double(1, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up_b, self.up_a = (
            nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.d, self.e = double(4 * width, 2 * width), double(2 * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        b = self.d(torch.cat([self.up_b(c), b], 1))
        return self.out(self.e(torch.cat([self.up_a(b), a], 1)))


def main():
    torch.manual_seed(0)
    loader = DataLoader(Scans(), batch_size=4, collate_fn=pad)
    model = UNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(1):
        for images, masks in loader:
            images, masks = images.cuda(), masks.cuda()
            loss = F.cross_entropy(model(images), masks, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item(), torch.cuda.max_memory_allocated() >> 20)


if __name__ == "__main__":
    main()
