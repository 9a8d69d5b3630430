"""h5py: metrics added to a file that is there, a new file of features."""
import os

import h5py
import numpy as np
import torch
from torch import nn

model = nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with h5py.File("data.h5", "a") as file:
    file["x"][...] = 0
    file.create_dataset("loss", data=np.arange(3.0))
with h5py.File("features.h5", "w") as file:
    file["f"] = np.zeros((100, 8), dtype=np.float32)
with h5py.File("data.h5") as file:
    print("SEE", sorted(file), float(file["x"][...].sum()))
print("SEE", os.path.getsize("features.h5"))
