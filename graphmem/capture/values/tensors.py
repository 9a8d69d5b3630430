"""Tensors in nested values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: The floating-point types of 16 bits.
HALF_TYPES = (torch.float16, torch.bfloat16)


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
