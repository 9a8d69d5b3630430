"""NiuHuangxiaozi/assignment2-systems, ``cs336_systems/profile_memory``: a hand-written language model, four layers wide
512 with 16 heads, batch 10, whose snapshots are published. Arguments: ``forward|training``, the length, ``bf16``.

The same operators in the same order; the rotation's tables stay on the host, as there.
"""

import math
import sys
from contextlib import nullcontext

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, INNER, LAYERS, CONTEXT = 10000, 512, 16, 1344, 4, 256


def parameter(*shape):
    weight = nn.Parameter(torch.empty(*shape, device="cuda"))
    nn.init.uniform_(weight)  # in place, as trunc_normal_ is up to 2.11; 2.13 draws what it rejects again
    return weight


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = parameter(outputs, inputs)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device="cuda"))

    def forward(self, x):
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        scaled = x / scale * self.weight
        return scaled.to(kind)


def softmax(x):
    largest, _ = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - largest) / torch.sum(torch.exp(x - largest), dim=-1, keepdim=True)


def attend(query, key, value, mask):
    mask = mask.to("cuda")
    product = torch.einsum("bhqd,bhkd->bhqk", query, key)
    scores = product / torch.sqrt(torch.tensor(query.shape[-1], device="cuda"))
    masked = scores.masked_fill_(~mask.bool(), -math.inf)
    weights = softmax(masked)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(CONTEXT).float(), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("sine", torch.sin(angles), persistent=False)
        self.register_buffer("cosine", torch.cos(angles), persistent=False)
        self.query, self.key, self.value = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.output = Linear(WIDTH, WIDTH)

    def rotate(self, x):
        positions = torch.arange(x.shape[-2])
        sine, cosine = self.sine[positions].to("cuda")[..., None], self.cosine[positions].to("cuda")[..., None]
        x = x.unflatten(-1, (-1, 2))
        first = cosine * x[..., :1] - sine * x[..., 1:]
        second = sine * x[..., :1] + cosine * x[..., 1:]
        return torch.cat([first, second], dim=-1).flatten(-2)

    def forward(self, x):
        batch, length, _ = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (query, key, value))
        query = self.rotate(query)
        key = self.rotate(key)
        mask = torch.tril(torch.ones(length, length))
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        mixed = self.output(mixed)
        return mixed


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, INNER), Linear(INNER, WIDTH), Linear(WIDTH, INNER)

    def forward(self, x):
        a = self.gate(x)
        b = a * torch.sigmoid(a)
        c = self.up(x)
        return self.down(b * c)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between, self.attention, self.gated = Norm(), Norm(), Attention(), Gated()

    def forward(self, x):
        normed = self.before(x)
        attended = self.attention(normed)
        middle = attended + x
        again = self.between(middle)
        widened = self.gated(again)
        return widened + middle


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = parameter(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = Norm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(x, target):
    largest, _ = torch.max(x, dim=-1, keepdim=True)
    logarithm = x - largest - torch.log(torch.sum(torch.exp(x - largest), dim=-1, keepdim=True))
    hot = torch.zeros_like(logarithm)
    hot.scatter_(-1, target.unsqueeze(-1), 1)
    return -torch.sum(hot * logarithm) / x.shape[0]


class Adam(torch.optim.Optimizer):
    """Moments are made anew in every step, and so are the parameters' data."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
        for parameter_ in self.param_groups[0]["params"]:
            self.state[parameter_] = {
                "m": torch.zeros_like(parameter_.data),
                "v": torch.zeros_like(parameter_.data),
                "t": 0,
            }

    def step(self, closure=None):
        group = self.param_groups[0]
        (first, second), rate = group["betas"], group["lr"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state, grad = self.state[p], p.grad.data
            t = state["t"] + 1
            now = rate * math.sqrt(1 - second**t) / (1 - first**t)
            m = state["m"]
            new_m = first * m + (1 - first) * grad
            state["m"] = new_m
            v = state["v"]
            new_v = second * v + (1 - second) * grad**2
            state["v"] = new_v
            state["t"] = t
            p.data = p.data - now * (new_m / (torch.sqrt(new_v) + group["eps"]))
            p.data = p.data - rate * group["weight_decay"] * p.data


def main():
    what, length = sys.argv[1], int(sys.argv[2])
    cast = torch.autocast("cuda", torch.bfloat16) if "bf16" in sys.argv else nullcontext()
    model = Model()
    if what == "forward":
        tokens = torch.randint(0, VOCABULARY, (10, length)).to("cuda")
        for _ in range(3):
            with cast:
                model(tokens)
        return
    optimizer = Adam(model.parameters(), lr=0.001)
    tokens = torch.randint(0, VOCABULARY, (10, length)).to("cuda")
    labels = torch.randint(0, VOCABULARY, (10,)).to("cuda")
    with cast:
        for _ in range(3):
            optimizer.zero_grad()
            logits = model(tokens)
            last = logits[:, -1, :]
            loss = cross_entropy(last, labels)
            loss.backward()
            optimizer.step()


main()
