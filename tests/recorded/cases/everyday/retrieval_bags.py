"""Dense retrieval: two towers with in-batch negatives, then the corpus is encoded, indexed and searched in chunks."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, D = 20000, 256


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(V, D, mode="mean", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(D, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 128))

    def forward(self, ids, offsets):
        return F.normalize(self.mlp(self.emb(ids, offsets)), dim=-1)


query, doc = Tower().cuda(), Tower().cuda()
sparse = torch.optim.SparseAdam([*query.emb.parameters(), *doc.emb.parameters()], lr=1e-3)
dense = torch.optim.AdamW([*query.mlp.parameters(), *doc.mlp.parameters()], lr=1e-3)


def bags(n, longest):
    lengths = torch.randint(1, longest, (n,))
    return torch.randint(0, V, (int(lengths.sum()),)), torch.cat(
        [torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]]
    )


for step in range(40):
    q = query(*(v.cuda() for v in bags(256, 12)))
    d = doc(*(v.cuda() for v in bags(256, 80)))
    scores = q @ d.T / 0.05
    loss = (
        F.cross_entropy(scores, torch.arange(256, device="cuda"))
        + F.cross_entropy(scores.T, torch.arange(256, device="cuda"))
    ) / 2
    for o in (sparse, dense):
        o.zero_grad(set_to_none=True)
    loss.backward()
    for o in (sparse, dense):
        o.step()
    if step % 10 == 9:
        print(step, loss.item(), (scores.argmax(1) == torch.arange(256, device="cuda")).float().mean().item())
doc.eval()
with torch.no_grad():
    index = torch.empty(50000, 128, device="cuda")
    for i in range(0, 50000, 2500):
        index[i : i + 2500] = doc(*(v.cuda() for v in bags(2500, 80)))
    queries = query(*(v.cuda() for v in bags(2000, 12)))
    best, places = [], []
    for part in queries.split(500):
        value, place = None, None
        for i in range(0, len(index), 10000):
            v, p = (part @ index[i : i + 10000].T).topk(20)
            value, p = (v, p + i) if value is None else (torch.cat([value, v], 1), torch.cat([place, p + i], 1))
            v, order = value.topk(20)
            value, place = v, p.gather(1, order)
        best.append(value.cpu())
        places.append(place.cpu())
print(torch.cat(best).mean().item(), torch.cat(places).shape)
