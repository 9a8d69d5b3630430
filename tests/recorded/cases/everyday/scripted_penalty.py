"""A gradient penalty through a scripted critic: its derivatives are differentiated once more."""

import torch
from torch import nn

torch.manual_seed(0)


@torch.jit.script
def mish(x):
    return x * torch.tanh(torch.nn.functional.softplus(x))


class Critic(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1)

    def forward(self, x):
        return self.c(mish(self.b(mish(self.a(x)))))


net = Critic(256).cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-4)
for step in range(5):
    x = torch.randn(2048, 256, device="cuda", requires_grad=True)
    score = net(x)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    loss = score.mean() + 10 * (grad.norm(2, 1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
