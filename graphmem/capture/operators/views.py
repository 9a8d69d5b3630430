"""Strides of views, as PyTorch's C++ computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_impls

from graphmem.capture.patches import Patches

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def patch_views(patches: Patches) -> None:
    """Let fake views go to the C++ kernel.

    Newer versions compute them in Python, to follow sizes that are symbols. That gives dimensions of one element other
    strides than ``computeStride`` (ATen/TensorUtils.cpp) does, and kernels read a memory format off those too: of a
    batch of one image a card may see a contiguous tensor where Python sees a channels_last one.
    """
    table: dict[Any, Any] = getattr(fake_impls, "op_implementations_dict", {})
    taken = {view: _left_to_the_kernel for view in _VIEWS if view in table}
    if taken:
        patches.set(fake_impls, "op_implementations_dict", {**table, **taken})


def _left_to_the_kernel(*_: Any, **__: Any) -> Any:
    return NotImplemented
