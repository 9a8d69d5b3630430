"""Binary segmentation with segmentation_models_pytorch: a U-Net, Dice and focal losses, scores by its own metrics."""

import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(3)
device = "cuda"


class Cells(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, 128, 160, generator=generator)
        return image, (image.mean(0, keepdim=True) > 0.5).long()


model = smp.Unet("resnet18", encoder_weights=None, classes=1, decoder_attention_type="scse").to(device)
dice = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
focal = smp.losses.FocalLoss(smp.losses.BINARY_MODE)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
loader = DataLoader(Cells(48), batch_size=8, shuffle=True)
for epoch in range(2):
    model.train()
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        logits = model(images)
        loss = dice(logits, masks) + focal(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        stats = smp.metrics.get_stats((logits.sigmoid() > 0.5).long(), masks, mode="binary")
        iou = smp.metrics.iou_score(*stats, reduction="micro-imagewise")
        print(f"{epoch} loss {loss.item():.4f} iou {iou.item():.4f}")
    model.eval()
    with torch.no_grad():
        for images, masks in DataLoader(Cells(8), batch_size=4):
            scores = dice(model(images.to(device)), masks.to(device))
            print("valid", scores.item())
