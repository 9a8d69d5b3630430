"""A moving average of every parameter, kept as its attribute and updated when its gradient is complete."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def update_average(p):
    with torch.no_grad():
        if not hasattr(p, "average"):
            p.average = p.detach().clone()
        p.average.lerp_(p, 0.1)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    Residual(64),
    nn.MaxPool2d(2),
    Residual(64),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 100),
)
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update_average)
model = model.to("cuda", memory_format=torch.channels_last)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    images = torch.randn(32, 3, 64, 64).to("cuda", memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (32,)).to("cuda")
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

kept = {name: p.detach().clone() for name, p in model.named_parameters()}
with torch.no_grad():
    for p in model.parameters():
        p.data.copy_(p.average)
    model.eval()
    print(model(images).argmax(1).float().mean().item())
    for name, p in model.named_parameters():
        p.copy_(kept[name])
