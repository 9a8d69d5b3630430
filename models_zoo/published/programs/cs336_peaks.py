"""Peaks of one step of course CS336's largest model, batch 4, as two who took it measured them.

``enzo``: EnzoDing-rgb/cs336-assignment2-systems, ``memory_profiling`` and ``gradient_checkpointing``: a forward pass
that keeps its graph, or a step whose logits and loss stay in variables; layers may be checkpointed, some at a time.
``shibuki``: ShibukiZero/assignment2-systems, ``cs336_systems/benchmark.py``: inference, or a step that keeps the loss
alone, by PyTorch's own cross entropy. Both count from a step after rounds of warming up, of which one is enough here:
its peak, without the optimizer's moments, is below. Arguments: who, ``forward|train``, the length, ``bf16`` for
autocast, ``together=N`` layers in a checkpoint.
"""

import sys

import torch
from cs336_model import SIZES, VOCABULARY, AdamW, Model, cross_entropy
from torch.nn import functional

TOGETHER = next((int(word.split("=")[1]) for word in sys.argv if word.startswith("together=")), 0)


def cast():
    return torch.autocast("cuda", torch.bfloat16, enabled="bf16" in sys.argv)


def enzo_forward(model, tokens):
    with cast():
        return model(tokens)


def enzo_step(model, optimizer, tokens, targets):
    optimizer.zero_grad(set_to_none=True)
    with cast():
        logits = model(tokens, TOGETHER)
        loss = cross_entropy(logits, targets)
    loss.backward()
    optimizer.step()


def shibuki_forward(model, tokens):
    model.eval()
    with torch.no_grad(), cast():
        model(tokens)


def shibuki_loss(model, tokens, targets):
    with cast():
        logits = model(tokens)
        return functional.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def shibuki_step(model, optimizer, tokens, targets):
    model.zero_grad(set_to_none=True)
    loss = shibuki_loss(model, tokens, targets)
    loss.backward()
    optimizer.step()


def main():
    who, what, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    model = Model(SIZES["2.7B"], length)
    model.to("cuda")
    tokens, targets = (torch.randint(0, VOCABULARY, (4, length), device="cuda") for _ in range(2))
    if what == "forward":
        {"enzo": enzo_forward, "shibuki": shibuki_forward}[who](model, tokens)
        return
    optimizer = AdamW(model.parameters())
    for _ in range(2):
        {"enzo": enzo_step, "shibuki": shibuki_step}[who](model, optimizer, tokens, targets)


main()
