"""Burgers' equation by DeepXDE on PyTorch: Adam, then once more with the points where the residual is largest."""

import os

os.environ["DDE_BACKEND"] = "pytorch"
import deepxde as dde
import numpy as np
import torch

torch.set_default_device("cuda")
dde.config.set_random_seed(0)


def pde(x, y):
    dy_x, dy_t = dde.grad.jacobian(y, x, i=0, j=0), dde.grad.jacobian(y, x, i=0, j=1)
    return dy_t + y * dy_x - 0.01 / np.pi * dde.grad.hessian(y, x, i=0, j=0)


domain = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 0.99))
boundary = dde.icbc.DirichletBC(domain, lambda x: 0, lambda _, on_boundary: on_boundary)
initial = dde.icbc.IC(domain, lambda x: -np.sin(np.pi * x[:, 0:1]), lambda _, on_initial: on_initial)
data = dde.data.TimePDE(domain, pde, [boundary, initial], num_domain=4000, num_boundary=200, num_initial=400)
net = dde.nn.FNN([2, *[128] * 4, 1], "tanh", "Glorot normal")
model = dde.Model(data, net)

model.compile("adam", lr=1e-3, decay=("step", 5, 0.9))
model.train(iterations=12, display_every=4)

candidates = domain.random_points(10000)
residual = np.abs(model.predict(candidates, operator=pde))
worst = np.argsort(residual[:, 0])[-50:]
data.add_anchors(candidates[worst])
model.compile("adam", lr=1e-3)
history, state = model.train(iterations=6, display_every=3, model_save_path="burgers")
grid = np.stack(np.meshgrid(np.linspace(-1, 1, 256), np.linspace(0, 0.99, 100)), -1).reshape(-1, 2)
print("mean solution", np.abs(model.predict(grid)).mean())
