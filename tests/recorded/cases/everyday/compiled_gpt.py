"""A small language model under torch.compile, bf16 autocast, tied embeddings, packed documents with resets."""

import math
import os
from dataclasses import asdict, dataclass

import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

torch.set_float32_matmul_precision("high")


@dataclass
class Config:
    vocab: int = 2048
    dim: int = 256
    layers: int = 3
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 4
    lr: float = 6e-4


def norm(x):
    return F.rms_norm(x, (x.size(-1),))


class Rotary(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        freqs = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("cos", freqs.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", freqs.sin().bfloat16(), persistent=False)

    def forward(self, x):
        cos, sin = self.cos[None, : x.size(1), None], self.sin[None, : x.size(1), None]
        x1, x2 = x.chunk(2, dim=3)
        return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), 3).type_as(x)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.qkv, self.proj = nn.Linear(c.dim, 3 * c.dim, bias=False), nn.Linear(c.dim, c.dim, bias=False)
        self.fc, self.out = nn.Linear(c.dim, 4 * c.dim, bias=False), nn.Linear(4 * c.dim, c.dim, bias=False)
        self.rotary, self.scale = Rotary(c.dim // c.heads, c.context), nn.Parameter(torch.ones(2))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(norm(x)).view(b, t, 3 * self.heads, -1).chunk(3, dim=2)
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)
        x = x + self.scale[0] * self.proj(y.reshape(b, t, d))
        return x + self.scale[1] * self.out(F.relu(self.fc(norm(x))).square())


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(c.vocab, c.dim), nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = nn.Linear(c.dim, c.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, ids, targets=None):
        x = norm(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        logits = 15 * torch.tanh(self.head(norm(x)).float() / 15)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def batches(c, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, c.vocab, (200_000,), generator=g)
    tokens[torch.rand(len(tokens), generator=g) < 0.01] = 0
    while True:
        at = torch.randint(0, len(tokens) - c.context - 1, (c.batch,), generator=g)
        x = torch.stack([tokens[i : i + c.context] for i in at])
        y = torch.stack([tokens[i + 1 : i + 1 + c.context] for i in at]).masked_fill(x == 0, -100)
        yield x.pin_memory().cuda(non_blocking=True), y.pin_memory().cuda(non_blocking=True)


def main():
    c = Config(steps=int(os.environ.get("STEPS", 4)))
    torch.manual_seed(1337)
    model = LM(c).cuda()
    raw, model = model, torch.compile(model)
    matrices = [p for p in raw.parameters() if p.ndim == 2]
    rest = [p for p in raw.parameters() if p.ndim < 2]
    opts = [torch.optim.AdamW(matrices, c.lr, (0.9, 0.95), fused=True), torch.optim.Adam(rest, 10 * c.lr)]
    scheds = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.5 * (1 + math.cos(math.pi * s / c.steps))) for o in opts]
    train, valid = batches(c, 1), batches(c, 2)
    for step in range(c.steps):
        model.train()
        x, y = next(train)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        for opt, sched in zip(opts, scheds):
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
        print(f"step:{step}/{c.steps} train_loss:{loss.item():.4f}")
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        val = sum(model(*next(valid)) for _ in range(2)) / 2
    print(f"val_loss:{val:.4f} peak {torch.cuda.max_memory_allocated() // 2**20} MiB")
    torch.save({"config": asdict(c), "model": raw.state_dict()}, "/dev/null")


if __name__ == "__main__":
    main()
