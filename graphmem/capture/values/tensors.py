"""Tensors in nested values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[Any]:
    """Every tensor in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
