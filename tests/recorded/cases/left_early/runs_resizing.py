"""Progressive resizing: small pictures first, then larger ones, the same network and optimizer throughout."""

import torch
import torch.nn.functional as F
from timm import create_model
from torch import nn
from torch.utils.data import DataLoader, Dataset

SCHEDULE = [(96, 48, 2), (160, 24, 1), (224, 16, 1)]  # size, batch, epochs


class Leaves(Dataset):
    def __init__(self, size, count=96):
        self.size, self.count = size, count
        self.images = torch.randint(0, 255, (count, 3, 64, 64), dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        image = self.images[i].float().div_(255)[None]
        return F.interpolate(image, size=(self.size, self.size), mode="bilinear", align_corners=False)[0], i % 12


def main():
    torch.manual_seed(3)
    model = create_model("mobilenetv3_small_100", pretrained=False, num_classes=12).cuda()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.002, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for size, batch_size, epochs in SCHEDULE:
        loader = DataLoader(Leaves(size), batch_size=batch_size, shuffle=True, drop_last=True)
        for epoch in range(epochs):
            for images, labels in loader:
                images, labels = images.cuda(), labels.cuda()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = loss_fn(model(images), labels)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            print(f"{size}px, epoch {epoch}: {loss.item():.3f}, {torch.cuda.max_memory_reserved() >> 20} MiB")


if __name__ == "__main__":
    main()
