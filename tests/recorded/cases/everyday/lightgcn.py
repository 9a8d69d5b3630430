"""LightGCN: recommendations from a sparse matrix of users and items."""

import os
import random
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 2020
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)
torch.cuda.manual_seed_all(SEED)
N_USERS, N_ITEMS, INTER, DIM, LAYERS, BATCH = 30000, 41000, 1_000_000, 64, 3, 2048
rng = np.random.default_rng(SEED)
users = rng.integers(0, N_USERS, INTER)
items = rng.integers(0, N_ITEMS, INTER)


def graph():
    i = np.stack([np.concatenate([users, items + N_USERS]), np.concatenate([items + N_USERS, users])])
    deg = np.bincount(i[0], minlength=N_USERS + N_ITEMS).astype(np.float32)
    d = np.where(deg > 0, deg**-0.5, 0)
    vals = d[i[0]] * d[i[1]]
    return torch.sparse_coo_tensor(torch.from_numpy(i), torch.from_numpy(vals), (N_USERS + N_ITEMS,) * 2)


class LightGCN(nn.Module):
    def __init__(self, g):
        super().__init__()
        self.user = nn.Embedding(N_USERS, DIM)
        self.item = nn.Embedding(N_ITEMS, DIM)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        self.graph = g

    def propagate(self):
        e = torch.cat([self.user.weight, self.item.weight])
        out = [e]
        for _ in range(LAYERS):
            e = torch.sparse.mm(self.graph, e)
            out.append(e)
        return torch.split(torch.stack(out, 1).mean(1), [N_USERS, N_ITEMS])

    def bpr(self, u, p, n):
        au, ai = self.propagate()
        ue, pe, ne = au[u], ai[p], ai[n]
        reg = 0.5 * (self.user(u).norm(2).pow(2) + self.item(p).norm(2).pow(2) + self.item(n).norm(2).pow(2)) / len(u)
        return F.softplus((ue * ne).sum(1) - (ue * pe).sum(1)).mean(), reg


device = torch.device("cuda")
model = LightGCN(graph().coalesce().to(device)).to(device)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    model.train()
    perm = rng.permutation(INTER)[: BATCH * 8]
    u = torch.from_numpy(users[perm]).long().to(device)
    p = torch.from_numpy(items[perm]).long().to(device)
    n = torch.from_numpy(rng.integers(0, N_ITEMS, len(perm))).long().to(device)
    total = 0.0
    t = time.time()
    for s in range(0, len(perm), BATCH):
        loss, reg = model.bpr(u[s : s + BATCH], p[s : s + BATCH], n[s : s + BATCH])
        loss = loss + 1e-4 * reg
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.cpu().item()
    print(f"EPOCH[{epoch + 1}/2] loss{total / 8:.3f} {time.time() - t:.1f}s")
    model.eval()
    with torch.no_grad():
        au, ai = model.propagate()
        hits = []
        for s in range(0, 1000, 100):
            rating = torch.sigmoid(au[s : s + 100] @ ai.t())
            seen = rng.integers(0, N_ITEMS, (100, 20))
            rating[np.repeat(np.arange(100), 20), seen.reshape(-1)] = -(1 << 10)
            _, top = torch.topk(rating, k=20)
            hits.append(top.cpu().numpy())
        print("recall", np.mean([np.isin(h, items[:100]).mean() for h in hits]))
torch.save(model.state_dict(), os.path.join(tempfile.gettempdir(), "lightgcn.pt"))
