"""A small decoder is trained, then writes text with a cache that grows by concatenation."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
V, C, H, L, T = 8000, 384, 6, 6, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)

    def forward(self, x, past=None):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, H, C // H).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(B, N, C)), (k, v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.a = nn.LayerNorm(C), nn.LayerNorm(C), Attention()
        self.m = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x, past=None):
        a, present = self.a(self.n1(x), past)
        x = x + a
        return x + self.m(self.n2(x)), present


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.p = nn.Embedding(V, C), nn.Embedding(1024, C)
        self.b = nn.ModuleList(Block() for _ in range(L))
        self.n, self.h = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.h.weight = self.e.weight

    def forward(self, t, past=None, start=0):
        x = self.e(t) + self.p(torch.arange(start, start + t.shape[1], device=t.device))
        caches = []
        for i, b in enumerate(self.b):
            x, c = b(x, None if past is None else past[i])
            caches.append(c)
        return self.h(self.n(x)), caches


model = LM().to("cuda")
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler()
text = torch.randint(0, V, (100_000,))
for step in range(20):
    i = torch.randint(0, len(text) - T - 1, (16,))
    x = torch.stack([text[j : j + T] for j in i]).cuda()
    y = torch.stack([text[j + 1 : j + T + 1] for j in i]).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        logits, _ = model(x)
        loss = F.cross_entropy(logits.view(-1, V), y.view(-1))
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()


@torch.inference_mode()
def write(prompt, n):
    out = prompt
    logits, cache = model(prompt)
    for k in range(n):
        p = torch.softmax(logits[:, -1] / 0.8, -1)
        v, _ = torch.topk(p, 50)
        p[p < v[:, [-1]]] = 0
        nxt = torch.multinomial(p, 1)
        out = torch.cat([out, nxt], 1)
        logits, cache = model(nxt, cache, out.shape[1] - 1)
    return out


model.eval()
print(write(torch.randint(0, V, (64, 100), device="cuda"), 400).shape)
