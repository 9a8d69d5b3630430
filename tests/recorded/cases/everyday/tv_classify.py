"""Image classification in the manner of torchvision's reference script: label smoothing, mixup or cutmix drawn for every
batch, weight decay not on norms, warm-up then cosine, EMA of the weights, mixed precision, a checkpoint every epoch."""

import argparse
import os
import tempfile
import time

import torch
import torch.utils.data
import torchvision
from torch import nn
from torch.utils.data.dataloader import default_collate
from torchvision.transforms import v2


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


class SmoothedValue:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    @property
    def global_avg(self):
        return self.total / max(self.count, 1)


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        maxk, batch_size = max(topk), target.size(0)
        if target.ndim == 2:
            target = target.max(dim=1)[1]
        _, pred = output.topk(maxk, 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / batch_size) for k in topk]


def set_weight_decay(model, weight_decay, norm_weight_decay):
    norms = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    params = {"norm": [], "other": []}

    def add(module):
        for p in module.parameters(recurse=False):
            if p.requires_grad:
                params["norm" if isinstance(module, norms) else "other"].append(p)
        for child in module.children():
            add(child)

    add(model)
    decays = {"norm": norm_weight_decay, "other": weight_decay}
    return [{"params": params[key], "weight_decay": decays[key]} for key in params if params[key]]


def train_one_epoch(model, criterion, optimizer, loader, device, epoch, args, ema, scaler):
    model.train()
    losses, acc1s, rate = SmoothedValue(), SmoothedValue(), SmoothedValue()
    for i, (image, target) in enumerate(loader):
        start = time.time()
        image, target = image.to(device), target.to(device)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            if args.clip_grad_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if ema and i % args.model_ema_steps == 0:
            ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                ema.n_averaged.fill_(0)
        acc1, _ = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item())
        acc1s.update(acc1.item(), image.shape[0])
        rate.update(image.shape[0] / (time.time() - start))
    print(
        f"Epoch [{epoch}] lr {optimizer.param_groups[0]['lr']:.4f} loss {losses.global_avg:.4f} acc {acc1s.global_avg:.2f}"
    )


def evaluate(model, criterion, loader, device, log_suffix=""):
    model.eval()
    losses, acc1s = SmoothedValue(), SmoothedValue()
    with torch.inference_mode():
        for image, target in loader:
            image = image.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(image)
            losses.update(criterion(output, target).item())
            acc1, _acc5 = accuracy(output, target, topk=(1, 5))
            acc1s.update(acc1.item(), image.shape[0])
    print(f"Test {log_suffix} Acc@1 {acc1s.global_avg:.3f} loss {losses.global_avg:.3f}")
    return acc1s.global_avg


def main(args):
    torch.manual_seed(7)
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = False
    normal = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float, scale=True),
        v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        v2.ToPureTensor(),
    ]
    augment = [
        v2.RandomResizedCrop(args.train_crop_size, antialias=True),
        v2.RandomHorizontalFlip(0.5),
        v2.TrivialAugmentWide(),
    ]
    train_set = torchvision.datasets.FakeData(
        90, (3, 160, 160), args.classes, v2.Compose([*augment, *normal, v2.RandomErasing(p=0.1)])
    )
    test_set = torchvision.datasets.FakeData(
        40, (3, 160, 160), args.classes, v2.Compose([v2.Resize(146, antialias=True), v2.CenterCrop(144), *normal])
    )
    mixing = v2.RandomChoice(
        [v2.MixUp(alpha=args.mixup_alpha, num_classes=args.classes), v2.CutMix(alpha=1.0, num_classes=args.classes)]
    )

    def collate_fn(batch):
        return mixing(*default_collate(batch))

    train_loader = torch.utils.data.DataLoader(
        train_set,
        args.batch_size,
        sampler=torch.utils.data.RandomSampler(train_set),
        num_workers=args.workers,
        pin_memory=True,
        collate_fn=collate_fn,
    )
    test_loader = torch.utils.data.DataLoader(
        test_set,
        args.batch_size,
        sampler=torch.utils.data.SequentialSampler(test_set),
        num_workers=args.workers,
        pin_memory=True,
    )

    model = torchvision.models.get_model(args.model, weights=None, num_classes=args.classes).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    parameters = set_weight_decay(model, args.weight_decay, args.norm_weight_decay)
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=args.epochs - args.lr_warmup_epochs, eta_min=0.0
    )
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=args.lr_warmup_epochs)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, schedulers=[warmup, cosine], milestones=[args.lr_warmup_epochs]
    )
    adjust = args.batch_size * args.model_ema_steps / args.epochs
    ema = ExponentialMovingAverage(model, device=device, decay=1.0 - min(1.0, (1.0 - 0.99998) * adjust))
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, train_loader, device, epoch, args, ema, scaler)
        lr_scheduler.step()
        evaluate(model, criterion, test_loader, device)
        evaluate(ema, criterion, test_loader, device, "EMA")
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
            "args": args,
            "model_ema": ema.state_dict(),
            "scaler": scaler.state_dict() if scaler else None,
        }
        torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--classes", default=100, type=int)
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("-j", "--workers", default=2, type=int)
    parser.add_argument("--lr", default=0.5, type=float)
    parser.add_argument("--wd", dest="weight_decay", default=2e-5, type=float)
    parser.add_argument("--norm-weight-decay", default=0.0, type=float)
    parser.add_argument("--label-smoothing", default=0.1, type=float)
    parser.add_argument("--mixup-alpha", default=0.2, type=float)
    parser.add_argument("--lr-warmup-epochs", default=1, type=int)
    parser.add_argument("--train-crop-size", default=128, type=int)
    parser.add_argument("--model-ema-steps", default=2, type=int)
    parser.add_argument("--clip-grad-norm", default=1.0, type=float)
    parser.add_argument("--no-amp", dest="amp", action="store_false")
    with tempfile.TemporaryDirectory() as folder:
        parser.add_argument("--output-dir", default=folder)
        main(parser.parse_args())
