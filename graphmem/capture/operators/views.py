"""Strides of views, as PyTorch's C++ computes them."""

from __future__ import annotations

from typing import Any

import torch

from graphmem.capture.patches import Patches

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def patch_views(patches: Patches) -> None:
    """Let fake views go to the C++ kernel.

    Newer versions compute them in Python, to follow sizes that are symbols. That gives dimensions of one element other
    strides than ``computeStride`` (ATen/TensorUtils.cpp) does, and kernels read a memory format off those too: of a
    batch of one image a card may see a contiguous tensor where Python sees a channels_last one.
    """
    patches.wrap(
        "torch._subclasses.fake_impls.op_implementations_dict",
        "views of tensors with dimensions of one element may have other strides than on a card",
        lambda table: {**table, **{view: _left_to_the_kernel for view in _VIEWS if view in table}},
    )


def _left_to_the_kernel(*_: object, **__: object) -> Any:
    return NotImplemented
