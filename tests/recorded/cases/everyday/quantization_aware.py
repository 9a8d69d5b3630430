"""Quantisation-aware training: fused moving averages of observers."""

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant, self.dequant = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        self.conv2, self.fc = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.Linear(64, 10)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(self.quant(x))))
        x = self.conv2(x).mean((2, 3))
        return self.dequant(self.fc(x))


net = Net()
net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
net.train()
torch.ao.quantization.prepare_qat(net, inplace=True)
net.cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
for _ in range(4):
    x, y = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(10, (16,), device="cuda")
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
