"""Errors of memory in a backward pass, in a function of the program's own, in a step under autocast: what is held by
the graph, by the exception, and by the names that the program keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20


class Doubled(torch.autograd.Function):
    """Twice its input; its gradient needs more than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        large = x * 2
        torch.empty(5500 * MIB, dtype=torch.uint8, device="cuda")
        return large * gradient


def _use_doubled() -> None:
    z = torch.zeros(32, MIB, device="cuda")
    more = (z + 1) * 2
    z.requires_grad_()
    (Doubled.apply(z).sum() + more.sum()).backward()


def main() -> Mapping[str, int]:
    """Allocated bytes at every turn."""
    found: dict[str, int] = {}

    def say(when: str) -> None:
        found[when] = torch.cuda.memory_allocated()

    x = torch.zeros(256 * MIB, device="cuda", requires_grad=True)
    y = x
    for _ in range(3):
        y = torch.sin(y)
    say("the graph")
    held = torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
    try:
        y.sum().backward()
    except torch.OutOfMemoryError:
        say("in the handler of the backward pass")
    del held
    say("after the backward pass")
    assert x.grad is None
    del x, y
    try:
        _use_doubled()
    except torch.OutOfMemoryError as error:
        say("in the handler of the function")
        kept = error
    say("with the exception kept")
    del kept
    say("without it")
    model = nn.Sequential(nn.Linear(4096, 4096), nn.LayerNorm(4096), nn.GELU(), nn.Linear(4096, 4096)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    output: Tensor | None
    loss: Tensor | None
    for rows in (200_000, 131_072, 65_536, 16_384):
        try:
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(torch.zeros(rows, 4096, device="cuda"))
                loss = output.float().square().mean()
            loss.backward()
            optimizer.step()
        except torch.OutOfMemoryError:
            say(f"in the handler of the step with {rows}")
            output = loss = None
        say(f"after the step with {rows}")
    return found | {"reserved": torch.cuda.memory_reserved(), "errors": torch.cuda.memory_stats()["num_ooms"]}
