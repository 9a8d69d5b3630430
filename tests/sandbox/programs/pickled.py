"""pickle.dump and joblib-like dumps of a state dict, and its hash."""
import hashlib
import os
import pickle

import torch
from torch import nn

model = nn.LSTM(32, 64, batch_first=True).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    model(torch.randn(4, 10, 32, device="cuda"))[0].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
state = {name: value.cpu() for name, value in model.state_dict().items()}
with open("best.pkl", "wb") as stream:
    pickle.dump(state, stream)
print("SEE", os.path.getsize("best.pkl"), len(hashlib.sha256(open("best.pkl", "rb").read()).hexdigest()))
with open("best.pkl", "rb") as stream:
    again = pickle.load(stream)
model.load_state_dict(again)
print("SEE", sorted(again), [tuple(v.shape) for v in again.values()])
