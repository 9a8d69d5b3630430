"""wandb in offline mode: its own process, its own folder."""
import os

os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
import torch
import wandb
from torch import nn

run = wandb.init(project="test", dir=".")
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    wandb.log({"step": step})
wandb.finish()
print("SEE", os.path.isdir("wandb"))
