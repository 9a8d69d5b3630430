"""A physics-informed network whose loss has second derivatives by torch.func: vmap of a hessian, then a backward pass."""

import torch
from torch.func import hessian, vmap

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
network = torch.nn.Sequential(
    torch.nn.Linear(3, 128), torch.nn.Tanh(), torch.nn.Linear(128, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)
).to(device)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)


def field(point):
    return network(point).squeeze(-1)


for _ in range(3):
    points = torch.rand(512, 3, device=device)
    curvature = vmap(hessian(field))(points)
    laplacian = curvature.diagonal(dim1=-2, dim2=-1).sum(-1)
    loss = (laplacian + 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
