"""A WGAN: five steps of the critic for one of the generator, a picture of samples after every epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LATENT, CRITIC_STEPS = 100, 5
torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.rand(640, 1, 28, 28) * 2 - 1), batch_size=64, shuffle=True, drop_last=True)
generator = nn.Sequential(
    nn.Linear(LATENT, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Linear(512, 1024), nn.BatchNorm1d(1024),
    nn.LeakyReLU(0.2), nn.Linear(1024, 784), nn.Tanh(),
).cuda()  # fmt: skip
critic = nn.Sequential(
    nn.Linear(784, 1024), nn.LeakyReLU(0.2), nn.Linear(1024, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)
)
critic = critic.cuda()
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
fixed = torch.randn(400, LATENT, device="cuda")
for epoch in range(4):
    for i, (real,) in enumerate(data):
        real = real.flatten(1).cuda()
        z = torch.randn(len(real), LATENT, device="cuda")
        fake = generator(z).detach()
        loss_c = critic(fake).mean() - critic(real).mean()
        optimizer_c.zero_grad()
        loss_c.backward()
        optimizer_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.01, 0.01)
        if i % CRITIC_STEPS == 0:
            made = generator(z)
            loss_g = -critic(made).mean()
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()
    with torch.no_grad():
        samples = generator(fixed).view(-1, 1, 28, 28).cpu()
    print(f"epoch {epoch}: critic {loss_c.item():.3f} generator {loss_g.item():.3f} {tuple(samples.shape)}")
