"""Buffers of accumulating index_put, which is also the gradient of indexing with tensors.

Source: ``aten/src/ATen/native/cuda/Indexing.cu`` (index_put_with_sort_kernel) of PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.embedding import take_sorted_indices
from graphmem.capture.kernels.script import Card, Script, rule


@rule("aten._index_put_impl_.default")
def index_put_impl_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    unsafe = bool(args[4]) if len(args) > 4 else bool(kwargs.get("unsafe", False))
    return _index_put(args, kwargs, Script(), not unsafe, card)


@rule("aten.index_put_.default")
def index_put_in_place_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    return _index_put(args, kwargs, Script(), not _in_backward(), card)


@rule("aten.index_put.default")
def index_put_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    return _index_put(args, kwargs, Script().output(0), not _in_backward(), card)


def _in_backward() -> bool:
    """Autograd's own index_put is the unsafe kind, which does not look at the indices' range."""
    return bool(torch._C._current_graph_task_id() != -1)


def _index_put(
    args: Sequence[Any], kwargs: dict[str, Any], script: Script, checks_range: bool, card: Card
) -> Script | None:
    tensor, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    used = [index for index in indices if index is not None]
    if not accumulate or not used or any(index.dtype in (torch.bool, torch.uint8) for index in used):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in used))
    count = math.prod(shape)
    if count == 0:
        return None
    held = []
    if not tensor.is_contiguous():
        held.append(script.take(tensor.numel() * tensor.element_size(), "contiguous tensor"))
    if checks_range:
        for _ in used:
            _check_range(script)
    held.append(_take_linear_index(script, used, count))
    held += _take_values(script, tensor, indices, values, shape)
    sliced = _slice_elements(tensor, indices)
    ordered = take_sorted_indices(script, count, 8, ((tensor.numel() - 1) // sliced).bit_length(), card)
    script.give(*reversed(ordered), *reversed(held))
    return script


def _check_range(script: Script) -> None:
    """Largest and smallest index, and their comparisons with the bounds."""
    bounds = [script.take(8, "index bound") for _ in range(2)]
    for _ in bounds:
        script.give(script.take(1, "index check"))
    script.give(*reversed(bounds))


def _take_linear_index(script: Script, indices: Sequence[torch.Tensor], count: int) -> int:
    linear = 0
    for position, index in enumerate(indices):
        wide = [] if index.dtype == torch.int64 else [script.take(index.numel() * 8, "64-bit index")]
        wrapped = script.take(count * 8, "wrapped index")
        scaled = script.take(count * 8, "linear index")
        script.give(wrapped)
        if position == 0:
            linear = scaled
        else:
            script.give(scaled)
        script.give(*wide)
    return linear


def _take_values(
    script: Script, tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor, shape: Sequence[int]
) -> list[int]:
    """Values are expanded to one per element that is put, and made contiguous."""
    kept = [size for dim, size in enumerate(tensor.shape) if dim >= len(indices) or indices[dim] is None]
    wanted = math.prod(kept) * math.prod(shape)
    if values.numel() == wanted and values.is_contiguous():
        return []
    return [script.take(wanted * values.element_size(), "contiguous values")]


def _slice_elements(tensor: torch.Tensor, indices: Sequence[Any]) -> int:
    """Elements that one linear index stands for: the dimensions behind the indexed ones."""
    last = max(dim for dim, index in enumerate(indices) if index is not None)
    return math.prod(tensor.shape[last + 1 :])
