"""Training loops whose allocations were recorded on the CUDA build, one by one.

A case is a generator function: it builds everything, runs its iterations, and yields once, at its end, with everything
it holds still alive. Nothing here knows who records: the same code runs on the CUDA build and in a capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.loops.models import Transformer, loss_of, tokens

ITERATIONS = 3
BF16, FP16 = torch.bfloat16, torch.float16
Loop = Iterator[Any]


@dataclass(frozen=True)
class Case:
    """One loop. ``refused``: what the message says where a capture cannot follow it, and says so."""

    name: str
    group: str
    run: Callable[[], Loop]
    refused: str = ""


CASES: dict[str, Case] = {}
_group = ""


def group(name: str) -> None:
    global _group
    _group = name


def add(name: str, run: Callable[[], Loop], refused: str = "") -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, _group, run, refused)


def case(name: str, refused: str = "") -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    def register(run: Callable[[], Loop]) -> Callable[[], Loop]:
        add(name, run, refused)
        return run

    return register


@contextlib.contextmanager
def constant_values(truth: bool = False) -> Iterator[None]:
    """Values read back from the device are what a capture assumes of them, on a CUDA build too."""
    names = {"item": None, "__float__": float, "__bool__": bool, "__int__": int}
    with contextlib.ExitStack() as stack:
        for name, kind in names.items():
            read = getattr(torch.Tensor, name)
            stack.enter_context(mock.patch.object(torch.Tensor, name, _constant(read, kind, truth)))
        yield


def _constant(read: Callable[..., Any], kind: type | None, truth: bool) -> Callable[[Tensor], Any]:
    def constant(self: Tensor) -> Any:
        value = read(self)
        if not self.is_cuda:
            return value
        assumed = truth if self.dtype is torch.bool else 1.0 if self.is_floating_point() else 1
        return kind(assumed) if kind is not None else assumed

    return constant


def train(model: nn.Module, x: Tensor, y: Tensor, optimizer: Any) -> Tensor:
    """The usual loop; its last loss lives as long as the caller keeps it."""
    for _ in range(ITERATIONS):
        loss = loss_of(model(x), y)
        loss.backward()
        with constant_values() if isinstance(optimizer, torch.optim.ASGD) else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    return loss


def plain(
    make_optimizer: Callable[[nn.Module], Any],
    make_model: Callable[[], nn.Module] = Transformer,
    batch: Callable[[], tuple[Tensor, Tensor]] = tokens,
) -> Loop:
    """Forward, loss, backward, step, gradients dropped."""
    model = make_model().cuda()
    x, y = batch()
    optimizer = make_optimizer(model)
    yield train(model, x, y, optimizer)


def made(kind: Callable[..., Any], options: dict[str, Any], model: nn.Module) -> Any:
    return kind(model.parameters(), **options)


adamw = partial(made, torch.optim.AdamW, {})
