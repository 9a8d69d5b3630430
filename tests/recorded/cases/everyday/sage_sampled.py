"""GraphSAGE on sampled neighbourhoods: every batch has another number of nodes; early stopping, best checkpoint."""

import argparse
import logging
import os
import random
import tempfile
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

log = logging.getLogger("sage")


class Graph:
    """A random graph in compressed rows, as loaders keep it: on the host."""

    def __init__(self, nodes, degree, features, classes, seed):
        rng = np.random.default_rng(seed)
        degrees = rng.poisson(degree, nodes) + 1
        self.indptr = np.concatenate([[0], np.cumsum(degrees)])
        self.indices = rng.integers(0, nodes, int(self.indptr[-1]))
        self.x = torch.from_numpy(rng.normal(size=(nodes, features)).astype(np.float32))
        self.y = torch.from_numpy(rng.integers(0, classes, nodes))
        order = rng.permutation(nodes)
        self.train, self.valid = order[: nodes // 2], order[nodes // 2 : nodes // 2 + 1024]


class Sampler:
    def __init__(self, graph, fanouts, seed):
        self.graph, self.fanouts, self.rng = graph, fanouts, np.random.default_rng(seed)

    def __call__(self, seeds):
        frontier, blocks = np.asarray(seeds), []
        for fanout in self.fanouts:
            src, dst = [], []
            for position, node in enumerate(frontier):
                row = self.graph.indices[self.graph.indptr[node] : self.graph.indptr[node + 1]]
                chosen = row if len(row) <= fanout else self.rng.choice(row, fanout, replace=False)
                src.append(chosen)
                dst.append(np.full(len(chosen), position))
            src, dst = np.concatenate(src), np.concatenate(dst)
            new = np.unique(src[~np.isin(src, frontier)])
            nodes = np.concatenate([frontier, new])
            where = {int(n): i for i, n in enumerate(nodes)}
            local = np.array([where[int(n)] for n in src])
            blocks.insert(0, (torch.from_numpy(local), torch.from_numpy(dst), len(frontier)))
            frontier = nodes
        return torch.from_numpy(frontier), blocks, torch.from_numpy(np.asarray(seeds))


class SAGEConv(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.own, self.neighbours = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x, block):
        src, dst, targets = block
        total = x.new_zeros(targets, x.shape[1]).index_add_(0, dst, x[src])
        count = torch.bincount(dst, minlength=targets).clamp(min=1).unsqueeze(1)
        return self.own(x[:targets]) + self.neighbours(total / count)


class SAGE(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(features, hidden), SAGEConv(hidden, classes)])
        self.norm = nn.BatchNorm1d(hidden)

    def forward(self, x, blocks):
        x = self.convs[0](x, blocks[0])
        x = F.dropout(F.relu(self.norm(x)), 0.5, self.training)
        return self.convs[1](x, blocks[1])


@torch.no_grad()
def evaluate(model, graph, loader, device):
    model.eval()
    right = total = 0
    for nodes, blocks, seeds in loader:
        blocks = [(s.to(device), d.to(device), n) for s, d, n in blocks]
        logits = model(graph.x[nodes].to(device), blocks)
        right += (logits.argmax(1).cpu() == graph.y[seeds]).sum().item()
        total += len(seeds)
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    random.seed(args.seed), np.random.seed(args.seed), torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    graph = Graph(20_000, 12, 128, 40, args.seed)
    train = DataLoader(graph.train.tolist(), args.batch_size, shuffle=True, collate_fn=Sampler(graph, (10, 10), 1))
    valid = DataLoader(graph.valid.tolist(), args.batch_size, collate_fn=Sampler(graph, (10, 10), 2))
    model = SAGE(128, args.hidden, 40).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=5e-4)
    best, waited = 0.0, 0
    folder = tempfile.mkdtemp()
    for epoch in range(args.epochs):
        model.train()
        begun, running = time.time(), 0.0
        for nodes, blocks, seeds in train:
            x = graph.x[nodes].to(device, non_blocking=True)
            blocks = [(s.to(device), d.to(device), n) for s, d, n in blocks]
            y = graph.y[seeds].to(device)
            loss = F.cross_entropy(model(x, blocks), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        accuracy = evaluate(model, graph, valid, device)
        log.info("epoch %d loss %.3f valid %.3f (%.1f s)", epoch, running, accuracy, time.time() - begun)
        if accuracy > best:
            best, waited = accuracy, 0
            torch.save({"model": model.state_dict(), "epoch": epoch}, os.path.join(folder, "best.pt"))
        else:
            waited += 1
            if waited >= args.patience:
                break


if __name__ == "__main__":
    main()
