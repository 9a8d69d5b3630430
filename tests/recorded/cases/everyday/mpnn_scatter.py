"""Message passing by hand: molecules of many sizes joined by the collate function, scatter softmax, a GRU cell, MAE."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Molecules(Dataset):
    def __init__(self, n, seed):
        r = np.random.default_rng(seed)
        self.data = []
        for _ in range(n):
            atoms = int(r.integers(6, 30))
            bonds = [(i, int(r.integers(0, i))) for i in range(1, atoms)] + [
                tuple(r.integers(0, atoms, 2)) for _ in range(atoms // 5)
            ]
            src, dst = np.array(bonds).T
            self.data.append(
                (
                    r.integers(0, 20, atoms),
                    np.stack([np.r_[src, dst], np.r_[dst, src]]),
                    r.normal(size=(2 * len(bonds), 8)).astype("f"),
                    r.normal(),
                )
            )

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


def collate(items):
    atoms, edges, feats, ys, owner, shift = [], [], [], [], [], 0
    for g, (a, e, f, y) in enumerate(items):
        (
            atoms.append(torch.as_tensor(a)),
            edges.append(torch.as_tensor(e) + shift),
            feats.append(torch.as_tensor(f)),
            ys.append(y),
        )
        owner.append(torch.full((len(a),), g, dtype=torch.long))
        shift += len(a)
    return (
        torch.cat(atoms),
        torch.cat(edges, 1),
        torch.cat(feats),
        torch.cat(owner),
        torch.tensor(ys, dtype=torch.float32),
    )


def scatter_softmax(x, index, n):
    top = torch.full((n, x.shape[1]), -torch.inf, device=x.device).scatter_reduce_(
        0, index[:, None].expand_as(x), x, "amax"
    )
    e = (x - top[index]).exp()
    return e / torch.zeros(n, x.shape[1], device=x.device).index_add_(0, index, e)[index].clamp_min(1e-12)


class MPNN(nn.Module):
    def __init__(self, h=128, heads=4, steps=3):
        super().__init__()
        self.embed, self.edge = nn.Embedding(20, h), nn.Linear(8, h)
        self.msg, self.att, self.cell = (
            nn.Sequential(nn.Linear(3 * h, h), nn.SiLU(), nn.Linear(h, h)),
            nn.Linear(3 * h, heads),
            nn.GRUCell(h, h),
        )
        self.out, self.steps, self.heads = nn.Sequential(nn.Linear(2 * h, h), nn.SiLU(), nn.Linear(h, 1)), steps, heads

    def forward(self, atoms, edges, feats, owner):
        x, e = self.embed(atoms), self.edge(feats)
        src, dst = edges
        n = x.size(0)
        for _ in range(self.steps):
            z = torch.cat([x[src], x[dst], e], -1)
            w = scatter_softmax(self.att(z), dst, n)
            m = (self.msg(z).view(len(z), self.heads, -1) * w[..., None]).flatten(1)
            x = self.cell(torch.zeros_like(x).index_add(0, dst, m), x)
        graphs = int(owner.max()) + 1
        total = torch.zeros(graphs, x.size(1), device=x.device).index_add_(0, owner, x)
        mean = total / torch.bincount(owner, minlength=graphs).unsqueeze(1)
        return self.out(torch.cat([total, mean], 1)).squeeze(-1)


def run(loader, model, optimizer=None):
    model.train(optimizer is not None)
    err, count = 0.0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for batch in loader:
            *inputs, y = [t.cuda(non_blocking=True) for t in batch]
            pred = model(*inputs)
            loss = nn.functional.smooth_l1_loss(pred, y)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
            err += (pred - y).abs().sum().item()
            count += len(y)
    return err / count


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    train, valid = (
        DataLoader(Molecules(700, 0), 128, shuffle=True, collate_fn=collate, pin_memory=True),
        DataLoader(Molecules(100, 1), 64, collate_fn=collate),
    )
    model = MPNN().cuda()
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for epoch in range(2):
        a, b = run(train, model, optimizer), run(valid, model)
        scheduler.step(b)
        print(f"epoch {epoch} train {a:.3f} valid {b:.3f} lr {optimizer.param_groups[0]['lr']}")
