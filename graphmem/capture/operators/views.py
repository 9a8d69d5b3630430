"""Strides of views, as PyTorch's C++ computes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


@contextlib.contextmanager
def views_of_cpp() -> Iterator[None]:
    """Fake views go to the C++ kernel for the duration.

    Newer versions compute them in Python, to follow sizes that are symbols. That gives dimensions of one element other
    strides than ``computeStride`` (ATen/TensorUtils.cpp) does, and kernels read a memory format off those too: of a
    batch of one image a card may see a contiguous tensor where Python sees a channels_last one.
    """
    table: dict[Any, Any] = getattr(fake_impls, "op_implementations_dict", {})
    taken = {view: table.pop(view) for view in _VIEWS if view in table}
    try:
        yield
    finally:
        table.update(taken)
