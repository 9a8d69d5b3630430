"""ViT fine-tuning: the head first with a frozen body, then all with layer-wise rates; mixup, EMA by deepcopy, top-5."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import ViTConfig, ViTForImageClassification

np.random.seed(2)
torch.manual_seed(2)
torch.set_float32_matmul_precision("high")


class Pictures(Dataset):
    def __init__(self, n, train):
        self.n, self.train = n, train

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        image = torch.from_numpy(np.random.randint(0, 256, (3, 112, 112), dtype=np.uint8)).float() / 255
        if self.train and np.random.rand() < 0.5:
            image = image.flip(-1)
        return (image - 0.5) / 0.5, i % 20


def mixup(x, y, classes, alpha=0.8):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(len(x), device=x.device)
    target = F.one_hot(y, classes).float()
    return lam * x + (1 - lam) * x[index], lam * target + (1 - lam) * target[index]


def layer_groups(model, lr, decay=0.75):
    groups, n = {}, model.config.num_hidden_layers
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if "embeddings" in name:
            depth = 0
        elif "layer." in name or "layers." in name:
            depth = int([s for s in name.split(".") if s.isdigit()][0]) + 1
        else:
            depth = n + 1
        groups.setdefault(depth, {"params": [], "lr": lr * decay ** (n + 1 - depth)})["params"].append(p)
    return list(groups.values())


def train_one_epoch(model, ema, loader, optimizer, classes, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        images, targets = mixup(images, labels, classes)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(pixel_values=images).logits
            loss = torch.sum(-targets * F.log_softmax(logits, dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for e, p in zip(ema.state_dict().values(), model.state_dict().values()):
            if e.dtype.is_floating_point:
                e.mul_(0.99).add_(p, alpha=0.01)
        print(f"loss {loss.item():.3f} norm {norm.item():.3f}")


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    top1 = top5 = total = 0
    for images, labels in loader:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(images.to(device)).logits
        _, pred = logits.topk(5, 1)
        hit = pred.eq(labels.to(device).view(-1, 1))
        top1, top5, total = top1 + hit[:, 0].sum().item(), top5 + hit.sum().item(), total + len(labels)
    return top1 / total, top5 / total


device, classes = torch.device("cuda"), 20
model = ViTForImageClassification(
    ViTConfig(
        image_size=112,
        patch_size=16,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=classes,
    )
).to(device)
ema = copy.deepcopy(model)
for p in ema.parameters():
    p.requires_grad = False
train, val = DataLoader(Pictures(96, True), 32, shuffle=True, num_workers=2), DataLoader(Pictures(50, False), 25)
for p in model.vit.parameters():
    p.requires_grad = False
optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
train_one_epoch(model, ema, train, optimizer, classes, device)
print("linear probe", evaluate(model, val, device))
for p in model.vit.parameters():
    p.requires_grad = True
optimizer = torch.optim.AdamW(layer_groups(model, 1e-3), weight_decay=0.05)
train_one_epoch(model, ema, train, optimizer, classes, device)
print("fine-tuned", evaluate(model, val, device), "ema", evaluate(ema, val, device))
