"""rasbt/LLMs-from-scratch, ``ch05/10_llm-training-speed``: GPT-2 small trained on one book, 1,024 tokens, AdamW.

Arguments: the batch, then what was added one after the other: ``mask`` (made where it is used), ``fused`` (AdamW),
``bf16`` (the model's numbers), ``classes`` (PyTorch's LayerNorm and GELU), ``flash`` (PyTorch's attention),
``compile``, ``padded`` (vocabulary). The loop is theirs: gradients are cleared first, the function that makes the loss
drops the logits, every 15th step evaluates one batch of either set, and tokens are generated at the end (three
here; the source makes fifty, of a few kilobytes each).
"""

import sys

import torch
from torch import nn
from torch.nn import functional

LENGTH, WIDTH, HEADS, LAYERS, DROPOUT = 1024, 768, 12, 12, 0.1
BATCH, ADDED = int(sys.argv[1]), set(sys.argv[2:])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        if "mask" not in ADDED:
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def forward(self, x):
        batch, length, _ = x.shape
        keys = self.key(x)
        queries = self.query(x)
        values = self.value(x)
        keys = keys.view(batch, length, HEADS, -1).transpose(1, 2)
        queries = queries.view(batch, length, HEADS, -1).transpose(1, 2)
        values = values.view(batch, length, HEADS, -1).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if "mask" in ADDED:
            hidden = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        else:
            hidden = self.mask.bool()[:length, :length]
        scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, WIDTH)
        context = self.out(context)
        return context


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.joined = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        joined = self.joined(x)
        joined = joined.view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = joined
        dropped = DROPOUT if self.training else 0.0
        context = functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropped, is_causal=True)
        context = context.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        context = self.out(context)
        return context


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = FusedAttention() if "flash" in ADDED else Attention()
        gelu = nn.GELU(approximate="tanh") if "classes" in ADDED else Gelu()
        self.widened = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), gelu, nn.Linear(4 * WIDTH, WIDTH))
        self.before, self.between = norm(), norm()
        self.dropped = nn.Dropout(DROPOUT)

    def forward(self, x):
        shortcut = x
        x = self.before(x)
        x = self.attention(x)
        x = self.dropped(x)
        x = x + shortcut
        shortcut = x
        x = self.between(x)
        x = self.widened(x)
        x = self.dropped(x)
        x = x + shortcut
        return x


def norm():
    return nn.LayerNorm(WIDTH) if "classes" in ADDED else Norm()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        vocabulary = 50304 if "padded" in ADDED else 50257
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropped = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = norm(), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        tokens = self.tokens(ids)
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = tokens + places
        x = self.dropped(x)
        x = self.blocks(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits


def loss_of(ids, targets, model):
    ids, targets = ids.to("cuda"), targets.to("cuda")
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def evaluate(model, ids):
    model.eval()
    with torch.no_grad():
        for _ in ("training set", "validation set"):
            loss_of(ids, ids, model).item()
    model.train()


def generate(model):
    model.eval()
    ids = torch.zeros(1, 4, dtype=torch.long).to("cuda")
    with torch.no_grad():
        for _ in range(3):
            logits = model(ids[:, -LENGTH:])
            logits = logits[:, -1, :]
            following = torch.argmax(logits, dim=-1, keepdim=True)
            ids = torch.cat((ids, following), dim=1)
    model.train()


def main():
    model = Model()
    if "compile" in ADDED:
        model = torch.compile(model)
    model.to("cuda")
    if "bf16" in ADDED:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused="fused" in ADDED or None)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    model.train()
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(ids, ids, model)
        loss.backward()
        optimizer.step()
        if step % 15 == 0:
            evaluate(model, ids)
    generate(model)


main()
