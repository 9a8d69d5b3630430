"""Skip-gram with negative sampling: subsampling and a unigram table in numpy, sparse embeddings, SparseAdam, nearest words."""

import os
import tempfile
from collections import Counter

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

np.random.seed(0)
torch.manual_seed(0)


class Corpus:
    def __init__(self, tokens=30000, vocab=20000):
        text = np.random.zipf(1.3, tokens) % vocab
        counts = Counter(text.tolist())
        self.words = [w for w, c in counts.most_common() if c >= 2]
        index = {w: i for i, w in enumerate(self.words)}
        freq = np.array([counts[w] for w in self.words], dtype=np.float64)
        keep = np.minimum(1.0, np.sqrt(1e-3 / (freq / freq.sum())))
        ids = [index[w] for w in text.tolist() if w in index]
        self.ids = [i for i in ids if np.random.rand() < keep[i]]
        p = freq**0.75
        self.table = np.random.choice(len(self.words), size=100000, p=p / p.sum())
        self.at = 0

    def negatives(self, size):
        out = np.take(self.table, range(self.at, self.at + size), mode="wrap")
        self.at = (self.at + size) % len(self.table)
        return out

    def batches(self, batch, window=5, k=5):
        centers, contexts = [], []
        for i, c in enumerate(self.ids):
            w = np.random.randint(1, window + 1)
            for j in range(max(0, i - w), min(len(self.ids), i + w + 1)):
                if j != i:
                    centers.append(c), contexts.append(self.ids[j])
                    if len(centers) == batch:
                        yield (
                            torch.tensor(centers),
                            torch.tensor(contexts),
                            torch.from_numpy(self.negatives(batch * k)).view(batch, k),
                        )
                        centers, contexts = [], []


class SkipGram(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.u, self.v = nn.Embedding(n, d, sparse=True), nn.Embedding(n, d, sparse=True)
        nn.init.uniform_(self.u.weight, -1.0 / d, 1.0 / d)
        nn.init.constant_(self.v.weight, 0)

    def forward(self, u, v, neg):
        eu, ev, en = self.u(u), self.v(v), self.v(neg)
        pos = -F.logsigmoid(torch.clamp(torch.sum(eu * ev, dim=1), -10, 10))
        negs = -F.logsigmoid(-torch.clamp(torch.bmm(en, eu.unsqueeze(2)).squeeze(2), -10, 10)).sum(1)
        return (pos + negs).mean()


corpus = Corpus()
print(len(corpus.words), "words", len(corpus.ids), "tokens")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = SkipGram(len(corpus.words), 200).to(device)
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
running = 0.0
for i, (u, v, neg) in enumerate(corpus.batches(2048)):
    if i >= 12:
        break
    u, v, neg = u.to(device), v.to(device), neg.to(device)
    optimizer.zero_grad()
    loss = model(u, v, neg)
    loss.backward()
    optimizer.step()
    scheduler.step()
    running = running * 0.9 + loss.item() * 0.1
    if i > 0 and i % 5 == 0:
        print(" loss:", running)
emb = F.normalize(model.u.weight.detach(), dim=1)
sim = emb[:50] @ emb.t()
values, idx = sim.topk(6, dim=1)
np.savez(os.path.join(tempfile.mkdtemp(), "w2v.npz"), emb=emb.cpu().numpy(), neighbours=idx[:, 1:].cpu().numpy())
print([corpus.words[j] for j in idx[0, 1:].tolist()])
