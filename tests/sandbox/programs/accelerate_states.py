"""Accelerate: save_state with a limit, load_state, save_model."""
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

accelerator = Accelerator(project_config=ProjectConfiguration("accel", automatic_checkpoint_naming=True, total_limit=2))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(24, 32), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state()
print("SEE", sorted(os.listdir("accel/checkpoints")))
accelerator.load_state("accel/checkpoints/checkpoint_2")
accelerator.save_model(model, "accel/final")
print("SEE", sorted(os.listdir("accel/final")), os.path.getsize("accel/final/model.safetensors"))
