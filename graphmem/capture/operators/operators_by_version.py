"""Operators that an earlier PyTorch than the installed one runs, chosen by the version that is predicted.

A model's own code and PyTorch's Python are those of the installed version. Decisions of C++ between a call and its
kernels are replayed here where it changed since 2.4; kernels have their versions in ``capture/kernels``. The versions
and their sources are in :mod:`graphmem.base.versions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.capture.operators import Decomposition
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.tensors import HALF_TYPES

_aten = torch.ops.aten
_END = 2**63 - 1


def composed_rms_norm(
    torch_version: versions.Version, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None,
    eps: float | None,
) -> Tensor:  # fmt: skip
    """``at::rms_norm`` before it was one kernel."""
    upcasts = versions.RMS_NORM_UPCASTS.holds(torch_version)
    weighs_in_fp32 = versions.RMS_NORM_WEIGHS_IN_FP32.holds(torch_version)
    wide = input.float() if upcasts and input.dtype in HALF_TYPES else input
    dims = list(range(input.dim() - len(normalized_shape), input.dim()))
    squares = torch.pow(wide, 2)
    mean = squares.mean(dims, True).add_(torch.finfo(wide.dtype).eps if eps is None else eps)
    inverse = torch.rsqrt(mean)
    del mean, squares  # temporaries of one expression go at its end, the last one first
    product = wide.mul(inverse)
    if weighs_in_fp32 and weight is not None:
        product = product.mul(weight)
    result = product.to(input.dtype)
    del product
    return result if weighs_in_fp32 or weight is None else result.mul(weight)


def _take_along_dim(self: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """``_take_along_dim_helper`` up to 2.9: both are expanded against each other, but for ``dim``."""
    if dim is None or self.dim() != indices.dim():
        return _aten.take_along_dim.default.decompose(self, indices, dim)
    axis = dim % self.dim()
    of_indices = (*self.shape[:axis], indices.shape[axis], *self.shape[axis + 1 :])
    of_self = (*indices.shape[:axis], self.shape[axis], *indices.shape[axis + 1 :])
    expanded = indices.expand(torch.broadcast_shapes(of_indices, indices.shape))
    return self.expand(torch.broadcast_shapes(of_self, self.shape)).gather(axis, expanded)


#: Operators -> their decompositions before a change of versions.
TAKE_ALONG_DIM: dict[OpOverload, Decomposition] = {_aten.take_along_dim.default: _take_along_dim}


def mask_by_filling(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as 0 and -inf, as up to 2.4 (``convert_boolean_attn_mask``)."""
    zeros = torch.zeros_like(mask, dtype=dtype)
    return zeros.masked_fill_(mask.logical_not(), float("-inf"))


def patch_indexing(patches: Patches) -> None:
    """Let ``x[:, 0]`` slice every dimension, where the predicted version does and the installed one does not.

    A slice costs nothing forward. Backward it takes a gradient of the size of the sliced tensor.
    """
    plain = torch.Tensor.__getitem__

    def get_item(self: Tensor, index: object) -> Tensor:
        if not (type(index) is tuple and torch.is_grad_enabled() and self.requires_grad):
            return plain(self, index)
        if not all(_is_followed(item) for item in index) or not any(isinstance(item, slice) for item in index):
            return plain(self, index)
        return _index_one_by_one(self, index, plain)

    patches.set(torch.Tensor, "__getitem__", get_item)


def _is_followed(item: object) -> bool:
    if isinstance(item, Tensor):
        return bool(item.dim() > 0)
    return item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int or _is_list(item)


def _is_list(item: object) -> bool:
    """A list of positions, of which C++ makes an index tensor."""
    return type(item) is list and all(type(position) is int for position in item)


def _index_one_by_one(tensor: Tensor, index: tuple[object, ...], plain: Callable[..., Tensor]) -> Tensor:
    """``applySlicing``: from left to right, each on the result of the one before, index tensors at the end."""
    named = sum(_dimensions(item) for item in index)
    result, dim = tensor, 0
    left: list[object] = []
    for item in index:
        if type(item) is int:
            result = result.select(dim, item)
            continue
        if isinstance(item, slice):
            result = _sliced(result, dim, item, plain)
        elif item is None:
            result = result.unsqueeze(dim)
        count = 1 if item is None else tensor.dim() - named if item is Ellipsis else _dimensions(item)
        left.extend([item] if isinstance(item, (Tensor, list)) else [slice(None)] * count)
        dim += count
    return plain(result, tuple(left)) if any(isinstance(item, (Tensor, list)) for item in left) else result


def _dimensions(item: object) -> int:
    """Dimensions of the indexed tensor that an index stands for."""
    if item is None or item is Ellipsis:
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _sliced(tensor: Tensor, dim: int, item: slice, plain: Callable[..., Tensor]) -> Tensor:
    length = tensor.shape[dim]
    if item.start in (None, 0) and item.step in (None, 1) and (item.stop is None or item.stop > length):
        return _aten.slice.Tensor(tensor, dim, 0, _END, 1)
    return plain(tensor, (slice(None),) * dim + (item,))
