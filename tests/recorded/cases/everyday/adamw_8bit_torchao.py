"""torchao AdamW of 8 bits on a transformer encoder: its step calls torch.compile(...)."""

import torch
from torch import nn
from torchao.optim import AdamW8bit

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
net = nn.Sequential(nn.Embedding(10000, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 10000)).cuda()
optimizer = AdamW8bit(net.parameters(), 1e-3)
for step in range(4):
    x = torch.randint(0, 10000, (8, 128), device="cuda")
    loss = nn.functional.cross_entropy(net(x).flatten(0, 1), x.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
