"""A small GPT-2 with its usual dropout under torch.compile, fp32, steps and an evaluation."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab=4096, dim=256, heads=4, layers=3, context=256, dropout=0.1):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(self.drop(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(0)
model = GPT().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(4):
    ids = torch.randint(4096, (8, 257)).cuda()
    loss = compiled(ids[:, :-1], ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"{step} loss {loss.item():.3f}")
model.eval()
with torch.no_grad():
    ids = torch.randint(4096, (8, 257)).cuda()
    print("evaluated", compiled(ids[:, :-1], ids[:, 1:]).item())
