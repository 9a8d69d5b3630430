"""A mixture of experts whose tokens are gathered by what the router says."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
dev = torch.device("cuda")


class MoE(nn.Module):
    def __init__(self, d=256, n=4, k=2):
        super().__init__()
        self.gate, self.k = nn.Linear(d, n, bias=False), k
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)) for _ in range(n)
        )

    def forward(self, x):
        b, t, d = x.shape
        x = x.view(-1, d)
        w, sel = torch.topk(F.softmax(self.gate(x), dim=1, dtype=torch.float), self.k, dim=-1)
        w = (w / w.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        mask = F.one_hot(sel, num_classes=len(self.experts)).permute(2, 1, 0)
        for i, expert in enumerate(self.experts):
            idx, top = torch.where(mask[i])
            if top.shape[0] == 0:
                continue
            out.index_add_(0, top, expert(x[top]) * w[top, idx, None])
        return out.view(b, t, d)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.moe, self.norm, self.head = (
            nn.Embedding(2000, 256),
            MoE(),
            nn.LayerNorm(256),
            nn.Linear(256, 2000),
        )

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(self.norm(x + self.moe(x)))


model = Model().to(dev)
opt = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(3):
    ids = torch.randint(0, 2000, (8, 129), device=dev)
    loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, 2000), ids[:, 1:].reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, float(loss))
