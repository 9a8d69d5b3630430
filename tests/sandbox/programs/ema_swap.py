"""An exponential moving average, deep-copied and saved beside the model; the older average is moved away."""
import copy
import os
import shutil

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()).cuda()
ema = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    model(torch.randn(2, 3, 32, 32, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters()):
            old.lerp_(new, 0.01)
shutil.move("best.pt", "previous.pt")
torch.save({"ema": ema.state_dict(), "model": model.half().state_dict()}, "best.pt")
print("SEE", os.path.getsize("best.pt"), os.path.getsize("previous.pt"))
