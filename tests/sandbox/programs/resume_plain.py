"""Resumes from best.pt where it is there, trains on, saves; as most training scripts do."""
import os

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
start = 0
if os.path.isfile("best.pt"):
    saved = torch.load("best.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"] + 1
for step in range(start, start + 3):
    model(torch.randn(8, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "best.pt")
print("SEE", start, step, os.path.getsize("best.pt"))
