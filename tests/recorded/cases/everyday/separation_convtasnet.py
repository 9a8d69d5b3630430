"""Two voices told apart: a small Conv-TasNet on filterbanks of asteroid, the best order of voices chosen by the loss."""

from itertools import permutations

import torch
from asteroid_filterbanks import make_enc_dec
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width, hidden, dilation):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(width, hidden, 1),
            nn.PReLU(),
            nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden),
            nn.PReLU(),
            nn.GroupNorm(1, hidden),
        )
        self.residual, self.skip = nn.Conv1d(hidden, width, 1), nn.Conv1d(hidden, width, 1)

    def forward(self, x):
        y = self.net(x)
        return x + self.residual(y), self.skip(y)


class TasNet(nn.Module):
    def __init__(self, filters=256, width=96, hidden=192, voices=2):
        super().__init__()
        self.encoder, self.decoder = make_enc_dec("free", n_filters=filters, kernel_size=16, stride=8)
        self.bottleneck = nn.Sequential(nn.GroupNorm(1, filters), nn.Conv1d(filters, width, 1))
        self.blocks = nn.ModuleList(Block(width, hidden, 2**i) for _ in range(2) for i in range(5))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(width, filters * voices, 1), nn.ReLU())
        self.voices = voices

    def forward(self, mixture):
        features = self.encoder(mixture.unsqueeze(1))
        x, skips = self.bottleneck(features), 0
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        masks = self.mask(skips).unflatten(1, (self.voices, -1))
        return self.decoder(features.unsqueeze(1) * masks)[..., : mixture.shape[-1]]


def si_sdr(estimate, target):
    estimate, target = estimate - estimate.mean(-1, keepdim=True), target - target.mean(-1, keepdim=True)
    projection = (estimate * target).sum(-1, keepdim=True) / (target.pow(2).sum(-1, keepdim=True) + 1e-8) * target
    return 10 * torch.log10(projection.pow(2).sum(-1) / ((estimate - projection).pow(2).sum(-1) + 1e-8) + 1e-8)


def pit_loss(estimates, sources):
    orders = [si_sdr(estimates[:, list(p)], sources).mean(1) for p in permutations(range(sources.shape[1]))]
    return -torch.stack(orders, 1).max(1).values.mean()


sources = torch.randn(40, 2, 8000)
train = DataLoader(TensorDataset(sources[:32]), batch_size=4, shuffle=True, drop_last=True)
valid = DataLoader(TensorDataset(sources[32:]), batch_size=4)
model = TasNet().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
for epoch in range(2):
    model.train()
    for (voices,) in train:
        voices = voices.cuda()
        loss = pit_loss(model(voices.sum(1)), voices)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        score = torch.stack([pit_loss(model(v.cuda().sum(1)), v.cuda()) for (v,) in valid]).mean().item()
    scheduler.step(score)
    print(f"epoch {epoch} train {loss.item():.2f} valid {score:.2f} rate {optimizer.param_groups[0]['lr']:.1e}")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "tasnet.pt")
