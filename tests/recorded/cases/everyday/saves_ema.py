"""An average of the weights that is saved by itself through a buffer in memory, and evaluated after it is loaded."""

import io
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

device = torch.device("cuda")
folder = Path(tempfile.mkdtemp())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, 20)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Average:
    def __init__(self, model):
        self.model = deepcopy(model).eval().requires_grad_(False)
        self.updates = 0

    def update(self, model):
        self.updates += 1
        with torch.no_grad():
            for mine, its in zip(self.model.state_dict().values(), model.state_dict().values()):
                if mine.dtype.is_floating_point:
                    mine.mul_(0.99).add_(its.detach(), alpha=0.01)


model = Net().to(device)
average = Average(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
for epoch in range(3):
    for _ in range(2):
        loss = model(torch.randn(16, 3, 64, 64, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
    buffer = io.BytesIO()
    torch.save(
        {
            "epoch": epoch,
            "ema": deepcopy(average.model).half(),
            "updates": average.updates,
            "optimizer": optimizer.state_dict(),
        },
        buffer,
    )
    data = buffer.getvalue()
    (folder / "last.pt").write_bytes(data)
    if epoch == 1:
        (folder / "best.pt").write_bytes(data)


def strip(path):
    """Leave out what only a resumed run needs."""
    checkpoint = torch.load(path, map_location=torch.device("cpu"), weights_only=False)
    checkpoint["model"], checkpoint["optimizer"], checkpoint["updates"] = checkpoint.pop("ema"), None, None
    for parameter in checkpoint["model"].parameters():
        parameter.requires_grad = False
    torch.save(checkpoint, path)


before = (folder / "best.pt").stat().st_size
for name in ("last.pt", "best.pt"):
    strip(folder / name)
assert (folder / "best.pt").stat().st_size < before
best = torch.load(folder / "best.pt", map_location="cpu", weights_only=False)
net = best["model"].to(device).float().eval()
with torch.no_grad():
    net(torch.randn(32, 3, 64, 64, device=device))
print(best["epoch"], sorted(path.name for path in folder.iterdir()), torch.cuda.max_memory_allocated())
