"""torchvision: its reference script of detection."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.recorded.cases.libraries.registry import program

_CLASSES = 6


class _Scenes(torch.utils.data.Dataset[Any]):
    """Random pictures of several sizes with some boxes and masks each."""

    def __init__(self, count: int, with_masks: bool, small: int = 200, large: int = 280) -> None:
        draws = torch.Generator().manual_seed(count)
        self.items = []
        for index in range(count):
            height, width = (int(side) for side in torch.randint(small, large, (2,), generator=draws))
            boxes = int(torch.randint(1, 6, (1,), generator=draws))
            corners = torch.rand(boxes, 2, generator=draws) * torch.tensor([width / 2, height / 2])
            sizes = 20 + torch.rand(boxes, 2, generator=draws) * torch.tensor([width / 3, height / 3])
            target: dict[str, torch.Tensor] = {
                "boxes": torch.cat([corners, corners + sizes], dim=1),
                "labels": torch.randint(1, _CLASSES, (boxes,), generator=draws),
                "image_id": torch.tensor(index),
                "area": sizes.prod(dim=1),
                "iscrowd": torch.zeros(boxes, dtype=torch.int64),
            }
            if with_masks:
                target["masks"] = torch.zeros(boxes, height, width, dtype=torch.uint8)
                for mask, (left, top, right, bottom) in zip(target["masks"], target["boxes"].long(), strict=True):
                    mask[top:bottom, left:right] = 1
            self.items.append((torch.rand(3, height, width, generator=draws), target))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def _collate(batch: Any) -> Any:
    return tuple(zip(*batch, strict=True))


def _detector(model: Any, with_masks: bool = False, amp: bool = False, batch: int = 2) -> None:
    """``references/detection``: an epoch of training with a warm-up of the rate, then the evaluation."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(_Scenes(6, with_masks), batch_size=batch, shuffle=True, collate_fn=_collate)
    test = torch.utils.data.DataLoader(_Scenes(2, with_masks), batch_size=1, collate_fn=_collate)
    model.to("cuda")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=2)
    scaler = torch.amp.GradScaler("cuda") if amp else None
    model.train()
    for images, targets in loader:
        images = [image.to("cuda") for image in images]
        targets = [{name: value.to("cuda") for name, value in target.items()} for target in targets]
        with torch.autocast("cuda", enabled=amp):
            losses_by_name = model(images, targets)
            losses = sum(losses_by_name.values())
        value = losses.item()
        if not math.isfinite(value):
            raise SystemExit(f"Loss is {value}, stopping training")
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            losses.backward()
            optimizer.step()
        warmup.step()
        print("loss", value, "memory", torch.cuda.max_memory_allocated() >> 20)
    model.eval()
    with torch.inference_mode():
        for images, _ in test:
            outputs = model([image.to("cuda") for image in images])
            outputs = [{name: value.to("cpu") for name, value in output.items()} for output in outputs]


@program("torchvision")
def torchvision_fasterrcnn() -> None:
    from torchvision.models import detection

    torch.manual_seed(0)
    _detector(
        detection.fasterrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=_CLASSES, min_size=256, max_size=384
        )
    )


@program("torchvision")
def torchvision_fasterrcnn_mobile_amp() -> None:
    from torchvision.models import detection

    torch.manual_seed(0)
    _detector(
        detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=_CLASSES),
        amp=True,
    )


@program("torchvision")
def torchvision_maskrcnn() -> None:
    from torchvision.models import detection

    torch.manual_seed(0)
    model = detection.maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=_CLASSES, min_size=256, max_size=384
    )
    _detector(model, with_masks=True)


@program("torchvision")
def torchvision_retinanet() -> None:
    from torchvision.models import detection

    torch.manual_seed(0)
    _detector(
        detection.retinanet_resnet50_fpn(
            weights=None, weights_backbone=None, num_classes=_CLASSES, min_size=256, max_size=384
        )
    )


@program("torchvision")
def torchvision_ssdlite() -> None:
    from torchvision.models import detection

    torch.manual_seed(0)
    _detector(
        detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=_CLASSES), batch=3
    )
