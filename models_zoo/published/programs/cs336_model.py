"""The language model that course CS336 gives out with its second assignment (``cs336_basics``), its loss and its AdamW,
for the programs of those who measured it."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 10000


@dataclass(frozen=True)
class Size:
    width: int
    heads: int
    inner: int
    layers: int


#: Of the assignment's table; what is ``2.7B`` there in 2025 is ``xl`` in 2026.
SIZES = {"medium": Size(1024, 16, 4096, 24), "2.7B": Size(2560, 32, 10240, 32)}


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


class Rotation(nn.Module):
    """One for all layers."""

    def __init__(self, length, size):
        super().__init__()
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x):
        even, odd = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cosine, sine = self.table[:, : x.size(-2), :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        return torch.concat((first, second), dim=-1)


def softmax(x):
    lowered = x - torch.max(x, dim=-1, keepdim=True)[0]
    raised = torch.exp(lowered)
    return raised / torch.sum(raised, dim=-1, keepdim=True)


def attend(query, key, value, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class Attention(nn.Module):
    def __init__(self, size, rotation):
        super().__init__()
        width = size.width
        self.query, self.key, self.value = Linear(width, width), Linear(width, width), Linear(width, width)
        self.output, self.rotation, self.heads = Linear(width, width), rotation, size.heads

    def forward(self, x):
        batch, length, width = x.shape
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None, :])[None]
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, width)
        return self.output(mixed)


class Gated(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate, self.down = Linear(size.width, size.inner), Linear(size.inner, size.width)
        self.up = Linear(size.width, size.inner)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x):
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, size, rotation):
        super().__init__()
        self.attention, self.gated = Attention(size, rotation), Gated(size)
        self.before, self.between = Norm(size.width), Norm(size.width)

    def forward(self, x):
        attended = self.attention(self.before(x))
        middle = x + attended
        widened = self.gated(self.between(middle))
        return middle + widened


class Model(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, size.width))
        self.rotation = Rotation(length, size.width // size.heads)
        self.blocks = nn.ModuleList([Block(size, self.rotation) for _ in range(size.layers)])
        self.norm, self.head = Norm(size.width), Linear(size.width, VOCABULARY)

    def forward(self, tokens, together=0):
        """``together``: so many layers are one checkpoint."""
        embedded = self.embedding[tokens, :]
        x = embedded
        if together:
            for start in range(0, len(self.blocks), together):
                x = checkpoint(self.some, x, start, start + together, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits

    def some(self, x, start, end):
        for at in range(start, end):
            x = self.blocks[at](x)
        return x


def cross_entropy(x, targets):
    x_max = torch.max(x, dim=-1, keepdim=True)[0]
    logarithm = log_softmax(x, x_max)
    negative = -logarithm
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x, largest):
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """The moments are made anew in every step; zeros stand in for a moment even where there is one."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state, rate, (first, second) = self.state[p], group["lr"], group["betas"]
                t = state.get("t", 1)
                now = rate * (math.sqrt(1 - (second**t)) / (1 - (first**t)))
                p.data -= rate * group["weight_decay"] * p.data
                old_m = state.get("m", torch.zeros_like(grad))
                old_v = state.get("v", torch.zeros_like(grad))
                m = first * old_m + ((1 - first) * grad)
                v = second * old_v + ((1 - second) * torch.square(grad))
                p.data -= now * m / (torch.sqrt(v) + group["eps"])
                state["m"], state["v"], state["t"] = m, v, t + 1
