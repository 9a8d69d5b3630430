"""A convolutional variational autoencoder under torch.compile."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mu, self.logvar = nn.Linear(64 * 256, 64), nn.Linear(64 * 256, 64)
        self.up = nn.Linear(64, 64 * 256)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.decoder(self.up(z).view(-1, 64, 16, 16)).sigmoid(), mu, logvar


net = VAE().cuda()
run = torch.compile(net)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
for _ in range(4):
    x = torch.rand(64, 3, 64, 64, device="cuda")
    out, mu, logvar = run(x)
    loss = F.binary_cross_entropy(out, x, reduction="sum") - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
