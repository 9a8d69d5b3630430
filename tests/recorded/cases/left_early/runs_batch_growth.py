"""The batch grows instead of the learning rate falling: twice as large in every second epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(1024, 256), torch.randn(1024, 64))
model = nn.Sequential(
    *[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.SiLU())], nn.Linear(256, 64)
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
history = []
for epoch in range(8):
    batch_size = 32 * 2 ** (epoch // 2)
    total = 0.0
    for x, y in DataLoader(data, batch_size=batch_size, shuffle=True):
        loss = nn.functional.smooth_l1_loss(model(x.to("cuda")), y.to("cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        total += loss.item()
    print(epoch, batch_size, total)
print(torch.stack(history).mean().item())
