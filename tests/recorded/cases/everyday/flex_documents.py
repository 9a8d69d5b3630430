"""Packed documents with FlexAttention: a causal document mask and ALiBi slopes, compiled, trained in bf16."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch._dynamo.config.cache_size_limit = 64
flex_attention = torch.compile(flex_attention, dynamic=False)
device = "cuda"
DIM, HEADS, LAYERS, VOCAB, SEQ = 512, 8, 4, 8000, 2048


def document_mask(ids):
    docs = (ids == 0).cumsum(0)

    def mask(b, h, q, kv):
        return (q >= kv) & (docs[q] == docs[kv]) & (q - kv < 1024)

    return create_block_mask(mask, None, None, len(ids), len(ids), device=device, _compile=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("slopes", torch.exp2(-torch.arange(1, HEADS + 1) * 8.0 / HEADS))

    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(1, -1, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)

        def alibi(score, b, h, q_idx, kv_idx):
            return score + self.slopes[h] * (kv_idx - q_idx)

        y = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
        return self.out(y.transpose(1, 2).reshape(1, -1, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.n1, self.n2 = Attention(), nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, mask):
        x = x + self.attention(self.n1(x), mask)
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, targets, mask):
        x = self.embed(ids)[None]
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).float()[0], targets)


torch.manual_seed(0)
model = LM().to(device, torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for step in range(4):
    tokens = torch.randint(1, VOCAB, (SEQ + 1,))
    tokens[torch.rand(SEQ + 1) < 0.005] = 0
    tokens = tokens.to(device)
    mask = document_mask(tokens[:-1])
    loss = model(tokens[:-1], tokens[1:], mask)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
