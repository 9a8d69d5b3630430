"""Exports a run as zip and tar, and unpacks it elsewhere."""
import os
import shutil
import tarfile
import zipfile

import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
os.makedirs("export", exist_ok=True)
torch.save(model.state_dict(), "export/model.pt")
shutil.copy("config.json", "export/config.json")
shutil.make_archive("export", "zip", "export")
with tarfile.open("export.tar", "w") as tar:
    tar.add("export")
with zipfile.ZipFile("archive.zip", "a") as old:
    old.writestr("added.txt", "more")
shutil.unpack_archive("export.zip", "unpacked")
model.load_state_dict(torch.load("unpacked/model.pt", map_location="cuda"))
print("SEE", sorted(os.listdir("unpacked")), zipfile.ZipFile("archive.zip").namelist(), os.path.getsize("export.tar"))
