"""SWAG: after a warm-up, the deviations of the weights are collected at the end of every epoch, then networks are sampled."""

from collections import deque

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

torch.manual_seed(0)
device = torch.device("cuda")
data = torch.utils.data.TensorDataset(torch.randn(1000, 3, 32, 32), torch.randint(0, 100, (1000,)))
loader = torch.utils.data.DataLoader(data, batch_size=100, shuffle=True)


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


net = nn.Sequential(
    conv(3, 64),
    conv(64, 128, 2),
    conv(128, 256, 2),
    conv(256, 512, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(512, 100),
).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
avg = AveragedModel(net)
swalr = SWALR(opt, swa_lr=0.01)
deviations = deque(maxlen=20)
square = torch.zeros_like(nn.utils.parameters_to_vector(net.parameters()))
n = 0
for epoch in range(30):
    net.train()
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch >= 5:
        avg.update_parameters(net)
        swalr.step()
        with torch.no_grad():
            w = nn.utils.parameters_to_vector(net.parameters())
            mean = nn.utils.parameters_to_vector(avg.module.parameters())
            square = (square * n + w**2) / (n + 1)
            n += 1
            deviations.append(w - mean)
update_bn(loader, avg, device=device)
with torch.no_grad():
    mean = nn.utils.parameters_to_vector(avg.module.parameters())
    D = torch.stack(list(deviations), 1)
    probs = 0
    for s in range(5):
        var = (square - mean**2).clamp(min=1e-30)
        w = (
            mean
            + var.sqrt() * torch.randn_like(mean) / 2**0.5
            + D @ torch.randn(D.shape[1], device=device) / (2 * (D.shape[1] - 1)) ** 0.5
        )
        nn.utils.vector_to_parameters(w, net.parameters())
        net.eval()
        probs = probs + torch.softmax(net(data.tensors[0][:200].to(device)), 1) / 5
print(probs.max(1).values.mean().item())
