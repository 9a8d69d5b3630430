"""An LSTM of one's own as TorchScript, in half precision optimized for inference, and trained in single."""

import torch
from torch import nn

torch.manual_seed(0)


class Cell(nn.Module):
    def __init__(self, n: int, d: int):
        super().__init__()
        self.wi, self.wh = nn.Linear(n, 4 * d), nn.Linear(d, 4 * d)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = state
        i, f, g, o = (self.wi(x) + self.wh(h)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class LSTM(nn.Module):
    def __init__(self, n: int, d: int):
        super().__init__()
        self.d = d
        self.cell = Cell(n, d)
        self.out = nn.Linear(d, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.size(0), self.d, dtype=x.dtype).to(x)
        c = torch.zeros_like(h)
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


net = torch.jit.script(LSTM(64, 512).cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    loss = net(torch.randn(256, 20, 64, device="cuda")).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
fast = torch.jit.freeze(torch.jit.script(LSTM(64, 512).cuda().half().eval()))
with torch.no_grad():
    for step in range(4):
        out = fast(torch.randn(1024, 20, 64, device="cuda", dtype=torch.half))
print(out.shape, loss.item())
