"""A snapshot of all that a run goes on with: generators, sampler, scaler, scheduler, and half of an epoch's rows."""

import os
import pickle
import random
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

folder = tempfile.mkdtemp()
path = os.path.join(folder, "snapshot.pt")
rows = TensorDataset(torch.arange(64).float().unsqueeze(1).expand(64, 256).clone(), torch.arange(64) % 10)


def build():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    return model, optimizer, scheduler, torch.amp.GradScaler("cuda")


def batches(order, done):
    return DataLoader(torch.utils.data.Subset(rows, order[done:]), batch_size=8)


def train(model, optimizer, scheduler, scaler, order, done, most):
    for x, y in batches(order, done):
        if most == 0:
            break
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        done, most = done + len(x), most - 1
    return done


random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
order = list(RandomSampler(rows))
parts = build()
done = train(*parts, order, 0, 3)
snapshot = {
    "model": parts[0].state_dict(), "optimizer": parts[1].state_dict(), "scheduler": parts[2].state_dict(),
    "scaler": parts[3].state_dict(), "order": torch.tensor(order), "done": done,
    "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all()},
}  # fmt: skip
torch.save(snapshot, path)
with open(os.path.join(folder, "best.pkl"), "wb") as file:
    pickle.dump({name: tensor.cpu() for name, tensor in parts[0].state_dict().items()}, file)
drawn = torch.rand(3).tolist(), random.random(), float(np.random.rand())

del parts, snapshot
parts = build()
state = torch.load(path, map_location="cpu", weights_only=False)
for part, name in zip(parts, ("model", "optimizer", "scheduler", "scaler")):
    part.load_state_dict(state[name])
random.setstate(state["rng"]["python"])
np.random.set_state(state["rng"]["numpy"])
torch.set_rng_state(state["rng"]["torch"])
torch.cuda.set_rng_state_all(state["rng"]["cuda"])
assert (torch.rand(3).tolist(), random.random(), float(np.random.rand())) == drawn
assert state["done"] == 24
assert sorted(state["order"].tolist()) == list(range(64))
assert train(*parts, state["order"].tolist(), state["done"], 99) == 64
with open(os.path.join(folder, "best.pkl"), "rb") as file:
    parts[0].load_state_dict(pickle.load(file))
print(os.path.getsize(path) // 1000, torch.cuda.max_memory_allocated())
