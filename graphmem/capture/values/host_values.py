"""Operators that make small host tensors of numbers: ranges, orders, indices, literal tensors.

Nobody makes weights with them, and Python code reads them: what they make is a real tensor, and what is made of real
tensors alone is real too (:mod:`graphmem.capture.values.known_values`). Everything else on the host is a fake tensor
whose values are kept beside it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from graphmem.capture.torch_internals import FakeTensor, unset_fake_temporarily
from graphmem.capture.values import generators
from graphmem.capture.values.known_values import KnownValues
from graphmem.capture.values.tensors import NOWHERE, tensors_in

_aten = torch.ops.aten

#: Largest number of elements that is made for real.
LIMIT = 1 << 22

_RANGES = {
    _aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default, _aten.logspace.default,
}  # fmt: skip
_ORDERS = {_aten.randperm.default, _aten.randperm.generator}
_INTEGERS = {
    _aten.randint.default: 1, _aten.randint.generator: 1, _aten.randint.low: 2, _aten.randint.low_generator: 2,
}  # fmt: skip
_SHAPED = {_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.empty.memory_format}


def computable(values: KnownValues, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether this call makes or uses only host tensors that are real."""
    first = args[0] if args and isinstance(args[0], FakeTensor) else next(tensors_in(args), None)
    if first is not None:
        is_on_device = isinstance(first, FakeTensor) and first.fake_device.type == "cuda"
        return not is_on_device and values.runs_for_real(func, args, kwargs)
    device = kwargs.get("device")
    if device is not None and not isinstance(device, torch.device):
        device = torch.device(device)
    if device is not None and (device.type != "cpu" or device == NOWHERE):
        return False
    if func in _SHAPED:
        return len(args[0]) == 0
    if _is_of_numbers(func, args):
        return True
    if func in _ORDERS or func in _INTEGERS:
        elements = args[0] if func in _ORDERS else math.prod(args[_INTEGERS[func]])
        waits = generators.named(kwargs.get("generator")) is None and generators.current().is_far_behind
        return bool(elements <= LIMIT) and not waits
    return (func in _RANGES and _length(func, args) <= LIMIT) or func is _aten.scalar_tensor.default


def _is_of_numbers(func: Any, args: Any) -> bool:
    """Whether numbers are given where the operator takes tensors, as ``torch.div(sequence_length, window)`` does."""
    arguments = func._schema.arguments
    return bool(args) and str(arguments[0].type) == "Tensor" and isinstance(args[0], (int, float))


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the call on real host tensors, as PyTorch's reducer needs them."""
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _length(func: object, args: Any) -> float:
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
