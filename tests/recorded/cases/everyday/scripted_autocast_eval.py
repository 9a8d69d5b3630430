"""A scripted network trained under autocast, then evaluated without; the last batch is smaller."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Gated(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.gate, self.down = nn.Linear(d, 4 * d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.norm(x)
        g = self.gate(h)
        return x + self.drop(self.down(g * torch.sigmoid(g * scale) * (self.up(h) + 1.0)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 256)
        self.blocks = nn.ModuleList([Gated(256) for _ in range(3)])
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.embed(x))
        for block in self.blocks:
            x = block(x, scale=1.702)
        return self.head(x.mean(1))


net = torch.jit.script(Net().cuda())
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for step in range(5):
    x, y = torch.randn(32, 128, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()
with torch.no_grad():
    for batch in (64, 64, 64, 16):
        out = net(torch.randn(batch, 128, 64, device="cuda")).argmax(-1)
print(loss.item(), out[0].item())
