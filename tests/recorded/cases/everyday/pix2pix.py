"""pix2pix as its repository has it: U-Net with skips and in-place activations, multi-scale PatchGAN, feature matching, image pool."""

import functools
import os
import random
import tempfile

import torch
import torch.nn as nn
from torch.nn import init
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset


class Aligned(Dataset):
    def __init__(self, n, load=143, crop=128):
        self.n, self.load, self.crop = n, load, crop

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        ab = torch.rand(3, self.load, 2 * self.load) * 2 - 1
        a, b = ab.chunk(2, 2)
        y, x = random.randint(0, self.load - self.crop), random.randint(0, self.load - self.crop)
        a, b = (t[:, y : y + self.crop, x : x + self.crop] for t in (a, b))
        if random.random() > 0.5:
            a, b = a.flip(-1), b.flip(-1)
        return {"A": a.contiguous(), "B": b.contiguous(), "A_paths": f"{i}.png"}


def get_norm(kind):
    if kind == "instance":
        return functools.partial(nn.InstanceNorm2d, affine=False, track_running_stats=False)
    return functools.partial(nn.BatchNorm2d, affine=True, track_running_stats=True)


def init_weights(net, gain=0.02):
    def f(m):
        name = m.__class__.__name__
        if hasattr(m, "weight") and (name.find("Conv") != -1 or name.find("Linear") != -1):
            init.normal_(m.weight.data, 0.0, gain)
            if m.bias is not None:
                init.constant_(m.bias.data, 0.0)
        elif name.find("BatchNorm2d") != -1:
            init.normal_(m.weight.data, 1.0, gain)
            init.constant_(m.bias.data, 0.0)

    net.apply(f)
    return net


class SkipBlock(nn.Module):
    def __init__(
        self, outer, inner, input_nc=None, submodule=None, outermost=False, innermost=False, norm=None, dropout=False
    ):
        super().__init__()
        self.outermost = outermost
        bias = norm.func == nn.InstanceNorm2d
        input_nc = input_nc or outer
        down = nn.Conv2d(input_nc, inner, 4, 2, 1, bias=bias)
        lrelu, relu = nn.LeakyReLU(0.2, True), nn.ReLU(True)
        if outermost:
            model = [down, submodule, relu, nn.ConvTranspose2d(inner * 2, outer, 4, 2, 1), nn.Tanh()]
        elif innermost:
            model = [lrelu, down, relu, nn.ConvTranspose2d(inner, outer, 4, 2, 1, bias=bias), norm(outer)]
        else:
            model = [
                lrelu,
                down,
                norm(inner),
                submodule,
                relu,
                nn.ConvTranspose2d(inner * 2, outer, 4, 2, 1, bias=bias),
                norm(outer),
            ]
            if dropout:
                model.append(nn.Dropout(0.5))
        self.model = nn.Sequential(*model)

    def forward(self, x):
        return self.model(x) if self.outermost else torch.cat([x, self.model(x)], 1)


def unet(ngf, norm):
    block = SkipBlock(ngf * 8, ngf * 8, innermost=True, norm=norm)
    for _ in range(2):
        block = SkipBlock(ngf * 8, ngf * 8, submodule=block, norm=norm, dropout=True)
    for k in (4, 2, 1):
        block = SkipBlock(ngf * k, ngf * k * 2, submodule=block, norm=norm)
    return SkipBlock(3, ngf, input_nc=3, submodule=block, outermost=True, norm=norm)


class Patch(nn.Module):
    def __init__(self, nc, ndf, norm, layers=3):
        super().__init__()
        seq, n = [[nn.Conv2d(nc, ndf, 4, 2, 2), nn.LeakyReLU(0.2, True)]], ndf
        for k in range(1, layers + 1):
            p, n = n, min(n * 2, 512)
            seq.append([nn.Conv2d(p, n, 4, 2 if k < layers else 1, 2), norm(n), nn.LeakyReLU(0.2, True)])
        seq.append([nn.Conv2d(n, 1, 4, 1, 2)])
        self.n = len(seq)
        for k, s in enumerate(seq):
            setattr(self, f"model{k}", nn.Sequential(*s))

    def forward(self, x):
        res = [x]
        for k in range(self.n):
            res.append(getattr(self, f"model{k}")(res[-1]))
        return res[1:]


