"""Training in the manner of timm's script: create_model, create_dataset's stand-in, create_loader with mixup and random
erasing, create_optimizer_v2, a cosine schedule by updates, EMA, AMP with gradient clipping, validation of both, saving."""

import argparse
import os
import tempfile
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import numpy as np
import torch
import torch.nn as nn
from PIL import Image
from timm import utils
from timm.data import FastCollateMixup, Mixup, create_loader, resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.models import create_model, model_parameters, safe_model_name
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import NativeScaler

parser = argparse.ArgumentParser(description="ImageNet training")
parser.add_argument("--model", default="vit_tiny_patch16_224")
parser.add_argument("--img-size", default=112, type=int)
parser.add_argument("--num-classes", default=50, type=int)
parser.add_argument("-b", "--batch-size", default=24, type=int)
parser.add_argument("--grad-accum-steps", default=1, type=int)
parser.add_argument("--opt", default="adamw")
parser.add_argument("--opt-eps", default=None, type=float)
parser.add_argument("--opt-betas", default=None, type=float, nargs="+")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", default=0.05, type=float)
parser.add_argument("--layer-decay", default=0.75, type=float)
parser.add_argument("--clip-grad", default=1.0, type=float)
parser.add_argument("--clip-mode", default="norm")
parser.add_argument("--sched", default="cosine")
parser.add_argument("--sched-on-updates", action="store_true", default=True)
parser.add_argument("--lr", default=1e-3, type=float)
parser.add_argument("--min-lr", default=1e-6, type=float)
parser.add_argument("--warmup-lr", default=1e-5, type=float)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--warmup-epochs", default=1, type=int)
parser.add_argument("--cooldown-epochs", default=0, type=int)
parser.add_argument("--drop-path", default=0.1, type=float)
parser.add_argument("--reprob", default=0.25, type=float)
parser.add_argument("--mixup", default=0.8, type=float)
parser.add_argument("--cutmix", default=1.0, type=float)
parser.add_argument("--smoothing", default=0.1, type=float)
parser.add_argument("--model-ema-decay", default=0.9998, type=float)
parser.add_argument("--workers", default=2, type=int)
parser.add_argument("--seed", default=42, type=int)


class Pictures(torch.utils.data.Dataset):
    """PIL images and labels; timm sets ``transform``."""

    def __init__(self, n, classes):
        self.n, self.classes, self.transform = n, classes, None

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        image = Image.fromarray(np.random.default_rng(i).integers(0, 256, (140, 150, 3), dtype=np.uint8))
        return (image if self.transform is None else self.transform(image)), i % self.classes


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, amp_autocast, loss_scaler, model_ema):
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    update_time_m, losses_m = utils.AverageMeter(), utils.AverageMeter()
    model.train()
    accum_steps = args.grad_accum_steps
    num_updates = epoch * len(loader)
    optimizer.zero_grad()
    for batch_idx, (inputs, target) in enumerate(loader):
        start = time.time()
        with amp_autocast():
            loss = loss_fn(model(inputs), target)
        if accum_steps > 1:
            loss /= accum_steps
        loss_scaler(
            loss,
            optimizer,
            clip_grad=args.clip_grad,
            clip_mode=args.clip_mode,
            parameters=model_parameters(model, exclude_head="agc" in args.clip_mode),
            create_graph=second_order,
            need_update=(batch_idx + 1) % accum_steps == 0,
        )
        losses_m.update(loss.item() * accum_steps, inputs.size(0))
        num_updates += 1
        optimizer.zero_grad()
        if model_ema is not None:
            model_ema.update(model, step=num_updates)
        torch.cuda.synchronize()
        update_time_m.update(time.time() - start)
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
    lrl = [group["lr"] for group in optimizer.param_groups]
    print(f"Train: {epoch} Loss: {losses_m.avg:.3g} LR: {sum(lrl) / len(lrl):.3e}")
    return OrderedDict([("loss", losses_m.avg)])


