"""Cleans up and copies with shell commands."""
import os
import subprocess

import torch
from torch import nn

subprocess.run(["rm", "-rf", "out/checkpoint-1"], check=True)
os.system("cp config.json backup.json")
subprocess.check_call("echo started >> notes.txt && mkdir -p sub/dir && mv data.npy sub/dir/", shell=True)
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "best.pt")
print("SEE", subprocess.check_output(["ls", "out"], text=True).split(), open("notes.txt").read().split("\n"))
print("SEE", os.path.exists("backup.json"), os.listdir("sub/dir"), subprocess.getoutput("wc -c < best.pt"))
