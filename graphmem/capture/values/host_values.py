"""Small host tensors that Python code reads back: step counters, ``linspace`` of drop-path rates, literal tensors.

Model code computes such values on the host and turns them into Python numbers. They are configuration, not data, so
they are computed for real instead of on fake tensors. Everything big, and everything on the device, stays fake.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.capture.values.tensors import tensors_in

_aten = torch.ops.aten

#: Largest number of elements of a host tensor that is computed for real.
LIMIT = 1 << 16

_RANGES = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default, _aten.logspace.default,
}  # fmt: skip
#: Uniform random numbers drawn on the host (layer drop, augmentation) count as their mean, so that the same step gives
#: the same trace every time.
_UNIFORM = {_aten.rand.default}
#: Random orders (a data loader's) count as the natural order.
_ORDERS = {_aten.randperm.default, _aten.randperm.generator}
_SHAPED = {_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format}


#: Draws in place of PyTorch's default one, which belongs to the process.
_generator: Any = torch._C.Generator("cpu")


def new_generator() -> Any:
    """The generator of the capture that begins; it draws the same numbers in every capture."""
    return _generator.manual_seed(0)


def computable(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call makes or uses only small host values."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    has_tensor = False
    for tensor in tensors_in(args):
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.numel() > LIMIT:
            return False
        has_tensor = True
    if has_tensor:
        return True
    if func in _SHAPED:
        return len(args[0]) == 0
    if _is_of_numbers(func, args):
        return True
    if func in _UNIFORM:
        return bool(math.prod(args[0]) <= LIMIT)
    if func in _ORDERS:
        return bool(args[0] <= LIMIT)
    return (func in _RANGES and _length(func, args) <= LIMIT) or func is _aten.scalar_tensor.default


def _is_of_numbers(func: Any, args: Any) -> bool:
    """Whether numbers are given where the operator takes tensors, as ``torch.div(sequence_length, window)`` does."""
    arguments = func._schema.arguments
    return bool(args) and str(arguments[0].type) == "Tensor" and isinstance(args[0], (int, float))


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the call on real host tensors."""
    with unset_fake_temporarily():
        if func in _UNIFORM:
            return torch.full(args[0], 0.5, dtype=kwargs.get("dtype"))
        if func in _ORDERS:
            return torch.arange(args[0], dtype=kwargs.get("dtype"))
        if kwargs.get("generator") is None and any(given.name == "generator" for given in func._schema.arguments):
            kwargs = {**kwargs, "generator": _generator}
        return func(*args, **kwargs)


def _length(func: Any, args: Any) -> float:
    """Number of elements of a range; infinite if it is given in a way that is not understood."""
    numbers = [a for a in args if isinstance(a, (int, float))]
    if len(numbers) != len(args):
        return float("inf")
    if func is _aten.arange.default:
        return float(numbers[0])
    if func is _aten.arange.start:
        return float(numbers[1] - numbers[0])
    if func is _aten.arange.start_step:
        return float(abs(numbers[1] - numbers[0]) / abs(numbers[2] if len(numbers) > 2 else 1))
    return float(numbers[2])
