"""CycleGAN: two generators, two discriminators, a pool of old pictures, linear decay."""

import itertools
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

random.seed(1)
torch.manual_seed(1)
device = torch.device("cuda:0")


class Pairs(Dataset):
    def __init__(self, n):
        self.a, self.b = torch.rand(n, 3, 64, 64), torch.rand(n, 3, 64, 64)

    def __len__(self):
        return len(self.a)

    def __getitem__(self, i):
        return {"A": self.a[i] * 2 - 1, "B": self.b[random.randint(0, len(self.b) - 1)] * 2 - 1}


class ResBlk(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.body = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(c, c, 3),
            nn.InstanceNorm2d(c),
            nn.ReLU(True),
            nn.ReflectionPad2d(1),
            nn.Conv2d(c, c, 3),
            nn.InstanceNorm2d(c),
        )

    def forward(self, x):
        return x + self.body(x)


def generator(f=32, n=3):
    m = [nn.ReflectionPad2d(3), nn.Conv2d(3, f, 7), nn.InstanceNorm2d(f), nn.ReLU(True)]
    for i in range(2):
        m += [nn.Conv2d(f * 2**i, f * 2 ** (i + 1), 3, 2, 1), nn.InstanceNorm2d(f * 2 ** (i + 1)), nn.ReLU(True)]
    m += [ResBlk(f * 4) for _ in range(n)]
    for i in (2, 1):
        m += [
            nn.ConvTranspose2d(f * 2**i, f * 2 ** (i - 1), 3, 2, 1, 1),
            nn.InstanceNorm2d(f * 2 ** (i - 1)),
            nn.ReLU(True),
        ]
    return nn.Sequential(*m, nn.ReflectionPad2d(3), nn.Conv2d(f, 3, 7), nn.Tanh())


def discriminator(f=32):
    return nn.Sequential(
        nn.Conv2d(3, f, 4, 2, 1),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(f, 2 * f, 4, 2, 1),
        nn.InstanceNorm2d(2 * f),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(2 * f, 1, 4, 1, 1),
    )


class ImagePool:
    def __init__(self, size):
        self.size, self.images = size, []

    def query(self, images):
        out = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if len(self.images) < self.size:
                self.images.append(image)
                out.append(image)
            elif random.uniform(0, 1) > 0.5:
                k = random.randint(0, self.size - 1)
                out.append(self.images[k].clone())
                self.images[k] = image
            else:
                out.append(image)
        return torch.cat(out, 0)


def init_weights(net):
    def f(m):
        if hasattr(m, "weight") and "Conv" in m.__class__.__name__:
            nn.init.normal_(m.weight.data, 0.0, 0.02)
            if m.bias is not None:
                nn.init.constant_(m.bias.data, 0.0)

    net.apply(f)
    return net.to(device)


def set_requires_grad(nets, flag):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag


G_A, G_B, D_A, D_B = (init_weights(n) for n in (generator(), generator(), discriminator(), discriminator()))
pool_a, pool_b = ImagePool(6), ImagePool(6)
mse, l1 = nn.MSELoss(), nn.L1Loss()
opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-4, betas=(0.5, 0.999))
scheds = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e - 1) / 2) for o in (opt_G, opt_D)]


def gan_loss(pred, real):
    return mse(pred, torch.tensor(1.0 if real else 0.0, device=pred.device).expand_as(pred))


def backward_D(net, real, fake):
    loss = (gan_loss(net(real), True) + gan_loss(net(fake.detach()), False)) * 0.5
    loss.backward()
    return loss


for epoch in range(2):
    for data in DataLoader(Pairs(8), batch_size=4, shuffle=True):
        real_A, real_B = data["A"].to(device), data["B"].to(device)
        fake_B = G_A(real_A)
        rec_A = G_B(fake_B)
        fake_A = G_B(real_B)
        rec_B = G_A(fake_A)
        set_requires_grad([D_A, D_B], False)
        opt_G.zero_grad()
        idt = l1(G_A(real_B), real_B) * 5 + l1(G_B(real_A), real_A) * 5
        loss_G = (
            gan_loss(D_A(fake_B), True)
            + gan_loss(D_B(fake_A), True)
            + l1(rec_A, real_A) * 10
            + l1(rec_B, real_B) * 10
            + idt
        )
        loss_G.backward()
        opt_G.step()
        set_requires_grad([D_A, D_B], True)
        opt_D.zero_grad()
        loss_DA = backward_D(D_A, real_B, pool_b.query(fake_B))
        loss_DB = backward_D(D_B, real_A, pool_a.query(fake_A))
        opt_D.step()
        print("G %.3f D %.3f" % (loss_G.item(), (loss_DA + loss_DB).item()))
    for s in scheds:
        s.step()
