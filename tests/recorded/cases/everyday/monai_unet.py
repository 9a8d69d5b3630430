"""MONAI's 3D segmentation: transforms, CacheDataset, UNet, DiceCE, sliding windows, MetaTensors."""

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

set_determinism(seed=0)
rng = np.random.default_rng(0)


def case():
    image = rng.normal(size=(64, 64, 64)).astype(np.float32)
    label = np.zeros((64, 64, 64), dtype=np.uint8)
    label[20:40, 20:40, 20:40] = 1
    return {"image": image, "label": label}


files = [case() for _ in range(6)]
train_transforms = Compose(
    [
        EnsureChannelFirstd(keys=["image", "label"], channel_dim="no_channel"),
        ScaleIntensityd(keys="image"),
        EnsureTyped(keys=["image", "label"]),
        RandCropByPosNegLabeld(
            keys=["image", "label"],
            label_key="label",
            spatial_size=(48, 48, 48),
            pos=1,
            neg=1,
            num_samples=2,
            image_key="image",
            image_threshold=0,
        ),
        RandFlipd(keys=["image", "label"], prob=0.5, spatial_axis=0),
        RandRotate90d(keys=["image", "label"], prob=0.5, spatial_axes=(0, 2)),
    ]
)
val_transforms = Compose(
    [
        EnsureChannelFirstd(keys=["image", "label"], channel_dim="no_channel"),
        ScaleIntensityd(keys="image"),
        EnsureTyped(keys=["image", "label"]),
    ]
)
train_loader = DataLoader(CacheDataset(files[:4], train_transforms, progress=False), batch_size=2, shuffle=True)
val_loader = DataLoader(CacheDataset(files[4:], val_transforms, progress=False), batch_size=1)
device = torch.device("cuda:0")
model = UNet(
    spatial_dims=3, in_channels=1, out_channels=2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2
).to(device)
loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 1e-4, weight_decay=1e-5)
metric = DiceMetric(include_background=False, reduction="mean")
post_pred, post_label = Compose([AsDiscrete(argmax=True, to_onehot=2)]), Compose([AsDiscrete(to_onehot=2)])
for epoch in range(2):
    model.train()
    total = 0.0
    for batch in train_loader:
        inputs, labels = batch["image"].to(device), batch["label"].to(device)
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for batch in val_loader:
            inputs, labels = batch["image"].to(device), batch["label"].to(device)
            outputs = sliding_window_inference(inputs, (48, 48, 48), 4, model, overlap=0.5)
            outputs = [post_pred(i) for i in decollate_batch(outputs)]
            labels = [post_label(i) for i in decollate_batch(labels)]
            metric(y_pred=outputs, y=labels)
        score = metric.aggregate().item()
        metric.reset()
    print(epoch, total, score)
