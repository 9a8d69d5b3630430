"""Nested tensors in the jagged layout: attention, layer norm, feed-forward, padded at the end."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
dim, heads = 256, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, [heads, dim // heads]).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).flatten(-2))
        return x + self.ff(self.norm2(x))


net = nn.Sequential(Block(), Block()).cuda()
head = nn.Linear(dim, 10).cuda()
optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], 1e-4)
for lengths in ([30, 50, 80, 17], [12, 90, 33, 64], [30, 50, 80, 17]):
    x = torch.nested.nested_tensor([torch.randn(n, dim) for n in lengths], layout=torch.jagged, device="cuda")
    y = torch.randint(10, (len(lengths),), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = net(x)
        pooled = torch.nested.to_padded_tensor(out, 0.0).mean(1)
        loss = F.cross_entropy(head(pooled), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
