"""As ultralytics saves: torch.save into BytesIO, write_bytes over last.pt and best.pt, then the optimizer stripped."""
import io
from copy import deepcopy
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 8, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
weights = Path("runs/detect/weights")
weights.mkdir(parents=True, exist_ok=True)
for epoch in range(3):
    model(torch.rand(2, 3, 32, 32, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    buffer = io.BytesIO()
    torch.save(
        {"epoch": epoch, "model": None, "ema": deepcopy(model).half(), "optimizer": optimizer.state_dict()}, buffer
    )
    for name in ("last.pt", "best.pt"):
        (weights / name).write_bytes(buffer.getvalue())
for path in weights.iterdir():
    saved = torch.load(path, map_location="cpu", weights_only=False)
    saved["model"], saved["ema"], saved["optimizer"] = saved["ema"], None, None
    saved["model"].half()
    torch.save(saved, path)
print("SEE", {p.name: p.stat().st_size for p in sorted(weights.iterdir())})
