"""A scripted activation and a scripted head over lengths that change, with gradients and without."""

import torch
from torch import nn


@torch.jit.script
def snake(x, alpha):
    return x + (1.0 / (alpha + 1e-9)) * torch.pow(torch.sin(x * alpha), 2)


torch.manual_seed(0)


class Vocoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Conv1d(d, d, 7, padding=3), nn.Conv1d(d, d, 1)
        self.alpha = nn.Parameter(torch.ones(1, d, 1))

    def forward(self, x):
        return x + self.b(snake(self.a(snake(x, self.alpha)), self.alpha))


net = nn.Sequential(Vocoder(64), Vocoder(64)).cuda()
head = nn.Sequential(nn.Conv1d(64, 1, 7), nn.Tanh(), nn.Flatten()).cuda()
head = torch.jit.script(head)
optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], 1e-3)
for length in (8000, 9000, 7000, 11000, 10000):
    loss = head(net(torch.randn(4, 64, length, device="cuda"))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    for length in (20000, 24000, 28000, 30000, 26000):
        out = head(net(torch.randn(4, 64, length, device="cuda")))
print(out.shape)