class Multi(nn.Module):
    def __init__(self, nc, ndf, norm, num=2):
        super().__init__()
        self.nets = nn.ModuleList(Patch(nc, ndf, norm) for _ in range(num))
        self.down = nn.AvgPool2d(3, stride=2, padding=[1, 1], count_include_pad=False)

    def forward(self, x):
        out = []
        for i, net in enumerate(self.nets):
            out.append(net(x))
            if i != len(self.nets) - 1:
                x = self.down(x)
        return out


class GANLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("real", torch.tensor(1.0))
        self.register_buffer("fake", torch.tensor(0.0))
        self.loss = nn.MSELoss()

    def __call__(self, preds, real):
        total = 0
        for p in preds:
            target = (self.real if real else self.fake).expand_as(p[-1])
            total = total + self.loss(p[-1], target)
        return total


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
                i = random.randint(0, self.size - 1)
                tmp = self.images[i].clone()
                self.images[i] = image
                out.append(tmp)
            else:
                out.append(image)
        return torch.cat(out, 0)


class Pix2Pix:
    def __init__(self, device, kind):
        norm = get_norm(kind)
        self.device = device
        self.netG = init_weights(unet(48, norm)).to(device)
        self.netD = init_weights(Multi(6, 48, norm)).to(device)
        self.gan, self.l1 = GANLoss().to(device), nn.L1Loss()
        self.optG = torch.optim.Adam(self.netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.optD = torch.optim.Adam(self.netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
        rule = lambda epoch: 1.0 - max(0, epoch - 1) / 3.0
        self.schedulers = [lr_scheduler.LambdaLR(o, lr_lambda=rule) for o in (self.optG, self.optD)]
        self.pool = ImagePool(6)

    def set_input(self, data):
        self.real_A, self.real_B = data["A"].to(self.device), data["B"].to(self.device)

    def set_requires_grad(self, flag):
        for p in self.netD.parameters():
            p.requires_grad = flag

    def optimize(self):
        self.fake_B = self.netG(self.real_A)
        self.set_requires_grad(True)
        self.optD.zero_grad()
        fake_AB = self.pool.query(torch.cat((self.real_A, self.fake_B), 1))
        self.loss_D_fake = self.gan(self.netD(fake_AB.detach()), False)
        self.loss_D_real = self.gan(self.netD(torch.cat((self.real_A, self.real_B), 1)), True)
        ((self.loss_D_fake + self.loss_D_real) * 0.5).backward()
        self.optD.step()
        self.set_requires_grad(False)
        self.optG.zero_grad()
        pred = self.netD(torch.cat((self.real_A, self.fake_B), 1))
        with torch.no_grad():
            real = self.netD(torch.cat((self.real_A, self.real_B), 1))
        feat = 0
        for pf, pr in zip(pred, real):
            for a, b in zip(pf[:-1], pr[:-1]):
                feat += self.l1(a, b.detach()) * (4.0 / 4) * 0.5 * 10
        self.loss_G = self.gan(pred, True) + feat + self.l1(self.fake_B, self.real_B) * 100.0
        self.loss_G.backward()
        self.optG.step()

    def losses(self):
        return {k: float(getattr(self, k)) for k in ("loss_D_fake", "loss_D_real", "loss_G")}

    def save(self, folder, epoch):
        for name in ("G", "D"):
            net = getattr(self, "net" + name)
            torch.save(net.cpu().state_dict(), os.path.join(folder, f"{epoch}_net_{name}.pth"))
            net.to(self.device)


def tensor2im(t):
    a = t.data[0].cpu().float().numpy()
    return ((a.transpose(1, 2, 0) + 1) / 2.0 * 255.0).clip(0, 255).astype("uint8")


def main():
    random.seed(1)
    torch.manual_seed(1)
    device = torch.device("cuda:0")
    for kind in ("instance", "batch"):
        model = Pix2Pix(device, kind)
        loader = DataLoader(Aligned(14), batch_size=4, shuffle=True, num_workers=0)
        with tempfile.TemporaryDirectory() as folder:
            for epoch in range(2):
                for i, data in enumerate(loader):
                    model.set_input(data)
                    model.optimize()
                    if i % 2 == 0:
                        print(epoch, i, {k: round(v, 3) for k, v in model.losses().items()})
                for s in model.schedulers:
                    s.step()
                model.save(folder, epoch)
            model.netG.load_state_dict(torch.load(os.path.join(folder, "1_net_G.pth"), map_location=str(device)))
        model.netG.eval()
        for data in DataLoader(Aligned(3), batch_size=1):
            with torch.no_grad():
                model.set_input(data)
                model.fake_B = model.netG(model.real_A)
            print(tensor2im(model.fake_B).shape)


if __name__ == "__main__":
    main()
