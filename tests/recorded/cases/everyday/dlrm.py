"""A recommender in DLRM's manner: EmbeddingBags with offsets, dot interactions, AUC on the host, early stopping."""

import argparse
import copy
import itertools
import os
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="DLRM")
parser.add_argument("--embedding-sizes", default="40000-8000-30000-120-2500")
parser.add_argument("--m-spa", type=int, default=64)
parser.add_argument("--mini-batch-size", type=int, default=2048)
parser.add_argument("--patience", type=int, default=2)
args = parser.parse_args()
np.random.seed(123)
torch.manual_seed(123)
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
sizes = [int(x) for x in args.embedding_sizes.split("-")]


def make_batch(b):
    dense = torch.from_numpy(np.random.rand(b, 13).astype(np.float32))
    indices, offsets = [], []
    for n in sizes:
        per = np.random.randint(1, 6, b)
        offsets.append(torch.tensor(np.concatenate([[0], np.cumsum(per)[:-1]])))
        indices.append(torch.from_numpy(np.random.randint(0, n, per.sum())))
    return dense, offsets, indices, torch.from_numpy((np.random.rand(b, 1) < 0.3).astype(np.float32))


class DLRM(nn.Module):
    def __init__(self, m, sizes):
        super().__init__()
        self.emb_l = nn.ModuleList()
        for n in sizes:
            bag = nn.EmbeddingBag(n, m, mode="sum", sparse=True)
            bag.weight.data = torch.tensor(
                np.random.uniform(-np.sqrt(1 / n), np.sqrt(1 / n), (n, m)).astype(np.float32), requires_grad=True
            )
            self.emb_l.append(bag)
        f = len(sizes) + 1
        self.bot = self.mlp([13, 512, 256, m], -1)
        self.top = self.mlp([m + f * (f - 1) // 2, 512, 256, 1], 2)

    def mlp(self, ln, sigmoid):
        layers = []
        for i, (a, b) in enumerate(zip(ln, ln[1:])):
            layers += [nn.Linear(a, b), nn.Sigmoid() if i == sigmoid else nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, dense, offsets, indices):
        x = self.bot(dense)
        ly = [bag(i, o) for bag, i, o in zip(self.emb_l, indices, offsets)]
        b, d = x.shape
        t = torch.cat([x] + ly, dim=1).view((b, -1, d))
        z = torch.bmm(t, torch.transpose(t, 1, 2))
        n = z.shape[1]
        li = torch.tensor([i for i in range(n) for j in range(i)])
        lj = torch.tensor([j for i in range(n) for j in range(i)])
        return self.top(torch.cat([x, z[:, li, lj]], dim=1))


def wrap(dense, offsets, indices):
    return dense.to(device), [o.to(device) for o in offsets], [i.to(device) for i in indices]


def auc(scores, targets):
    order = scores.argsort()
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    pos = targets > 0.5
    return (ranks[pos].sum() - pos.sum() * (pos.sum() + 1) / 2) / (pos.sum() * (~pos).sum())


train, test = [make_batch(args.mini_batch_size) for _ in range(8)], [make_batch(4096) for _ in range(2)]
dlrm = DLRM(args.m_spa, sizes).to(device)
loss_fn = nn.BCELoss(reduction="mean").to(device)
dense_opt = torch.optim.Adagrad(itertools.chain(dlrm.bot.parameters(), dlrm.top.parameters()), lr=0.01)
sparse_opt = torch.optim.Adagrad(dlrm.emb_l.parameters(), lr=0.01)
best, best_state, bad = 0.0, None, 0
for epoch in range(3):
    start, total = time.time(), 0.0
    for j, (x, o, i, t) in enumerate(train):
        z = dlrm(*wrap(x, o, i))
        loss = loss_fn(z, t.to(device))
        acc = np.sum((np.round(z.detach().cpu().numpy(), 0) == t.numpy()).astype(np.uint8)) / len(t)
        dense_opt.zero_grad(), sparse_opt.zero_grad()
        loss.backward()
        dense_opt.step(), sparse_opt.step()
        total += loss.detach().cpu().numpy().item() * len(t)
    dlrm.eval()
    scores, targets = [], []
    with torch.no_grad():
        for x, o, i, t in test:
            scores.append(dlrm(*wrap(x, o, i)).cpu().numpy()), targets.append(t.numpy())
    dlrm.train()
    a = auc(np.concatenate(scores).ravel(), np.concatenate(targets).ravel())
    print(f"epoch {epoch} loss {total:.2f} acc {acc:.3f} auc {a:.4f} {time.time() - start:.1f}s")
    if a > best:
        best, best_state, bad = a, copy.deepcopy(dlrm.state_dict()), 0
    else:
        bad += 1
        if bad >= args.patience:
            break
if best_state is not None:
    dlrm.load_state_dict(best_state)
torch.save(
    {"epoch": epoch, "state_dict": dlrm.state_dict(), "opt": dense_opt.state_dict()},
    os.path.join(tempfile.mkdtemp(), "dlrm.pt"),
)
