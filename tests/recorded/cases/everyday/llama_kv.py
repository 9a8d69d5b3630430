"""A small Llama by hand: rotary numbers as complex, grouped queries, gradient checkpoints, then decoding with a cache."""

import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(1234)
device, dtype = "cuda", torch.bfloat16
dim, layers, heads, kv_heads, vocab, maxlen = 512, 6, 8, 2, 8000, 512


def freqs_cis(d, end, theta=10000.0):
    f = 1.0 / (theta ** (torch.arange(0, d, 2)[: d // 2].float() / d))
    f = torch.outer(torch.arange(end, device=f.device), f).float()
    return torch.polar(torch.ones_like(f), f)


def rotary(xq, xk, fc):
    q = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    k = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    fc = fc.view(1, q.shape[1], 1, q.shape[-1])
    return torch.view_as_real(q * fc).flatten(3).type_as(xq), torch.view_as_real(k * fc).flatten(3).type_as(xk)


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(d))

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hd = dim // heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(dim, n, bias=False) for n in (dim, kv_heads * self.hd, kv_heads * self.hd, dim)
        )
        self.cache = None

    def forward(self, x, start, fc, mask):
        b, t, _ = x.shape
        q, k, v = (
            self.wq(x).view(b, t, heads, self.hd),
            self.wk(x).view(b, t, kv_heads, self.hd),
            self.wv(x).view(b, t, kv_heads, self.hd),
        )
        q, k = rotary(q, k, fc)
        if self.cache is not None:
            ck, cv = self.cache
            ck[:b, start : start + t] = k
            cv[:b, start : start + t] = v
            k, v = ck[:b, : start + t], cv[:b, : start + t]
        k, v = (
            z[:, :, :, None, :].expand(*z.shape[:3], heads // kv_heads, self.hd).reshape(*z.shape[:2], heads, self.hd)
            for z in (k, v)
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.hd)
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.n1, self.n2 = Attention(), RMSNorm(dim), RMSNorm(dim)
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, 1408, bias=False),
            nn.Linear(1408, dim, bias=False),
            nn.Linear(dim, 1408, bias=False),
        )

    def forward(self, x, start, fc, mask):
        h = x + self.attn(self.n1(x), start, fc, mask)
        y = self.n2(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.layers, self.norm = (
            nn.Embedding(vocab, dim),
            nn.ModuleList(Block() for _ in range(layers)),
            RMSNorm(dim),
        )
        self.output = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("fc", freqs_cis(dim // heads, maxlen), persistent=False)

    def forward(self, tokens, start=0):
        b, t = tokens.shape
        h, fc, mask = self.tok(tokens), self.fc[start : start + t], None
        if t > 1:
            mask = torch.full((t, t), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((t, start), device=tokens.device), mask]).type_as(h)
        for layer in self.layers:
            h = (
                checkpoint(layer, h, start, fc, mask, use_reentrant=False)
                if self.training
                else layer(h, start, fc, mask)
            )
        return self.output(self.norm(h)).float()


model = Transformer().to(device=device)
model.layers.to(dtype), model.tok.to(dtype), model.output.to(dtype), model.norm.to(dtype)
print(sum(p.numel() for p in model.parameters()) / 1e6, "M")
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
model.train()
for it in range(3):
    t0 = time.perf_counter()
    batch = torch.randint(0, vocab, (4, 257), device=device)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].reshape(-1))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    print(
        f"{it} loss {loss.item():.3f} norm {norm:.3f} {time.perf_counter() - t0:.2f}s {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"
    )
model.eval()
del loss, norm, batch
with torch.inference_mode():
    for layer in model.layers:
        layer.attn.cache = tuple(
            torch.zeros((2, maxlen, kv_heads, dim // heads), device=device, dtype=dtype) for _ in range(2)
        )
    prompts = [[1, 5, 9, 30, 2], [1, 7, 8]]
    total = 24
    tokens = torch.full((2, total), -1, dtype=torch.long, device=device)
    for k, p in enumerate(prompts):
        tokens[k, : len(p)] = torch.tensor(p, dtype=torch.long, device=device)
    prev, eos = 0, torch.tensor([False] * 2, device=device)
    text_mask = tokens != -1
    for cur in range(min(len(p) for p in prompts), total):
        logits = model(tokens[:, prev:cur], prev)
        probs = torch.softmax(logits[:, -1] / 0.6, dim=-1)
        ps, pi = torch.sort(probs, dim=-1, descending=True)
        cs = torch.cumsum(ps, dim=-1)
        ps[cs - ps > 0.9] = 0.0
        ps.div_(ps.sum(dim=-1, keepdim=True))
        nxt = torch.gather(pi, -1, torch.multinomial(ps, num_samples=1)).reshape(-1)
        nxt = torch.where(text_mask[:, cur], tokens[:, cur], nxt)
        tokens[:, cur] = nxt
        prev = cur
    print([t[:5] for t in tokens.tolist()])
