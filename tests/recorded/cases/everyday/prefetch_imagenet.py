"""ImageNet training with the data prefetcher of NVIDIA's examples: a collate function that makes uint8 batches, a side
stream that copies the next batch, converts and normalizes it, `record_stream` where the batch is handed over."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 5 * 24 + 10

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (112, 112, 3), dtype=np.uint8), int(rng.integers(0, 100))


def fast_collate(batch):
    targets = torch.tensor([target for _, target in batch], dtype=torch.int64)
    images = torch.zeros((len(batch), 3, 112, 112), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    for i, (image, _) in enumerate(batch):
        images[i] += torch.from_numpy(np.rollaxis(image, 2).copy())
    return images, targets


class data_prefetcher:  # noqa: N801
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.side = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.side(x))


def accuracy(output, target, topk=(1, 5)):
    _, found = output.topk(max(topk), 1, True, True)
    hits = found.t().eq(target.view(1, -1).expand(max(topk), -1))
    return [hits[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Block(3, 32), Block(32, 64), Block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(128, 100)).cuda().to(memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    loader = DataLoader(Images(), batch_size=24, shuffle=True, pin_memory=True, collate_fn=fast_collate)
    for epoch in range(2):
        prefetcher = data_prefetcher(loader)
        input, target = prefetcher.next()
        i = 0
        while input is not None:
            i += 1
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(input)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if i % 2 == 0:
                best, five = accuracy(output.detach(), target)
                torch.cuda.synchronize()
                print(f"{epoch} {i} {loss.item():.3f} {best.item():.1f} {five.item():.1f}")
            input, target = prefetcher.next()


if __name__ == "__main__":
    main()