def validate(model, loader, loss_fn, amp_autocast, log_suffix=""):
    losses_m, top1_m, top5_m = utils.AverageMeter(), utils.AverageMeter(), utils.AverageMeter()
    model.eval()
    with torch.inference_mode():
        for inputs, target in loader:
            with amp_autocast():
                output = model(inputs)
                if isinstance(output, (tuple, list)):
                    output = output[0]
                loss = loss_fn(output, target)
            acc1, acc5 = utils.accuracy(output, target, topk=(1, 5))
            losses_m.update(loss.item(), inputs.size(0))
            top1_m.update(acc1.item(), output.size(0))
            top5_m.update(acc5.item(), output.size(0))
    print(f"Test{log_suffix}: Acc@1 {top1_m.avg:.3f} Acc@5 {top5_m.avg:.3f} Loss {losses_m.avg:.3f}")
    return OrderedDict([("loss", losses_m.avg), ("top1", top1_m.avg), ("top5", top5_m.avg)])


def main():
    args = parser.parse_args()
    args.prefetcher, args.device = True, "cuda"
    device = utils.init_distributed_device(args)
    utils.random_seed(args.seed, 0)
    model = create_model(
        args.model,
        pretrained=False,
        num_classes=args.num_classes,
        img_size=args.img_size,
        drop_path_rate=args.drop_path,
    )
    print(f"Model {safe_model_name(args.model)} created, param count: {sum(m.numel() for m in model.parameters())}")
    data_config = resolve_data_config(vars(args), model=model, verbose=False)
    model.to(device=device)
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    amp_autocast = (
        partial(torch.autocast, device_type=device.type, dtype=torch.float16) if device.type == "cuda" else suppress
    )
    loss_scaler = NativeScaler(device=device.type)
    model_ema = utils.ModelEmaV3(model, decay=args.model_ema_decay, use_warmup=False)
    mixup_args = dict(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        prob=1.0,
        switch_prob=0.5,
        mode="batch",
        label_smoothing=args.smoothing,
        num_classes=args.num_classes,
    )
    mixup_active = args.mixup > 0 or args.cutmix > 0
    collate_fn = FastCollateMixup(**mixup_args) if mixup_active and args.prefetcher else None
    assert collate_fn is not None or Mixup(**mixup_args)
    common = dict(
        input_size=data_config["input_size"],
        batch_size=args.batch_size,
        mean=data_config["mean"],
        std=data_config["std"],
        interpolation="bicubic",
        num_workers=args.workers,
        device=device,
    )
    loader_train = create_loader(
        Pictures(100, args.num_classes),
        is_training=True,
        use_prefetcher=True,
        re_prob=args.reprob,
        re_mode="pixel",
        re_count=1,
        color_jitter=0.4,
        auto_augment="rand-m9-mstd0.5-inc1",
        collate_fn=collate_fn,
        **common,
    )
    loader_eval = create_loader(
        Pictures(60, args.num_classes),
        is_training=False,
        use_prefetcher=True,
        crop_pct=data_config["crop_pct"],
        **common,
    )
    train_loss_fn = (SoftTargetCrossEntropy() if mixup_active else LabelSmoothingCrossEntropy(args.smoothing)).to(
        device=device
    )
    validate_loss_fn = nn.CrossEntropyLoss().to(device=device)
    updates = len(loader_train) // args.grad_accum_steps
    lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args, decreasing_metric=False), updates_per_epoch=updates
    )
    with tempfile.TemporaryDirectory() as output_dir:
        saver = utils.CheckpointSaver(
            model=model,
            optimizer=optimizer,
            args=args,
            model_ema=model_ema,
            amp_scaler=loss_scaler,
            checkpoint_dir=output_dir,
            recovery_dir=output_dir,
            decreasing=False,
            max_history=2,
        )
        for epoch in range(num_epochs):
            train_metrics = train_one_epoch(
                epoch,
                model,
                loader_train,
                optimizer,
                train_loss_fn,
                args,
                lr_scheduler,
                amp_autocast,
                loss_scaler,
                model_ema,
            )
            eval_metrics = validate(model, loader_eval, validate_loss_fn, amp_autocast)
            eval_metrics = validate(model_ema, loader_eval, validate_loss_fn, amp_autocast, " (EMA)")
            utils.update_summary(
                epoch,
                train_metrics,
                eval_metrics,
                filename=os.path.join(output_dir, "summary.csv"),
                write_header=epoch == 0,
            )
            best_metric, best_epoch = saver.save_checkpoint(epoch, metric=eval_metrics["top1"])
            lr_scheduler.step(epoch + 1, eval_metrics["top1"])
    print(f"*** Best metric: {best_metric} (epoch {best_epoch})")


if __name__ == "__main__":
    main()
