"""Wedsonlin/assignment2-systems, ``cs336_systems/nsys_profile.py``: the course's language model of 24 layers, width
1024, batch 4, after five rounds of warming up. Arguments: ``inference|training``, the length, ``bf16`` for autocast.
"""

import math
import sys

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, INNER, LAYERS = 10000, 1024, 16, 4096, 24


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

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
    def __init__(self, rotation):
        super().__init__()
        self.query, self.key, self.value = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.output, self.rotation = Linear(WIDTH, WIDTH), rotation

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in (query, key, value))
        query = self.rotation(query)
        key = self.rotation(key)
        places = torch.arange(length, device=x.device)
        mask = (places[:, None] >= places[None, :])[None]
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, WIDTH)
        return self.output(mixed)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.down, self.up = Linear(WIDTH, INNER), Linear(INNER, WIDTH), Linear(WIDTH, INNER)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x):
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotation):
        super().__init__()
        self.attention, self.gated, self.before, self.between = Attention(rotation), Gated(), Norm(), Norm()

    def forward(self, x):
        attended = self.attention(self.before(x))
        middle = x + attended
        widened = self.gated(self.between(middle))
        return middle + widened


class Model(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.rotation = Rotation(length, WIDTH // HEADS)
        self.blocks = nn.ModuleList([Block(self.rotation) for _ in range(LAYERS)])
        self.norm, self.head = Norm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        embedded = self.embedding[tokens, :]
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits


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


def main():
    what, length = sys.argv[1], int(sys.argv[2])
    model = Model(length)
    model.to("cuda")
    optimizer = AdamW(model.parameters())

    def drawn(rounds):
        return torch.randint(0, VOCABULARY, (rounds, 4, length), device="cuda")

    def cast():
        return torch.autocast("cuda", torch.bfloat16, enabled="bf16" in sys.argv)

    warming, tokens = drawn(5), drawn(1)
    if what == "inference":
        model.eval()
        with torch.inference_mode():
            for row in range(3):
                with cast():
                    model(warming[row])
            with cast():
                model(tokens[0])
        return
    warming_targets, targets = drawn(5), drawn(1)
    for row in range(2):
        with cast():
            output = model(warming[row])
            loss = cross_entropy(output, warming_targets[row])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    optimizer.zero_grad(set_to_none=True)
    with cast():
        output = model(tokens[0])
        loss = cross_entropy(output, targets[0])
    loss.backward()
    optimizer.step()


main()
