"""TensorBoard: scalars, a histogram and text; an older event file removed."""
import glob
import os

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

writer = SummaryWriter("tb")
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 64, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("lr", 0.1, step)
writer.add_text("note", "done")
writer.close()
os.remove("logs/old.txt")
print("SEE", len(glob.glob("tb/events*")), os.listdir("logs"))
