"""Colourising pictures in two phases: the generator alone with a pixel loss, then against a discriminator."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda")
torch.manual_seed(0)


class Photos(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        lab = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(i))
        return {"L": lab[:1], "ab": lab[1:] * 2 - 1}


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, inplace=True))


class Generator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.down = nn.ModuleList([conv(1, width, 2), conv(width, 2 * width, 2), conv(2 * width, 4 * width, 2)])
        self.middle = conv(4 * width, 4 * width)
        self.up = nn.ModuleList([conv(8 * width, 2 * width), conv(4 * width, width), conv(2 * width, width)])
        self.out = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
        x = self.middle(x)
        for layer, skip in zip(self.up, reversed(skips)):
            x = nn.functional.interpolate(layer(torch.cat([x, skip], 1)), scale_factor=2)
        return torch.tanh(self.out(x))


class Discriminator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(
            conv(3, width, 2), conv(width, 2 * width, 2), conv(2 * width, 4 * width), nn.Conv2d(4 * width, 1, 3, 1, 1)
        )

    def forward(self, x):
        return self.net(x)


loader = DataLoader(Photos(), batch_size=12, shuffle=True)
generator = Generator().to(device)

# phase 1
optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
l1 = nn.L1Loss()
for epoch in range(2):
    for batch in loader:
        grey, colour = batch["L"].to(device), batch["ab"].to(device)
        loss = l1(generator(grey), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("pretraining", epoch, loss.item())

# phase 2
discriminator = Discriminator().to(device)
bce = nn.BCEWithLogitsLoss()
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for epoch in range(2):
    for batch in loader:
        grey, colour = batch["L"].to(device), batch["ab"].to(device)
        fake = generator(grey)
        real_score = discriminator(torch.cat([grey, colour], 1))
        fake_score = discriminator(torch.cat([grey, fake.detach()], 1))
        loss_d = bce(real_score, torch.ones_like(real_score)) + bce(fake_score, torch.zeros_like(fake_score))
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        score = discriminator(torch.cat([grey, fake], 1))
        loss_g = bce(score, torch.ones_like(score)) + 100 * l1(fake, colour)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
    print("adversarial", epoch, loss_d.item(), loss_g.item())
