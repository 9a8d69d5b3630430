"""Training loops whose allocations were recorded on the CUDA build, one by one.

A case is a generator function: it builds everything, runs its iterations, and yields once, at its end, with everything
it holds still alive. Nothing here knows who records: the same code runs on the CUDA build and in a capture.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens

ITERATIONS = 3
BF16, FP16 = torch.bfloat16, torch.float16
Loop = Iterator[Any]


@dataclass(frozen=True)
class Case:
    """One loop. ``refused``: what the message says where a capture cannot follow it, and says so. ``selects_nothing``:
    sizes in it are data, and 0 in a recording, where every value reads 0. ``true_values``: recorded with read-backs
    that are true, for the program looks at values that it knows (masks, stops)."""

    name: str
    group: str
    run: Callable[[], Loop]
    refused: str = ""
    selects_nothing: bool = False
    true_values: bool = False


CASES: dict[str, Case] = {}
_group, _true_values = "", False


def group(name: str, true_values: bool = False) -> None:
    global _group, _true_values
    _group, _true_values = name, true_values


def add(
    name: str,
    run: Callable[[], Loop],
    refused: str = "",
    selects_nothing: bool = False,
    true_values: bool = False,
) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, _group, run, refused, selects_nothing, true_values or _true_values)


def case(
    name: str, refused: str = "", selects_nothing: bool = False
) -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    def register(run: Callable[[], Loop]) -> Callable[[], Loop]:
        add(name, run, refused, selects_nothing)
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


@contextlib.contextmanager
def descending_values() -> Iterator[None]:
    """On a CUDA build, whose device here has no values: those of a descent that goes on, as a capture assumes.

    Numbers fall; what is compared with a number is 0.5, or -0.5 where the number is negative; tensors compare as true.
    """
    numbers = itertools.chain([1.0], (0.5 - 1e-6 * count for count in itertools.count()))

    def falling(_: Tensor) -> float:
        return next(numbers)

    comparisons = {"__gt__": operator.gt, "__ge__": operator.ge, "__lt__": operator.lt, "__le__": operator.le}
    with contextlib.ExitStack() as stack:
        for name, compare in comparisons.items():
            patched = _descending(getattr(Tensor, name), compare)
            stack.enter_context(mock.patch.object(Tensor, name, patched))
        stack.enter_context(mock.patch.object(Tensor, "__bool__", lambda self: self.outcome))
        stack.enter_context(mock.patch.object(Tensor, "__float__", falling))
        yield


def _descending(original: Callable[..., Tensor], compare: Callable[[float, Any], bool]) -> Callable[..., Tensor]:
    def comparison(self: Tensor, other: Any) -> Tensor:
        result: Any = original(self, other)
        result.outcome = isinstance(other, Tensor) or compare(math.copysign(0.5, other), other)
        return result

    return comparison


@contextlib.contextmanager
def running_generation() -> Iterator[None]:
    """On a CUDA build, whose device here has no values: generation stops at its largest length and not before."""
    from transformers.generation import stopping_criteria, utils

    reached: list[bool] = []
    largest = stopping_criteria.MaxLengthCriteria.__call__

    def at_length(self: Any, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        reached[:] = [input_ids.shape[1] >= self.max_length]
        return largest(self, input_ids, scores, **kwargs)

    original = utils.StopCheck.__call__

    def check(self: Any, unfinished: Tensor, *rest: Any) -> bool:
        original(self, unfinished, *rest)
        return reached[0]

    with (
        mock.patch.object(stopping_criteria.MaxLengthCriteria, "__call__", at_length),
        mock.patch.object(utils.StopCheck, "__call__", check),
    ):
        yield


def is_captured(model: nn.Module) -> bool:
    """Whether this runs in a capture and not on a CUDA build."""
    return isinstance(next(model.parameters()), FakeTensor)


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
