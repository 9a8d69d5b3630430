"""A Gaussian process on learnt features by GPyTorch: exact, trained on all points at once, predicted with conjugate gradients."""

import gpytorch
import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(2400, 18)
y = torch.sin(3 * x[:, 0]) + x[:, 1:4].sum(1) ** 2 + 0.1 * torch.randn(2400)
train_x, train_y, test_x, test_y = x[:1800].cuda(), y[:1800].cuda(), x[1800:].cuda(), y[1800:].cuda()


class Features(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(18, 1000),
            nn.ReLU(),
            nn.Linear(1000, 500),
            nn.ReLU(),
            nn.Linear(500, 50),
            nn.ReLU(),
            nn.Linear(50, 2),
        )


class DeepKernel(gpytorch.models.ExactGP):
    def __init__(self, inputs, targets, likelihood):
        super().__init__(inputs, targets, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
        self.features = Features()
        self.scale = gpytorch.utils.grid.ScaleToBounds(-1.0, 1.0)

    def forward(self, x):
        z = self.scale(self.features(x))
        return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))


likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
model = DeepKernel(train_x, train_y, likelihood).cuda()
optimizer = torch.optim.Adam(
    [
        {"params": model.features.parameters(), "weight_decay": 1e-4},
        {"params": model.covar_module.parameters()},
        {"params": model.mean_module.parameters()},
        {"params": model.likelihood.parameters()},
    ],
    lr=0.01,
)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 6])
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)

model.train(), likelihood.train()
for i in range(8):
    optimizer.zero_grad()
    loss = -mll(model(train_x), train_y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"iteration {i}: loss {loss.item():.3f} noise {likelihood.noise.item():.3f}")

torch.save(model.state_dict(), "dkl.pth")
model.eval(), likelihood.eval()
with torch.no_grad():
    predicted = likelihood(model(test_x))
    lower, upper = predicted.confidence_region()
    inside = ((test_y > lower) & (test_y < upper)).float().mean()
print("test MAE", (predicted.mean - test_y).abs().mean().item(), "covered", inside.item())
