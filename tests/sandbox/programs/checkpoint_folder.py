"""torch.distributed.checkpoint in one process: a folder of shards, loaded again."""
import os

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id="dcp/step3")
dcp.load(state, checkpoint_id="dcp/step3")
model.load_state_dict(state["model"])
print("SEE", sorted(os.listdir("dcp/step3")))
