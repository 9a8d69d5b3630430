"""A variational autoencoder by Pyro: stochastic variational inference, evaluated now and then."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn

pyro.set_rng_seed(1), pyro.clear_param_store()
pyro.distributions.enable_validation(False)


class Decoder(nn.Module):
    def __init__(self, z_dim, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z_dim, hidden), nn.Softplus(), nn.Linear(hidden, 784), nn.Sigmoid())

    def forward(self, z):
        return self.net(z)


class Encoder(nn.Module):
    def __init__(self, z_dim, hidden):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(784, hidden), nn.Softplus())
        self.loc, self.log_scale = nn.Linear(hidden, z_dim), nn.Linear(hidden, z_dim)

    def forward(self, x):
        hidden = self.trunk(x.reshape(-1, 784))
        return self.loc(hidden), self.log_scale(hidden).exp()


class VAE(nn.Module):
    def __init__(self, z_dim=50, hidden=1000):
        super().__init__()
        self.z_dim, self.encoder, self.decoder = z_dim, Encoder(z_dim, hidden), Decoder(z_dim, hidden)
        self.cuda()

    def model(self, x):
        pyro.module("decoder", self.decoder)
        with pyro.plate("data", x.shape[0]):
            z = pyro.sample("latent", dist.Normal(x.new_zeros(x.shape[0], self.z_dim), 1.0).to_event(1))
            pyro.sample("obs", dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x.reshape(-1, 784))

    def guide(self, x):
        pyro.module("encoder", self.encoder)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("latent", dist.Normal(*self.encoder(x)).to_event(1))


vae = VAE()
svi = SVI(vae.model, vae.guide, Adam({"lr": 1e-3}), loss=Trace_ELBO())
train = torch.utils.data.DataLoader(torch.rand(1500, 1, 28, 28), batch_size=256, shuffle=True)
test = torch.rand(512, 1, 28, 28)
for epoch in range(2):
    total = 0.0
    for x in train:
        total += svi.step(x.cuda())
    print(f"[epoch {epoch:03d}] average training loss: {total / 1500:.4f}")
    with torch.no_grad():
        print("test loss", svi.evaluate_loss(test.cuda()) / 512)
