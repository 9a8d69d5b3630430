"""Wedsonlin/assignment2-systems, ``cs336_systems/nsys_profile.py``: the course's language model of 24 layers, width
1024, batch 4, after five rounds of warming up. Arguments: ``inference|training``, the length, ``bf16`` for autocast.
"""

import sys

import torch
from cs336_model import SIZES, VOCABULARY, AdamW, Model, cross_entropy


def main():
    what, length = sys.argv[1], int(sys.argv[2])
    model = Model(SIZES["medium"], length)
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
