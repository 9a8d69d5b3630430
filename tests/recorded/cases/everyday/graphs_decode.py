"""gpt-fast in small: prefill compiled for any length, decoding in CUDA graphs with a static cache."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, HEADS, KV, LAYERS, VOCAB, CONTEXT = 1024, 16, 4, 6, 16000, 512


class Cache(nn.Module):
    def __init__(self, batch):
        super().__init__()
        shape = batch, KV, CONTEXT, DIM // HEADS
        self.register_buffer("k", torch.zeros(shape, dtype=torch.bfloat16))
        self.register_buffer("v", torch.zeros(shape, dtype=torch.bfloat16))

    def update(self, places, k, v):
        self.k[:, :, places] = k
        self.v[:, :, places] = v
        return self.k, self.v


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        size = DIM // HEADS
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV) * size, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(DIM, 2816, False),
            nn.Linear(DIM, 2816, False),
            nn.Linear(2816, DIM, False),
        )
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.cache = None

    def forward(self, x, places, mask):
        b, t, _ = x.shape
        size = DIM // HEADS
        q, k, v = self.qkv(self.n1(x)).split([HEADS * size, KV * size, KV * size], -1)
        q = q.view(b, t, HEADS, size).transpose(1, 2)
        k, v = (y.view(b, t, KV, size).transpose(1, 2) for y in (k, v))
        k, v = self.cache.update(places, k, v)
        k, v = (y.repeat_interleave(HEADS // KV, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, DIM))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("causal", torch.tril(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool)))

    def setup(self, batch):
        for layer in self.layers:
            layer.cache = Cache(batch).cuda()

    def forward(self, ids, places):
        mask = self.causal[None, None, places]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, places, mask)
        return self.head(self.norm(x))


def sample(logits, temperature=0.8, top_k=50):
    logits = logits[:, -1] / temperature
    v, _ = torch.topk(logits, top_k)
    probs = torch.softmax(torch.where(logits < v[:, -1:], -float("inf"), logits), -1)
    return torch.argmax(probs / torch.empty_like(probs).exponential_(1), dim=-1, keepdim=True)


def prefill(model, ids, places):
    return sample(model(ids, places))


def decode(model, ids, places):
    return sample(model(ids, places))


prefill = torch.compile(prefill, fullgraph=True, dynamic=True)
decode = torch.compile(decode, mode="reduce-overhead", fullgraph=True)


@torch.no_grad()
def generate(model, prompt, new):
    model.setup(prompt.shape[0])
    token = prefill(model, prompt, torch.arange(prompt.shape[1], device="cuda")).clone()
    places = torch.tensor([prompt.shape[1]], device="cuda")
    out = [token]
    for _ in range(new - 1):
        token = decode(model, token, places).clone()
        places = places + 1
        out.append(token)
    return torch.cat(out, 1)


torch.manual_seed(0)
with torch.device("cuda"):
    model = Transformer().to(torch.bfloat16).eval()
for length in (37, 120, 64):
    prompt = torch.randint(VOCAB, (4, length)).cuda()
    print(generate(model, prompt, 24).shape, torch.cuda.max_memory_reserved() >> 20)
