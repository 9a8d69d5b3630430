"""Reinforcement learning of a language model beside its rollout engine: weights go over in buckets that another process
could open, so expandable segments are switched off for as long as a bucket lives, and on again for training."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, LAYERS, CONTEXT = 4096, 320, 5, 96
BUCKET = 6 * 2**20


def set_expandable_segments(enable):
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{enable}")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 5, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def log_probs(model, tokens):
    logits = model(tokens[:, :-1]).float()
    return torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:, None]).squeeze(2)


def buckets(parameters):
    bucket, size = [], 0
    for parameter in parameters:
        if bucket and size + parameter.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    yield bucket


@torch.no_grad()
def send_weights(policy, engine):
    set_expandable_segments(False)
    theirs = iter(engine.parameters())
    for bucket in buckets(policy.parameters()):
        shared = torch.empty(sum(p.numel() for p in bucket), dtype=torch.bfloat16, device="cuda")
        offset = 0
        for parameter in bucket:
            piece = shared[offset : offset + parameter.numel()].view_as(parameter)
            piece.copy_(parameter)
            next(theirs).copy_(piece)
            offset += parameter.numel()
        del shared, piece
    torch.cuda.empty_cache()
    set_expandable_segments(True)


@torch.no_grad()
def rollout(engine, prompts, length):
    tokens = prompts
    while tokens.shape[1] < length:
        following = engine(tokens)[:, -1].float().argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return tokens


def main():
    torch.manual_seed(0)
    set_expandable_segments(True)
    policy = Policy().cuda()
    engine = Policy().to("cuda", torch.bfloat16).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    for step in range(3):
        send_weights(policy, engine)
        prompts = torch.randint(VOCAB, (12, 16), device="cuda")
        tokens = rollout(engine, prompts, (32, 64, 48)[step])
        with torch.no_grad():
            before = log_probs(policy, tokens)
        advantages = torch.randn(tokens.shape[0], 1, device="cuda")
        for rows in range(0, tokens.shape[0], 6):
            part = slice(rows, rows + 6)
            now = log_probs(policy, tokens[part])
            ratio = torch.exp(now - before[part])
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.min(ratio * advantages[part], clipped * advantages[part]).mean()
            loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


main()
