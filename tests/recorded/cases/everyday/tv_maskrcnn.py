"""Mask R-CNN fine-tuned on two classes: a ResNet-50 FPN detector with new heads, pictures with boxes and masks as
tv_tensors, a collate function, the rate warmed up in the first epoch, evaluation one picture at a time."""

import math
import sys

import numpy as np
import torch
import torchvision
from torchvision import tv_tensors
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.ops.boxes import masks_to_boxes
from torchvision.transforms import v2 as T


class People(torch.utils.data.Dataset):
    """Ellipses of different sizes on noise: pictures and masks of instances."""

    def __init__(self, count, transforms):
        self.count, self.transforms = count, transforms

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        height, width = int(rng.integers(180, 260)), int(rng.integers(200, 300))
        image = torch.from_numpy(rng.integers(0, 256, (3, height, width), dtype=np.uint8))
        ys, xs = np.mgrid[:height, :width]
        mask = np.zeros((height, width), dtype=np.uint8)
        for number in range(1, int(rng.integers(2, 5))):
            cy, cx = rng.integers(30, height - 30), rng.integers(30, width - 30)
            ry, rx = rng.integers(15, 30), rng.integers(10, 25)
            mask[((ys - cy) / ry) ** 2 + ((xs - cx) / rx) ** 2 <= 1] = number
        mask = torch.from_numpy(mask)
        obj_ids = torch.unique(mask)[1:]
        masks = (mask == obj_ids[:, None, None]).to(dtype=torch.uint8)
        boxes = masks_to_boxes(masks)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
            "masks": tv_tensors.Mask(masks),
            "labels": torch.ones((len(obj_ids),), dtype=torch.int64),
            "image_id": index,
            "area": (boxes[:, 3] - boxes[:, 1]) * (boxes[:, 2] - boxes[:, 0]),
            "iscrowd": torch.zeros((len(obj_ids),), dtype=torch.int64),
        }
        return self.transforms(tv_tensors.Image(image), target)


def get_transform(train):
    transforms = [T.RandomHorizontalFlip(0.5)] if train else []
    transforms += [
        T.ToDtype(torch.float, scale=True),
        T.SanitizeBoundingBoxes() if train else T.Identity(),
        T.ToPureTensor(),
    ]
    return T.Compose(transforms)


def get_model_instance_segmentation(num_classes):
    model = torchvision.models.detection.maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=91,
        min_size=224,
        max_size=320,
        rpn_post_nms_top_n_test=100,
        box_detections_per_img=20,
    )
    in_features = model.roi_heads.box_predictor.cls_score.in_features
    model.roi_heads.box_predictor = FastRCNNPredictor(in_features, num_classes)
    in_features_mask = model.roi_heads.mask_predictor.conv5_mask.in_channels
    model.roi_heads.mask_predictor = MaskRCNNPredictor(in_features_mask, 256, num_classes)
    return model


def collate_fn(batch):
    return tuple(zip(*batch))


def train_one_epoch(model, optimizer, data_loader, device, epoch):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(data_loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0 / 1000, total_iters=warmup_iters)
    for images, targets in data_loader:
        images = list(image.to(device) for image in images)
        targets = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        print(f"epoch {epoch} loss {loss_value:.4f}", {k: round(v.item(), 4) for k, v in loss_dict.items()})


@torch.inference_mode()
def evaluate(model, data_loader, device):
    model.eval()
    results = {}
    for images, targets in data_loader:
        images = list(img.to(device) for img in images)
        torch.cuda.synchronize()
        outputs = model(images)
        outputs = [{k: v.to(torch.device("cpu")) for k, v in t.items()} for t in outputs]
        results.update({target["image_id"]: output for target, output in zip(targets, outputs)})
    print("evaluated", {image: len(output["boxes"]) for image, output in results.items()})


torch.manual_seed(1)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
dataset, dataset_test = People(8, get_transform(train=True)), People(8, get_transform(train=False))
indices = torch.randperm(len(dataset)).tolist()
dataset = torch.utils.data.Subset(dataset, indices[:-2])
dataset_test = torch.utils.data.Subset(dataset_test, indices[-2:])
data_loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=collate_fn)
data_loader_test = torch.utils.data.DataLoader(dataset_test, batch_size=1, shuffle=False, collate_fn=collate_fn)
model = get_model_instance_segmentation(2)
model.to(device)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=0.0005)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
for epoch in range(1):
    train_one_epoch(model, optimizer, data_loader, device, epoch)
    lr_scheduler.step()
    evaluate(model, data_loader_test, device)
