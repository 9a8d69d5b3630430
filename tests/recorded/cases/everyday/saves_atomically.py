"""A plain loop: checkpoints written beside and moved into place, the last three kept, the newest one resumed."""

import glob
import os
import tempfile

import torch
from torch import nn

device = "cuda"
folder = tempfile.mkdtemp()


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model = model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def save(step, model, optimizer):
    target = os.path.join(folder, f"step_{step:05d}.pt")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, target)
    for old in sorted(glob.glob(os.path.join(folder, "step_*.pt")))[:-3]:
        os.remove(old)


def train(first, last, model, optimizer):
    for step in range(first, last):
        x = torch.randn(256, 784).to(device)
        y = torch.randint(10, (256,)).to(device)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        save(step, model, optimizer)


model, optimizer = build()
train(0, 5, model, optimizer)
kept = sorted(os.listdir(folder))
assert kept == [f"step_{step:05d}.pt" for step in (2, 3, 4)], kept
assert len({os.path.getsize(os.path.join(folder, name)) for name in kept}) == 1

del model, optimizer
model, optimizer = build()
newest = torch.load(os.path.join(folder, kept[-1]), map_location="cpu")
model.load_state_dict(newest["model"])
optimizer.load_state_dict(newest["optimizer"])
train(newest["step"] + 1, 8, model, optimizer)
print(sorted(os.listdir(folder)), torch.cuda.max_memory_allocated())
