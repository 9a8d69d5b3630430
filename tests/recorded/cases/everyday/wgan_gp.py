"""WGAN with gradient penalty: critic steps, create_graph, fixed noise samples."""

import torch
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

manualSeed = 999
torch.manual_seed(manualSeed)
dev = "cuda" if torch.cuda.is_available() else "cpu"
nz, ngf, ndf, nc, LAMBDA, CRITIC = 100, 32, 32, 3, 10, 2


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


G = nn.Sequential(
    nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 4),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ngf * 2),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
    nn.BatchNorm2d(ngf),
    nn.ReLU(True),
    nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(dev)
D = nn.Sequential(
    nn.Conv2d(nc, ndf, 4, 2, 1),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(ndf, ndf * 2, 4, 2, 1),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1),
    nn.LeakyReLU(0.2, True),
    nn.Conv2d(ndf * 4, 1, 4, 1, 0),
).to(dev)
G.apply(weights_init), D.apply(weights_init)
fixed_noise = torch.randn(64, nz, 1, 1, device=dev)
optD = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.5, 0.9))
optG = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.5, 0.9))


def calc_gradient_penalty(netD, real, fake):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=dev).expand(real.size())
    inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = netD(inter)
    grads = autograd.grad(
        outputs=out,
        inputs=inter,
        grad_outputs=torch.ones_like(out),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


loader = DataLoader(TensorDataset(torch.rand(128, 3, 32, 32) * 2 - 1), batch_size=32, shuffle=True)
img_list, D_losses = [], []
for epoch in range(1):
    for i, (real,) in enumerate(loader):
        real = real.to(dev)
        D.zero_grad()
        fake = G(torch.randn(real.size(0), nz, 1, 1, device=dev)).detach()
        gp = calc_gradient_penalty(D, real.data, fake.data)
        loss_D = D(fake).mean() - D(real).mean() + gp
        loss_D.backward()
        optD.step()
        D_losses.append(loss_D.item())
        if (i + 1) % CRITIC == 0:
            for p in D.parameters():
                p.requires_grad_(False)
            G.zero_grad()
            loss_G = -D(G(torch.randn(real.size(0), nz, 1, 1, device=dev))).mean()
            loss_G.backward()
            optG.step()
            for p in D.parameters():
                p.requires_grad_(True)
    with torch.no_grad():
        img_list.append(G(fixed_noise).detach().cpu())
print(len(img_list), D_losses[-1])
