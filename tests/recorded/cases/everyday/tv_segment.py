"""Semantic segmentation in the manner of torchvision's reference script: DeepLabV3 with an auxiliary head, SGD with three
groups, a polynomial rate for every step, mixed precision, and a confusion matrix kept on the card."""

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

torch.manual_seed(11)
CLASSES, BASE, CROP = 21, 200, 160


class Streets(Dataset):
    def __init__(self, n, transforms):
        self.n, self.transforms = n, transforms

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        h, w = 180 + 10 * (i % 4), 240 - 10 * (i % 3)
        image = tv_tensors.Image(torch.randint(0, 256, (3, h, w), dtype=torch.uint8))
        labels = torch.arange(h)[:, None] // 24 + torch.arange(w)[None] // 40
        return self.transforms(image, tv_tensors.Mask((labels % CLASSES)[None].to(torch.uint8)))


class ToLabels(v2.Transform):
    def transform(self, inpt, params):
        return inpt.squeeze(0).to(torch.int64) if isinstance(inpt, tv_tensors.Mask) else inpt


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes, self.mat = num_classes, None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64, device=a.device)
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)

    def compute(self):
        h = self.mat.float()
        return (
            torch.diag(h).sum() / h.sum(),
            torch.diag(h) / h.sum(1),
            torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h)),
        )


def criterion(inputs, target):
    losses = {name: F.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
    return losses["out"] if len(losses) == 1 else losses["out"] + 0.5 * losses["aux"]


def cat_list(images, fill_value=0):
    max_size = tuple(max(s) for s in zip(*[img.shape for img in images]))
    batched = images[0].new(*(len(images), *max_size)).fill_(fill_value)
    for img, pad_img in zip(images, batched):
        pad_img[..., : img.shape[-2], : img.shape[-1]].copy_(img)
    return batched


def collate_fn(batch):
    images, targets = list(zip(*batch))
    return cat_list(images, fill_value=0), cat_list(targets, fill_value=255)


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    confmat, processed = ConfusionMatrix(CLASSES), 0
    for image, target in loader:
        image, target = image.to(device), target.to(device)
        output = model(image)["out"]
        confmat.update(target.flatten(), output.argmax(1).flatten())
        processed += image.shape[0]
    accuracy, _, iou = confmat.compute()
    print(f"{processed} pictures, global correct {accuracy.item() * 100:.1f}, mean IoU {iou.mean().item() * 100:.1f}")


def main():
    device = torch.device("cuda")
    normal = [
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ToLabels(),
        v2.ToPureTensor(),
    ]
    train = Streets(
        12,
        v2.Compose(
            [
                v2.RandomResize(BASE // 2, BASE * 2, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.RandomCrop(CROP, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
                *normal,
            ]
        ),
    )
    test = Streets(4, v2.Compose([v2.Resize(BASE, antialias=True), *normal]))
    loader = DataLoader(train, 4, shuffle=True, num_workers=2, collate_fn=collate_fn, drop_last=True)
    test_loader = DataLoader(test, 1, collate_fn=collate_fn)
    model = torchvision.models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
    ).to(device)
    params = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": [p for p in model.aux_classifier.parameters() if p.requires_grad], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    epochs = 2
    main_lr = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=len(loader) * (epochs - 1), power=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=len(loader))
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_lr], milestones=[len(loader)])
    for epoch in range(epochs):
        model.train()
        for image, target in loader:
            image, target = image.to(device), target.to(device)
            with torch.amp.autocast("cuda"):
                loss = criterion(model(image), target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            print(f"epoch {epoch} loss {loss.item():.3f} lr {optimizer.param_groups[0]['lr']:.5f}")
        evaluate(model, test_loader, device)


main()
