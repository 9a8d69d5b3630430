"""torchvision: its reference script of segmentation, and its own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tests.recorded.cases.libraries.registry import program

_CLASSES = 6


class _Labelled(torch.utils.data.Dataset[Any]):
    """Random pictures with a class for every pixel; 255 is ignored."""

    def __init__(self, count: int, side: int) -> None:
        draws = torch.Generator().manual_seed(count)
        self.images = torch.rand(count, 3, side, side, generator=draws)
        self.labels = torch.randint(0, _CLASSES, (count, side, side), generator=draws)
        self.labels[:, :8] = 255

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]


class _ConfusionMatrix:
    """Of ``references/segmentation/utils.py``."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.matrix: Any = None

    def update(self, target: torch.Tensor, prediction: torch.Tensor) -> None:
        if self.matrix is None:
            self.matrix = torch.zeros((self.classes, self.classes), dtype=torch.int64, device=target.device)
        with torch.inference_mode():
            counted = (target >= 0) & (target < self.classes)
            indices = self.classes * target[counted].to(torch.int64) + prediction[counted]
            self.matrix += torch.bincount(indices, minlength=self.classes**2).reshape(self.classes, self.classes)

    def __str__(self) -> str:
        matrix = self.matrix.float()
        correct = torch.diag(matrix).sum() / matrix.sum()
        overlap = torch.diag(matrix) / (matrix.sum(1) + matrix.sum(0) - torch.diag(matrix))
        return f"global correct: {correct.item() * 100:.1f} mean IoU: {overlap.mean().item() * 100:.1f}"


def _segment(model: Any, amp: bool) -> None:
    """``references/segmentation``: SGD with a polynomial rate, the auxiliary loss at a half, a confusion matrix."""
    loader = torch.utils.data.DataLoader(_Labelled(9, 192), batch_size=3, shuffle=True, drop_last=True)
    test = torch.utils.data.DataLoader(_Labelled(2, 224), batch_size=1)
    model.to("cuda")
    parameters = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": [p for p in model.aux_classifier.parameters() if p.requires_grad], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda") if amp else None
    rate = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=6, power=0.9)
    for _ in range(2):
        model.train()
        for image, target in loader:
            image, target = image.to("cuda"), target.to("cuda")
            with torch.autocast("cuda", enabled=amp):
                output = model(image)
                loss = functional.cross_entropy(output["out"], target, ignore_index=255)
                loss = loss + 0.5 * functional.cross_entropy(output["aux"], target, ignore_index=255)
            optimizer.zero_grad()
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            rate.step()
            print("loss", loss.item(), "lr", optimizer.param_groups[0]["lr"])
        model.eval()
        matrix = _ConfusionMatrix(_CLASSES)
        with torch.inference_mode():
            for image, target in test:
                image, target = image.to("cuda"), target.to("cuda")
                matrix.update(target.flatten(), model(image)["out"].argmax(1).flatten())
        print(matrix)


@program("torchvision")
def torchvision_deeplab() -> None:
    from torchvision.models import segmentation

    torch.manual_seed(0)
    _segment(
        segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=_CLASSES, aux_loss=True), False
    )


@program("torchvision")
def torchvision_fcn_amp() -> None:
    from torchvision.models import segmentation

    torch.manual_seed(0)
    _segment(segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=_CLASSES, aux_loss=True), True)


@program("torchvision")
def torchvision_deformable() -> None:
    """A network with deformable convolutions and pooling of regions, trained."""
    from torch import nn
    from torchvision import ops

    class Deformable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 64, 3, stride=2, padding=1)
            self.offsets = nn.Conv2d(64, 18, 3, padding=1)
            self.mask = nn.Conv2d(64, 9, 3, padding=1)
            self.deformed = ops.DeformConv2d(64, 128, 3, padding=1)
            self.pool = ops.MultiScaleRoIAlign(["0"], output_size=7, sampling_ratio=2)
            self.head = nn.Linear(128 * 49, 10)

        def forward(self, images: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
            features = self.stem(images).relu()
            features = self.deformed(features, self.offsets(features), self.mask(features).sigmoid())
            pooled = self.pool({"0": features}, boxes, [tuple(images.shape[-2:])] * len(images))
            dropped = ops.stochastic_depth(pooled, 0.2, "row", True)
            rows = ops.ps_roi_pool(features[:, :98], boxes, 7, 0.5).mean((1, 2, 3))
            return self.head(dropped.flatten(1)) + rows[:, None]

    torch.manual_seed(0)
    model = Deformable().to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        images = torch.rand(4, 3, 160, 192).to("cuda")
        corners = [torch.rand(20, 2) * 80 for _ in images]
        boxes = [torch.cat([corner, corner + 50], dim=1).to("cuda") for corner in corners]
        loss = model(images, boxes).logsumexp(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
