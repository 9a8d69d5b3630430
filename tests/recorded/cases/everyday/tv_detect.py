"""Object detection in the manner of torchvision's reference script: batches of pictures of like shape, Faster R-CNN with
a MobileNet FPN, mixed precision, rate warmed up and dropped, evaluation with an overlap of predicted and true boxes."""

import bisect
import copy
import math
from collections import defaultdict

import torch
import torchvision
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision import ops

torch.manual_seed(3)
CLASSES = 11


class Shelves(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.records = []
        for i in range(n):
            h, w = [(240, 320), (320, 240), (256, 256)][i % 3]
            k = int(torch.randint(2, 9, (1,), generator=g))
            xywh = torch.rand(k, 4, generator=g) * torch.tensor([w * 0.6, h * 0.6, w * 0.35, h * 0.35]) + torch.tensor(
                [0, 0, 8.0, 8.0]
            )
            boxes = ops.box_convert(xywh, "xywh", "xyxy")
            boxes = ops.clip_boxes_to_image(boxes, (h, w))
            self.records.append((i, h, w, boxes, torch.randint(1, CLASSES, (k,), generator=g)))

    def __len__(self):
        return len(self.records)

    def get_height_and_width(self, i):
        return self.records[i][1:3]

    def __getitem__(self, i):
        image_id, h, w, boxes, labels = self.records[i]
        return torch.rand(3, h, w), {
            "boxes": boxes,
            "labels": labels,
            "image_id": image_id,
            "area": ops.box_area(boxes),
        }


class GroupedBatchSampler(BatchSampler):
    def __init__(self, sampler, group_ids, batch_size):
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self):
        buffers = defaultdict(list)
        for index in self.sampler:
            group = buffers[self.group_ids[index]]
            group.append(index)
            if len(group) == self.batch_size:
                yield list(group)
                group.clear()

    def __len__(self):
        return len(self.sampler) // self.batch_size


def aspect_ratio_groups(dataset, k=3):
    bins = sorted((2 ** torch.linspace(-1, 1, 2 * k + 1)).tolist())
    return [bisect.bisect_right(bins, h / w) for h, w in map(dataset.get_height_and_width, range(len(dataset)))]


def match(predictions, truths):
    hits = total = 0
    for image_id, truth in truths.items():
        boxes = predictions[image_id]["boxes"]
        total += len(truth)
        if len(boxes):
            hits += int((ops.box_iou(truth, boxes).max(1).values > 0.5).sum())
    return hits, total


def main():
    device = torch.device("cuda")
    train, test = Shelves(18, 0), Shelves(3, 1)
    batches = GroupedBatchSampler(RandomSampler(train), aspect_ratio_groups(train), 3)
    train_loader = DataLoader(train, batch_sampler=batches, num_workers=2, collate_fn=lambda batch: tuple(zip(*batch)))
    test_loader = DataLoader(test, batch_size=1, collate_fn=lambda batch: tuple(zip(*batch)))
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=CLASSES,
        trainable_backbone_layers=6,
        min_size=240,
        max_size=320,
        rpn_score_thresh=0.0,
        box_score_thresh=0.05,
    )
    model.to(device)
    norm, other = ops._utils.split_normalization_params(model)
    optimizer = torch.optim.SGD(
        [{"params": p, "weight_decay": w} for p, w in ((norm, 0.0), (other, 1e-4)) if p],
        lr=0.02,
        momentum=0.9,
        nesterov=True,
    )
    scaler = torch.amp.GradScaler("cuda")
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    best, kept = -1.0, {}
    for epoch in range(2):
        model.train()
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=4) if epoch == 0 else None
        for images, targets in train_loader:
            images = [image.to(device) for image in images]
            targets = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in t.items()} for t in targets]
            with torch.amp.autocast("cuda"):
                loss_dict = model(images, targets)
                losses = sum(loss_dict.values())
            if not math.isfinite(losses.item()):
                raise SystemExit("diverged")
            optimizer.zero_grad()
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
            if warmup is not None:
                warmup.step()
            print(
                epoch,
                {k: f"{v.item():.3f}" for k, v in loss_dict.items()},
                f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MB",
            )
        steps.step()
        model.eval()
        predictions, truths = {}, {}
        with torch.inference_mode():
            for images, targets in test_loader:
                outputs = model([image.to(device) for image in images])
                for target, output in zip(targets, outputs):
                    predictions[target["image_id"]] = {k: v.cpu() for k, v in output.items()}
                    truths[target["image_id"]] = target["boxes"]
        hits, total = match(predictions, truths)
        print(f"epoch {epoch}: {hits} of {total} found")
        if hits / total > best:
            best, kept = hits / total, copy.deepcopy({k: v.cpu() for k, v in model.state_dict().items()})
    model.load_state_dict(kept)
    print(f"best {best:.2f}")


main()
