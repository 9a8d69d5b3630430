"""Safetensors in every way: a file, bytes, a model with tied weights, a file opened tensor by tensor."""

import os
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, load_model, save, save_file, save_model
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4000, 256)
        self.block = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
        self.head = nn.Linear(256, 4000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.block(self.embedding(ids)))


folder = tempfile.mkdtemp()
path = os.path.join(folder, "model.safetensors")
model = Tied().cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randint(4000, (8, 64), device="cuda")).logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

save_model(model, path)
size = os.path.getsize(path)
try:
    save_file(model.state_dict(), path)
except RuntimeError as error:
    print(str(error).split()[:5])
data = save({name: tensor.contiguous() for name, tensor in model.block.state_dict().items()}, {"part": "block"})
with open(os.path.join(folder, "block.safetensors"), "wb") as file:
    file.write(data)

other = Tied().cuda()
load_model(other, path, device="cuda")
other.block.load_state_dict(load(data))
parts = load_file(os.path.join(folder, "block.safetensors"), device="cuda")
other.block.load_state_dict(parts)
with safe_open(path, framework="pt", device="cuda:0") as file:
    rows = file.get_slice("head.weight" if "head.weight" in file.keys() else "embedding.weight")[:128]
    names = list(file.keys())
assert rows.shape == (128, 256)
other(torch.randint(4000, (8, 64), device="cuda"))
print(size, len(data), len(names), torch.cuda.max_memory_allocated())
