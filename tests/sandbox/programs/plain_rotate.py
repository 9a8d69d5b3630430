"""A plain loop that keeps its last two checkpoints and deletes older ones, by date."""
import glob
import os

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
os.makedirs("runs/plain", exist_ok=True)
for step in range(3):
    loss = model(torch.randn(32, 64, device="cuda")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    path = f"runs/plain/step{step:04d}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
    kept = sorted(glob.glob("runs/plain/step*.pt"))
    for old in kept[:-2]:
        os.remove(old)
    print("SEE", kept[-2:], [os.path.getsize(p) for p in kept[-2:]])
again = torch.load("runs/plain/step0002.pt", map_location="cuda")
model.load_state_dict(again["model"])
optimizer.load_state_dict(again["optimizer"])
print("SEE", again["step"], sorted(os.listdir("runs/plain")))
