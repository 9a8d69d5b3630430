"""timm's training script, in small."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from tests.recorded.cases.libraries.registry import program

_CLASSES = 100


class _Images(torch.utils.data.Dataset[Any]):
    """Random bytes and labels, as the script's fast collation expects them."""

    def __init__(self, count: int, side: int) -> None:
        draws = torch.Generator().manual_seed(count)
        self.images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=draws)
        self.labels = torch.randint(0, _CLASSES, (count,), generator=draws).tolist()
        self.transform = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index].numpy(), self.labels[index]


def _loaders(side: int, batch: int, mixup: Any) -> tuple[Any, Any]:
    from timm.data.loader import PrefetchLoader, fast_collate

    normal = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "device": torch.device("cuda")}
    train = torch.utils.data.DataLoader(
        _Images(4 * batch, side), batch_size=batch, shuffle=True, drop_last=True, collate_fn=mixup or fast_collate
    )
    held = torch.utils.data.DataLoader(_Images(batch + 3, side), batch_size=batch, collate_fn=fast_collate)
    return PrefetchLoader(train, re_prob=0.25, re_mode="pixel", **normal), PrefetchLoader(held, **normal)


def _train(
    name: str,
    side: int,
    batch: int,
    *,
    amp: torch.dtype | None = None,
    mixing: bool = False,
    accumulation: int = 1,
    opt: str = "adamw",
    clip_mode: str = "norm",
    **model_options: Any,
) -> None:
    from timm.data import FastCollateMixup
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
    from timm.models import create_model, model_parameters
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, dispatch_clip_grad, random_seed

    random_seed(42, 0)
    model = create_model(name, pretrained=False, num_classes=_CLASSES, drop_rate=0.1, **model_options)
    model.to("cuda")
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-3, weight_decay=0.05, layer_decay=None)
    scaler = NativeScaler() if amp is torch.float16 else None
    ema = ModelEmaV3(model, decay=0.999, use_warmup=True)
    mixup = None
    if mixing:
        mixup = FastCollateMixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=_CLASSES)
    train, held = _loaders(side, batch, mixup)
    train_loss = (SoftTargetCrossEntropy() if mixing else LabelSmoothingCrossEntropy(0.1)).to("cuda")
    validate_loss = nn.CrossEntropyLoss().to("cuda")
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=2, warmup_epochs=1, updates_per_epoch=4
    )
    for epoch in range(min(epochs, 2)):
        losses = AverageMeter()
        model.train()
        optimizer.zero_grad()
        for index, (images, targets) in enumerate(train):
            need_update = (index + 1) % accumulation == 0
            with torch.autocast("cuda", amp or torch.float16, enabled=amp is not None):
                loss = train_loss(model(images), targets)
            if accumulation > 1:
                loss = loss / accumulation
            if scaler is not None:
                scaler(
                    loss, optimizer, clip_grad=1.0, clip_mode=clip_mode,
                    parameters=model_parameters(model, exclude_head="agc" in clip_mode), need_update=need_update,
                )  # fmt: skip
            else:
                loss.backward()
                if need_update:
                    dispatch_clip_grad(
                        model_parameters(model, exclude_head="agc" in clip_mode), value=1.0, mode=clip_mode
                    )
                    optimizer.step()
            losses.update(loss.item() * accumulation, images.size(0))
            if not need_update:
                continue
            optimizer.zero_grad()
            ema.update(model, step=epoch * len(train) + index)
            torch.cuda.synchronize()
        for evaluated in (model, ema):
            evaluated.eval()
            top1 = AverageMeter()
            with torch.no_grad():
                for images, targets in held:
                    with torch.autocast("cuda", amp or torch.float16, enabled=amp is not None):
                        output = evaluated(images)
                        loss = validate_loss(output, targets)
                    top1.update(accuracy(output, targets, topk=(1, 5))[0].item(), output.size(0))
            print(OrderedDict([("loss", losses.avg), ("top1", top1.avg)]))
        scheduler.step(epoch + 1, top1.avg)


@program("timm", "torchvision")
def timm_resnet_fp32() -> None:
    _train("resnet18", 128, 16, opt="momentum")


@program("timm", "torchvision")
def timm_vit_amp_mixup() -> None:
    _train("vit_tiny_patch16_224", 224, 16, amp=torch.float16, mixing=True, drop_path_rate=0.1)


@program("timm", "torchvision")
def timm_convnext_bf16_accumulation() -> None:
    _train("convnext_atto", 160, 16, amp=torch.bfloat16, accumulation=2, opt="lamb", drop_path_rate=0.1)


@program("timm", "torchvision")
def timm_efficientnet_agc() -> None:
    _train("efficientnet_b0", 128, 16, amp=torch.float16, mixing=True, opt="rmsproptf", clip_mode="agc")
