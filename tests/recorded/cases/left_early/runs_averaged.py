"""Stochastic weight averaging from an epoch on, batch normalisation made anew at the end."""

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(512, 300), torch.randint(0, 5, (512,))), batch_size=128, shuffle=True)
model = nn.Sequential(
    nn.Linear(300, 1500), nn.BatchNorm1d(1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 5)
)
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa_model = None
swa_start = 3
for epoch in range(6):
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch >= swa_start:
        if swa_model is None:
            swa_model, swa_scheduler = AveragedModel(model), SWALR(optimizer, swa_lr=0.01)
        swa_model.update_parameters(model)
        swa_scheduler.step()
    print(epoch, loss.item())
update_bn((x.cuda() for x, _ in loader), swa_model)
with torch.no_grad():
    print(swa_model(torch.randn(1000, 300).cuda()).softmax(-1).mean(0))
