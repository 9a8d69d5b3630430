"""Deletes the folders of older runs before it starts its own (rmtree, pathlib, glob)."""
import shutil
from pathlib import Path

import torch
from torch import nn

for folder in sorted(Path("out").glob("checkpoint-*"))[:-1]:
    shutil.rmtree(folder)
shutil.rmtree("logs")
Path("logs").mkdir()
Path("notes.txt").unlink()
model = nn.Linear(128, 128).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    model(torch.randn(8, 128, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("logs/train.txt", "a") as log:
        log.write(f"step {step}\n")
torch.save(model, "best.pt")
print("SEE", sorted(p.name for p in Path("out").iterdir()), Path("logs/train.txt").read_text().split("\n"))
print("SEE", Path("notes.txt").exists(), Path("best.pt").stat().st_size)
