"""A run folder with a date: code copied into it, configuration as YAML, git asked, a PID file removed at exit."""
import atexit
import os
import shutil
import subprocess
import sys

import torch
import yaml
from torch import nn

run = "runs/2026-01-01"
os.makedirs(run, exist_ok=True)
shutil.copy(sys.argv[0], os.path.join(run, "code.py"))
with open(f"{run}/config.yaml", "w") as stream:
    yaml.safe_dump({"lr": 0.1, "layers": [1, 2]}, stream)
with open("train.pid", "w") as stream:
    stream.write("1")
atexit.register(os.remove, "train.pid")
version = subprocess.run([sys.executable, "-c", "print(1 + 1)"], capture_output=True, text=True).stdout
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": model.state_dict()}, f"{run}/model.pth")
print("SEE", sorted(os.listdir(run)), version.strip(), os.path.exists("train.pid"))
