"""A pipeline that works on the card, as DALI's do: raw frames are uploaded and augmented on its own stream, three batches
deep, into a ring of outputs; segmentation with deep supervision on the main stream."""

from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class Pipeline:
    """`depth` batches are made ahead; outputs belong to the pipeline until they are released."""

    def __init__(self, batches, batch=6, size=96, depth=3):
        self.batches, self.batch, self.size, self.depth = batches, batch, size, depth
        self.stream = torch.cuda.Stream(priority=-1)
        self.ring = deque()
        self.generator = torch.Generator().manual_seed(11)
        self.mean = torch.tensor([0.45, 0.45, 0.40], device="cuda").view(1, 3, 1, 1)

    def _read(self):
        frames = torch.randint(
            0, 256, (self.batch, self.size, self.size, 3), dtype=torch.uint8, generator=self.generator
        )
        masks = torch.randint(0, 4, (self.batch, self.size // 4, self.size // 4), generator=self.generator)
        return frames.pin_memory(), masks.pin_memory()

    def _augment(self, frames, masks):
        images = frames.permute(0, 3, 1, 2).float().div_(255)
        images = F.interpolate(images, scale_factor=1.25, mode="bilinear", align_corners=False)
        at = int(torch.randint(0, images.size(-1) - self.size + 1, (), generator=self.generator))
        images = images[..., at : at + self.size, at : at + self.size].contiguous()
        flip = torch.rand(self.batch, generator=self.generator).cuda(non_blocking=True) < 0.5
        images = torch.where(flip.view(-1, 1, 1, 1), images.flip(-1), images)
        masks = F.interpolate(masks[:, None].float(), scale_factor=4, mode="nearest")[:, 0].long()
        return (images - self.mean).half(), torch.where(flip.view(-1, 1, 1), masks.flip(-1), masks)

    def _run(self):
        if self.batches:
            self.batches -= 1
            frames, masks = self._read()
            with torch.cuda.stream(self.stream):
                moved = self._augment(frames.cuda(non_blocking=True), masks.cuda(non_blocking=True))
                done = torch.cuda.Event()
                done.record()
            self.ring.append((*moved, done))

    def __iter__(self):
        for _ in range(self.depth):
            self._run()
        while self.ring:
            images, masks, done = self.ring.popleft()
            torch.cuda.current_stream().wait_event(done)
            yield images, masks
            images.record_stream(torch.cuda.current_stream())
            masks.record_stream(torch.cuda.current_stream())
            del images, masks
            self._run()


class Net(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(8, o), nn.SiLU()) for i, o in zip(sizes, sizes[1:])
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(o, i, 2, 2) for i, o in zip(sizes[1:], sizes[2:]))
        self.heads = nn.ModuleList(nn.Conv2d(i, 4, 1) for i in sizes[1:])

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2) if block is not self.down[-1] else x
        outputs = [self.heads[-1](x)]
        for level in (1, 0):
            x = self.up[level](x) + kept[level]
            outputs.append(self.heads[level](x))
        return outputs


def main():
    torch.manual_seed(0)
    net = Net().cuda()
    optimizer = torch.optim.RMSprop(net.parameters(), 1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler()
    for step, (images, masks) in enumerate(Pipeline(8)):
        with torch.autocast("cuda"):
            outputs = net(images)
            loss = sum(F.cross_entropy(F.interpolate(o, masks.shape[-2:]).float(), masks) for o in outputs)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(step, f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
