"""A transformer trained in CUDA graphs: mode reduce-overhead, bf16, then evaluated between epochs and trained on."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Digits(nn.Module):
    def __init__(self, dim=256, depth=4):
        super().__init__()
        self.stem = nn.Linear(49, dim)
        self.place = nn.Parameter(0.02 * torch.randn(64, dim))
        self.blocks = nn.Sequential(*(Block(dim, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x):
        x = x.unfold(2, 7, 7).unfold(3, 7, 7).reshape(len(x), 64, 49)
        return self.head(self.norm(self.blocks(self.stem(x) + self.place)).mean(1))


torch.manual_seed(0)
model = Digits().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run = torch.compile(model, mode="reduce-overhead")
for epoch in range(2):
    model.train()
    for step in range(5):
        x, y = torch.randn(128, 1, 56, 56).cuda(), torch.randint(10, (128,)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(epoch, step, loss.item())
    model.eval()
    right = 0
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for _ in range(3):
            x, y = torch.randn(128, 1, 56, 56).cuda(), torch.randint(10, (128,)).cuda()
            right += (run(x).argmax(1) == y).sum().item()
    print("accuracy", right / 384)
