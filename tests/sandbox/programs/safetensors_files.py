"""safetensors: files, bytes, and reading back some of the tensors."""
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import nn

model = nn.TransformerEncoderLayer(64, 4, batch_first=True).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(2, 16, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
save_file(model.state_dict(), "weights.safetensors", metadata={"format": "pt"})
Path("copy.safetensors").write_bytes(save({n: t.contiguous() for n, t in model.state_dict().items()}))
print("SEE", os.path.getsize("weights.safetensors"), os.path.getsize("copy.safetensors"))
model.load_state_dict(load_file("weights.safetensors", device="cuda"))
with safe_open("copy.safetensors", "pt", device="cpu") as file:
    print("SEE", len(list(file.keys())), file.get_slice("linear1.weight").get_shape())
os.remove("out/checkpoint-3/model.safetensors")
print("SEE", sorted(os.listdir("out/checkpoint-3")))
