"""A transformer for tables: numerical and categorical tokens, warm restarts, averaged weights, early stopping with the best state."""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset, random_split


@dataclass
class Config:
    d: int = 192
    heads: int = 8
    blocks: int = 3
    batch: int = 256
    epochs: int = 3
    patience: int = 2
    lr: float = 1e-4
    seed: int = 0


class Tokenizer(nn.Module):
    def __init__(self, n_num, cats, d):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(n_num + 1, d)),
            nn.Parameter(torch.empty(n_num + len(cats), d)),
        )
        self.register_buffer("offsets", torch.tensor([0] + cats[:-1]).cumsum(0))
        self.cat = nn.Embedding(sum(cats), d)
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5)), nn.init.kaiming_uniform_(self.bias, a=math.sqrt(5))

    def forward(self, num, cat):
        x = torch.cat([torch.ones(len(num), 1, device=num.device), num], 1)
        x = self.weight[None] * x[:, :, None]
        x = torch.cat([x, self.cat(cat + self.offsets[None])], 1)
        return x + torch.cat([torch.zeros(1, x.shape[-1], device=x.device), self.bias])[None]


class ReGLUBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o, self.heads = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d), heads
        self.l0, self.l1, self.drop = nn.Linear(d, d * 8 // 3), nn.Linear(d * 4 // 3, d), nn.Dropout(0.1)

    def forward(self, x):
        y = self.n1(x)
        q = self.q(y)
        k, v = self.kv(y).chunk(2, -1)
        b, t, d = x.shape
        q, k, v = (z.reshape(b, t, self.heads, d // self.heads).transpose(1, 2) for z in (q, k, v))
        a = self.drop(F.softmax(q @ k.transpose(-1, -2) / math.sqrt(d // self.heads), dim=-1))
        x = x + self.o((a @ v).transpose(1, 2).reshape(b, t, d))
        a, g = self.l0(self.n2(x)).chunk(2, -1)
        return x + self.drop(self.l1(a * F.relu(g)))


class FTTransformer(nn.Module):
    def __init__(self, n_num, cats, classes, cfg):
        super().__init__()
        self.tok = Tokenizer(n_num, cats, cfg.d)
        self.bn = nn.BatchNorm1d(n_num)
        self.blocks = nn.ModuleList(ReGLUBlock(cfg.d, cfg.heads) for _ in range(cfg.blocks))
        self.head = nn.Sequential(nn.LayerNorm(cfg.d), nn.ReLU(), nn.Linear(cfg.d, classes))

    def forward(self, batch):
        num, cat = batch
        x = self.tok(self.bn(num), cat)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def main(cfg=Config()):
    torch.manual_seed(cfg.seed), np.random.seed(cfg.seed)
    device = torch.device("cuda:0")
    n, cats = 3000, [12, 7, 101, 3]
    num = np.random.randn(n, 16).astype("float32")
    num = (num - num.mean(0)) / num.std(0)
    cat = np.stack([np.random.randint(0, c, n) for c in cats], 1)
    y = np.random.randint(0, 4, n)
    data = TensorDataset(torch.from_numpy(num), torch.from_numpy(cat), torch.from_numpy(y))
    train, val, test = random_split(data, [2000, 500, 500], generator=torch.Generator().manual_seed(1))
    loaders = {
        k: DataLoader(d, cfg.batch if k == "train" else 512, shuffle=k == "train")
        for k, d in dict(train=train, val=val, test=test).items()
    }
    counts = torch.bincount(torch.tensor([data[i][2] for i in train.indices]), minlength=4).float()
    criterion = nn.CrossEntropyLoss(weight=(counts.sum() / counts).to(device), label_smoothing=0.1)
    model = FTTransformer(16, cats, 4, cfg).to(device)
    swa = AveragedModel(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=1e-5, amsgrad=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=8)
    swa_sched = SWALR(opt, swa_lr=5e-5)

    @torch.no_grad()
    def evaluate(m, loader):
        m.eval()
        out = [(m((a.to(device), b.to(device))).softmax(1).cpu(), c) for a, b, c in loader]
        probs, target = torch.cat([o[0] for o in out]).numpy(), torch.cat([o[1] for o in out]).numpy()
        m.train()
        return -np.log(np.clip(probs[np.arange(len(target)), target], 1e-9, 1)).mean(), (
            probs.argmax(1) == target
        ).mean()

    best, best_state, wait = np.inf, None, 0
    for epoch in range(cfg.epochs):
        for it, (a, b, c) in enumerate(loaders["train"]):
            a, b, c = a.to(device), b.to(device), c.to(device)
            opt.zero_grad(set_to_none=True)
            loss = criterion(model((a, b)), c)
            loss.backward()
            opt.step()
            sched.step(epoch + it / len(loaders["train"]))
        if epoch >= 1:
            swa.update_parameters(model)
            swa_sched.step()
        val_loss, val_acc = evaluate(model, loaders["val"])
        print(f"{epoch} {loss.item():.3f} {val_loss:.3f} {val_acc:.3f}")
        if val_loss < best:
            best, best_state, wait = val_loss, copy.deepcopy(model.state_dict()), 0
        else:
            wait += 1
            if wait > cfg.patience:
                break
    model.load_state_dict(best_state)
    print(evaluate(model, loaders["test"]), evaluate(swa.module, loaders["test"]))


main()
