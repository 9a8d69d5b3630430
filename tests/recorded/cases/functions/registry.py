"""Single functions and modules whose allocations were recorded on the CUDA build, one by one.

A case is a function of tensors (and perhaps of a module). It runs forward, then backward from gradients made by
``empty_like``. Sizes are chosen so that a buffer that is forgotten shows. Nothing here knows who records: the same code
runs on the CUDA build and in a capture (:mod:`tests.recorded.functions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FP16, BF16, FP64, I64, I32, U8, BOOL = (
    torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
C64 = torch.complex64


@dataclass(frozen=True)
class T:
    """A tensor on the device: a leaf that requires a gradient if its dtype can have one and ``grad`` says so.

    ``layout``: ``contiguous``, ``channels_last``, ``transposed`` (last two dimensions swapped in memory), ``sliced``
    (every second element of a wider last dimension) or ``expanded`` (the first dimension has stride 0).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool = True
    layout: str = "contiguous"

    def make(self) -> torch.Tensor:
        tensor = self._made()
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.requires_grad_() if floating and self.grad else tensor

    def _made(self) -> torch.Tensor:
        shape, options = self.shape, {"dtype": self.dtype, "device": "cuda"}
        if self.layout == "channels_last":
            format_ = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            return torch.zeros(shape, **options).to(memory_format=format_)
        if self.layout == "transposed":
            return torch.zeros((*shape[:-2], shape[-1], shape[-2]), **options).transpose(-1, -2)
        if self.layout == "sliced":
            return torch.zeros((*shape[:-1], 2 * shape[-1]), **options)[..., ::2]
        if self.layout == "expanded":
            return torch.zeros((1, *shape[1:]), **options).expand(shape)
        return torch.zeros(shape, **options)


def t(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True, layout: str = "contiguous") -> T:
    return T(shape, dtype, grad, layout)


def index(*shape: int, dtype: torch.dtype = I64) -> T:
    return T(shape, dtype)


@dataclass(frozen=True)
class Case:
    """``run(module, *tensors)`` or, without ``module``, ``run(*tensors)``. ``grad`` off: under ``no_grad``.

    ``true_values``: recorded with read-backs that are true, where zeros would be none (tensors given to a case are
    zeros, and read as such).
    """

    name: str
    group: str
    run: Callable[..., Any]
    tensors: tuple[T, ...]
    module: Callable[[], nn.Module] | None = None
    grad: bool = True
    refused: str = ""
    true_values: bool = False


CASES: dict[str, Case] = {}
_group = ""


def group(name: str) -> None:
    global _group
    _group = name


def add(name: str, run: Callable[..., Any], *tensors: T, **options: Any) -> None:
    assert name not in CASES, name
    CASES[name] = Case(name, _group, run, tensors, **options)


def call(module: nn.Module, *tensors: torch.Tensor) -> Any:
    return module(*tensors)


def module(
    name: str, make: Callable[[], nn.Module], *tensors: T, run: Callable[..., Any] = call, **options: Any
) -> None:
    add(name, run, *tensors, module=make, **options)
