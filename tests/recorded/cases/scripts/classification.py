"""Image classification in the manner of the reference scripts: a ResNet of our own, EMA, label smoothing, warm-up."""

import argparse
import copy
import os
import tempfile
import time

import torch
import torch.utils.data
from torch import nn


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers, num_classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inplanes = [], 64
        for i, (planes, count) in enumerate(zip((64, 128, 256, 512), layers)):
            for j in range(count):
                blocks.append(BasicBlock(inplanes, planes, 2 if i and not j else 1))
                inplanes = planes
        self.layers = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        return self.fc(torch.flatten(self.avgpool(self.layers(self.stem(x))), 1))


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model, decay, device="cpu"):
        def ema_avg(avg_model_param, model_param, num_averaged):
            return decay * avg_model_param + (1 - decay) * model_param

        super().__init__(model, device, ema_avg, use_buffers=True)


class FakeImages(torch.utils.data.Dataset):
    def __init__(self, count, size, classes):
        self.count, self.size, self.classes = count, size, classes

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(3, self.size, self.size), index % self.classes


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def train_one_epoch(model, criterion, optimizer, data_loader, device, epoch, args, model_ema, scaler):
    model.train()
    losses, top1 = AverageMeter("loss", ":.3f"), AverageMeter("acc1", ":.2f")
    for i, (image, target) in enumerate(data_loader):
        start = time.time()
        image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.amp.autocast("cuda", enabled=scaler is not None):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        if i % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), image.shape[0])
        top1.update(acc1.item(), image.shape[0])
        print(f"Epoch [{epoch}] {losses} {top1} {time.time() - start:.0f} s")
        if args.max_steps and i + 1 >= args.max_steps:
            break


def evaluate(model, criterion, data_loader, device, log_suffix=""):
    model.eval()
    losses, top1 = AverageMeter("loss"), AverageMeter("acc1")
    with torch.inference_mode():
        for image, target in data_loader:
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(image)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), image.shape[0])
            top1.update(acc1.item(), image.shape[0])
    print(f"Test {log_suffix}: {losses} {top1}")
    return top1.avg


def main(args):
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = False
    train_set = FakeImages(args.images, args.size, 100)
    test_set = FakeImages(args.test_images, args.size, 100)
    sampler = torch.utils.data.RandomSampler(train_set)
    loader = torch.utils.data.DataLoader(
        train_set, batch_size=args.batch_size, sampler=sampler, num_workers=0, pin_memory=True, drop_last=True
    )
    test_loader = torch.utils.data.DataLoader(
        test_set, batch_size=args.batch_size, sampler=torch.utils.data.SequentialSampler(test_set), pin_memory=True
    )
    model = ResNet((2, 2, 2, 2), 100).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    decay, other = [], []
    for name, p in model.named_parameters():
        (other if "bn" in name or name.endswith("bias") else decay).append(p)
    groups = [{"params": decay, "weight_decay": 1e-4}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cuda") if args.amp else None
    main_lr = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(args.epochs - 1, 1))
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=1)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, main_lr], milestones=[1])
    model_ema = ExponentialMovingAverage(model, device=device, decay=0.999)
    best = 0.0
    for epoch in range(args.epochs):
        train_one_epoch(model, criterion, optimizer, loader, device, epoch, args, model_ema, scaler)
        scheduler.step()
        acc = evaluate(model, criterion, test_loader, device)
        evaluate(model_ema, criterion, test_loader, device, log_suffix="EMA")
        path = os.path.join(args.output_dir, "checkpoint.pth")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_ema": model_ema.state_dict(),
             "epoch": epoch, "args": args}, path
        )  # fmt: skip
        if acc > best:
            best = acc
        resumed = torch.load(path, map_location="cpu", weights_only=False)
        model.load_state_dict(resumed["model"])
        optimizer.load_state_dict(resumed["optimizer"])
        model_ema.load_state_dict(copy.copy(resumed["model_ema"]))
        os.remove(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="classification")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-b", "--batch-size", default=8, type=int)
    parser.add_argument("--epochs", default=90, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--images", default=100_000, type=int)
    parser.add_argument("--test-images", default=20, type=int)
    parser.add_argument("--size", default=64, type=int)
    parser.add_argument("--model-ema-steps", default=1, type=int)
    parser.add_argument("--max-steps", default=0, type=int)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--output-dir", default=tempfile.gettempdir())
    main(parser.parse_args())
