"""A release folder by copytree, a link to the newest checkpoint, loading through it."""
import os
import shutil

import torch
from torch import nn

model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.makedirs(f"versions/{step}", exist_ok=True)
    torch.save(model.state_dict(), f"versions/{step}/model.pt")
    if os.path.lexists("latest.pt"):
        os.unlink("latest.pt")
    os.symlink(f"versions/{step}/model.pt", "latest.pt")
shutil.copytree("versions", "release", dirs_exist_ok=True)
shutil.copy2("latest.pt", "best.pt")
os.link("versions/0/model.pt", "first.pt")
shutil.move("release/1", "moved")
model.load_state_dict(torch.load("latest.pt", map_location="cuda", weights_only=True))
model.load_state_dict(torch.load("release/2/model.pt", map_location="cuda", weights_only=True))
print("SEE", os.readlink("latest.pt"), os.path.getsize("best.pt"), os.stat("first.pt").st_nlink)
print("SEE", sorted(os.path.join(r, f) for r, _, fs in os.walk("release") for f in fs), os.listdir("moved"))
