"""The context of a language model grows with the steps, as in a warm-up of sequence lengths."""

import torch
from torch import nn

STEPS, BATCH, MOST, VOCAB, D = 40, 8, 256, 2000, 256
torch.manual_seed(0)
corpus = torch.randint(0, VOCAB, (50_000,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, 8, D // 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, D), nn.Embedding(MOST, D)
        self.blocks, self.head = nn.Sequential(*[Block() for _ in range(4)]), nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.blocks(self.wte(ids) + self.wpe.weight[: ids.shape[1]]))


model = GPT().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
for step in range(STEPS):
    length = min(MOST, 32 + 8 * step)
    at = torch.randint(0, len(corpus) - length - 1, (BATCH,))
    x = torch.stack([corpus[i : i + length] for i in at]).cuda()
    y = torch.stack([corpus[i + 1 : i + length + 1] for i in at]).cuda()
    loss = nn.functional.cross_entropy(model(x).view(-1, VOCAB), y.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(step, length, loss.item())
