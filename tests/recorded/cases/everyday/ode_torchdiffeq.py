"""A neural ODE by torchdiffeq's own tutorial: fourth-order Runge-Kutta, the field copied back for a picture."""

import torch
from torch import nn
from torchdiffeq import odeint

torch.manual_seed(9)
device = torch.device("cuda")
true_y0 = torch.tensor([[2.0, 0.0]]).to(device)
t = torch.linspace(0.0, 12.0, 40).to(device)
true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]).to(device)


class Lambda(nn.Module):
    def forward(self, t, y):
        return torch.mm(y**3, true_A)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 2))

    def forward(self, t, y):
        return self.net(y**3)


with torch.no_grad():
    true_y = odeint(Lambda(), true_y0, t, method="rk4")


def get_batch(size=256, length=6):
    s = torch.randint(0, 40 - length, (size,))
    batch_y = torch.stack([true_y[s + i] for i in range(length)], dim=0)
    return true_y[s].to(device), t[:length], batch_y.to(device)


func = Field().to(device)
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)
for itr in range(6):
    optimizer.zero_grad()
    batch_y0, batch_t, batch_y = get_batch()
    pred_y = odeint(func, batch_y0, batch_t, method="rk4").to(device)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    print(f"Iter {itr:04d} | Total Loss {loss.item():.6f}")
with torch.no_grad():
    pred_y = odeint(func, true_y0, t, method="rk4")
    y, x = torch.meshgrid(torch.linspace(-2, 2, 21), torch.linspace(-2, 2, 21), indexing="ij")
    field = func(0, torch.stack([x, y], -1).view(441, 2).to(device)).cpu().numpy()
    print(field.shape, torch.mean(torch.abs(pred_y - true_y)).item())
