"""Graph convolutions with a sparse matrix of neighbours, made by SciPy."""

import argparse
import math
import time

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parameter import Parameter

p = argparse.ArgumentParser()
p.add_argument("--no-cuda", action="store_true")
p.add_argument("--seed", type=int, default=42)
p.add_argument("--epochs", type=int, default=6)
p.add_argument("--hidden", type=int, default=64)
args = p.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()
np.random.seed(args.seed)
torch.manual_seed(args.seed)
torch.cuda.manual_seed(args.seed)


def normalize(mx):
    r = np.array(mx.sum(1)).flatten()
    inv = np.power(r, -1.0, where=r > 0)
    inv[np.isinf(inv)] = 0.0
    return sp.diags(inv).dot(mx)


def to_torch(m):
    m = m.tocoo().astype(np.float32)
    i = torch.from_numpy(np.vstack((m.row, m.col)).astype(np.int64))
    return torch.sparse.FloatTensor(i, torch.from_numpy(m.data), torch.Size(m.shape))


def load(n=19717, f=500, e=44338):
    a = sp.coo_matrix(
        (np.ones(e), (np.random.randint(0, n, e), np.random.randint(0, n, e))), shape=(n, n), dtype=np.float32
    )
    a = a + a.T.multiply(a.T > a) - a.multiply(a.T > a)
    a = normalize(a + sp.eye(n))
    x = sp.random(n, f, density=0.1, format="csr", dtype=np.float32)
    x = normalize(x)
    return (
        to_torch(a),
        torch.FloatTensor(np.array(x.todense())),
        torch.LongTensor(np.random.randint(0, 3, n)),
        torch.LongTensor(range(60)),
        torch.LongTensor(range(200, 500)),
        torch.LongTensor(range(500, 1500)),
    )


class GraphConvolution(nn.Module):
    def __init__(self, i, o, bias=True):
        super().__init__()
        self.weight = Parameter(torch.FloatTensor(i, o))
        self.bias = Parameter(torch.FloatTensor(o)) if bias else None
        s = 1.0 / math.sqrt(o)
        self.weight.data.uniform_(-s, s)
        if self.bias is not None:
            self.bias.data.uniform_(-s, s)

    def forward(self, x, adj):
        out = torch.spmm(adj, torch.mm(x, self.weight))
        return out + self.bias if self.bias is not None else out


class GCN(nn.Module):
    def __init__(self, f, h, c, d):
        super().__init__()
        self.a, self.b, self.d = GraphConvolution(f, h), GraphConvolution(h, c), d

    def forward(self, x, adj):
        x = F.relu(self.a(x, adj))
        x = F.dropout(x, self.d, training=self.training)
        return F.log_softmax(self.b(x, adj), dim=1)


adj, features, labels, tr, va, te = load()
model = GCN(features.shape[1], args.hidden, int(labels.max()) + 1, 0.5)
opt = optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
if args.cuda:
    model.cuda()
    features, adj, labels, tr, va, te = features.cuda(), adj.cuda(), labels.cuda(), tr.cuda(), va.cuda(), te.cuda()


def accuracy(o, l):
    return o.max(1)[1].type_as(l).eq(l).double().sum() / len(l)


for epoch in range(args.epochs):
    t = time.time()
    model.train()
    opt.zero_grad()
    out = model(features, adj)
    loss = F.nll_loss(out[tr], labels[tr])
    acc = accuracy(out[tr], labels[tr])
    loss.backward()
    opt.step()
    model.eval()
    out = model(features, adj)
    lv = F.nll_loss(out[va], labels[va])
    av = accuracy(out[va], labels[va])
    print(
        f"Epoch: {epoch + 1:04d} loss_train: {loss.item():.4f} acc_train: {acc.item():.4f} loss_val: {lv.item():.4f} acc_val: {av.item():.4f} time: {time.time() - t:.4f}s"
    )
model.eval()
out = model(features, adj)
print("Test set results:", F.nll_loss(out[te], labels[te]).item(), accuracy(out[te], labels[te]).item())
