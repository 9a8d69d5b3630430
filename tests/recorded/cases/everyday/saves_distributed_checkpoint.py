"""``torch.distributed.checkpoint`` of one process: state dictionaries saved into a folder and loaded in place."""

import os
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder = tempfile.mkdtemp()


def build():
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer):
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


model, optimizer = build()
for number in range(3):
    step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": torch.tensor(number)}, checkpoint_id=f"{folder}/{number}")
print(sorted(os.listdir(f"{folder}/2")), os.path.getsize(f"{folder}/2/__0_0.distcp") > 3 * 4 * 2 * 512 * 2048)
del model, optimizer, weights, states

model, optimizer = build()
weights, states = get_state_dict(model, optimizer)
wanted = {"model": weights, "optimizer": states, "step": torch.tensor(0)}
dcp.load(wanted, checkpoint_id=f"{folder}/2")
assert wanted["step"].item() == 2
set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
step(model, optimizer)
print(torch.cuda.max_memory_allocated())
