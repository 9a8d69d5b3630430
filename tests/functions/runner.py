"""Runs one case: the part that is the same on a CUDA build and in a capture, and the capture itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.functions.cases import Case


def run(case: Case, mark: Callable[[], None]) -> None:
    """Set the case up, then run it between two calls of ``mark``; everything that it returns stays alive."""
    torch.manual_seed(0)
    tensors = [tensor.make() for tensor in case.tensors]
    arguments = [case.module().to("cuda"), *tensors] if case.module is not None else tensors
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(case.grad):
            mark()
            outputs = case.run(*arguments)
            roots = [out for out in leaves(outputs) if out.requires_grad]
            gradients = [torch.empty_like(root) for root in roots]
            if roots:
                torch.autograd.backward(roots, gradients)
            mark()
    finally:
        gc.enable()


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
