"""Atomic saves: a temporary file beside the checkpoint, then os.replace over the one that is there."""
import os
import tempfile

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).cuda()
optimizer = torch.optim.Adam(model.parameters())


def save(obj, path):
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as stream:
        torch.save(obj, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(stream.name, path)


for step in range(3):
    model(torch.randn(16, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    save({"model": model.state_dict(), "step": step}, "last.ckpt")
    tmp = "best.pt.tmp"
    torch.save(model.state_dict(), tmp)
    os.rename(tmp, "best.pt")
print("SEE", os.path.getsize("last.ckpt"), os.path.getsize("best.pt"))
print("SEE", torch.load("last.ckpt", weights_only=True)["step"], sorted(n for n in os.listdir(".") if "tmp" in n))
