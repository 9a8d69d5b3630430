"""torch.save into an open file and into BytesIO, which is then written over an old checkpoint."""
import io
from pathlib import Path

import torch
from torch import nn

model = nn.Conv2d(3, 64, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 3, 32, 32, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open("last.ckpt", "wb") as stream:
    torch.save(model.state_dict(), stream)
buffer = io.BytesIO()
torch.save({"model": model, "epoch": 7}, buffer)
Path("best.pt").write_bytes(buffer.getvalue())
print("SEE", Path("last.ckpt").stat().st_size, Path("best.pt").stat().st_size, len(buffer.getvalue()))
with open("last.ckpt", "rb") as stream:
    model.load_state_dict(torch.load(stream, map_location="cuda"))
loaded = torch.load("best.pt", weights_only=False)
print("SEE", loaded["epoch"], loaded["model"].weight.shape, loaded["model"].weight.device)
