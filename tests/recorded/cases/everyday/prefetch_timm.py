"""timm's loader: its PrefetchLoader converts, normalizes and erases on a stream of its own, in half precision; mixup of
timm, soft targets, an exponential average of the weights, and a validation pass through the same loader."""

import random

import numpy as np
import timm
import torch
from timm.data import Mixup
from timm.data.loader import PrefetchLoader, fast_collate
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        return rng.integers(0, 256, (3, 64, 64), dtype=np.uint8), index % 10


def loader_of(count, batch, training):
    loader = DataLoader(
        Images(count), batch_size=batch, shuffle=training, drop_last=training, pin_memory=True, collate_fn=fast_collate
    )
    return PrefetchLoader(
        loader,
        device=torch.device("cuda"),
        re_prob=0.25 if training else 0.0,
        re_mode="pixel",
        img_dtype=torch.bfloat16 if training else torch.float32,
    )


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hits = count = 0
    for images, targets in loader:
        output = model(images)
        hits += (output.argmax(1) == targets).sum().item()
        count += targets.size(0)
    model.train()
    return hits / count


def main():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, drop_path_rate=0.1).cuda()
    average = ModelEmaV3(model, decay=0.99)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=0.0, num_classes=10)
    criterion = SoftTargetCrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    training, validation = loader_of(4 * 32, 32, True), loader_of(50, 48, False)
    for epoch in range(2):
        for images, targets in training:
            images, targets = mixup(images, targets)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
        print(epoch, loss.item(), validate(average.module, validation))


if __name__ == "__main__":
    main()
