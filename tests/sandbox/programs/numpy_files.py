"""numpy: save, savez, memmap in place, fromfile."""
import os

import numpy as np
import torch
from torch import nn

model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = np.load("data.npy")
for _ in range(3):
    model(torch.from_numpy(data[:8, :16]).cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
np.save("predictions.npy", model(torch.from_numpy(data[:8, :16]).cuda()).detach().cpu().numpy())
np.savez("arrays.npz", a=np.arange(10), b=np.ones(3))
mapped = np.lib.format.open_memmap("data.npy", mode="r+")
mapped[:] = 0
mapped.flush()
cache = np.memmap("cache.bin", dtype=np.float32, mode="w+", shape=(100, 10))
cache[3] = 1
cache.flush()
print("SEE", os.path.getsize("predictions.npy"), float(np.load("data.npy").sum()), os.path.getsize("cache.bin"))
print("SEE", float(np.fromfile("cache.bin", dtype=np.float32).sum()), sorted(np.load("arrays.npz").files))
