"""Buffers of indexing with tensors, and of accumulating index_put, which is its gradient.

Sources: ``aten/src/ATen/native/cuda/Indexing.cu`` (index_put_with_sort_kernel) and
``aten/src/ATen/native/TensorAdvancedIndexing.cpp`` (make_info, _index_put_impl_) of PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import bytes_of, contiguous_strides
from graphmem.capture.kernels.parts.new_memory import fill_resized, fills_resized
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule
from graphmem.capture.kernels.rules.embedding import take_sorted_indices
from graphmem.capture.torch_internals import current_graph_task_id


@rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_rule(call: Call) -> Script | None:
    """Indices on the host, and those of 32 bits, are copied before the result is made."""
    script = Script()
    copies = _take_copies(script, call.indices)
    if not copies:
        return None
    script.output(0)
    script.give(*reversed(copies))
    return script


def _take_copies(script: Script, indices: Sequence[Any]) -> list[int]:
    """Copies of indices that are held until the operator ends, in the order of ``make_info`` and ``AdvancedIndex``:
    to the device, to 64 bits, and, where several are broadcast in different ways, contiguous ones of the full shape."""
    used = [index for index in indices if index is not None and index.dtype not in (torch.bool, torch.uint8)]
    if not used:
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in used))
    held: dict[int, int] = {}
    strides = [_expanded_strides(index, shape) for index in used]

    def copy(position: int, element_size: int, label: str) -> None:
        before = held.pop(position, None)
        held[position] = script.take(math.prod(shape) * element_size, label)
        if before is not None:
            script.give(before)

    for position, index in enumerate(used):
        if _on_host(index):
            copy(position, index.element_size(), "index copied to the device")
            strides[position] = contiguous_strides(shape)
    for position, index in enumerate(used):
        if index.dtype == torch.int32:
            copy(position, 8, "64-bit index")
            strides[position] = contiguous_strides(shape)
    if any(stride != strides[0] for stride in strides):
        for position, stride in enumerate(strides):
            if stride != contiguous_strides(shape):
                copy(position, 8, "contiguous index")
    return [held[position] for position in sorted(held)]


def _expanded_strides(index: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the index broadcast to ``shape``; those of dimensions of one element as in a contiguous tensor."""
    added = len(shape) - index.dim()
    own = (0,) * added + tuple(index.stride())
    sizes = (1,) * added + tuple(index.shape)
    usual = contiguous_strides(shape)
    return tuple(usual[dim] if shape[dim] == 1 else 0 if sizes[dim] == 1 else own[dim] for dim in range(len(shape)))


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


@rule("aten._index_put_impl_.default")
def index_put_impl_rule(call: Call) -> Script | None:
    return _index_put(call, Script(), not call.unsafe)


@rule("aten.index_put_.default")
def index_put_in_place_rule(call: Call) -> Script | None:
    return _index_put(call, Script(), _checks_range(call))


@rule("aten.index_put.default")
def index_put_rule(call: Call) -> Script | None:
    return _index_put(call, Script().output(0), _checks_range(call))


def _checks_range(call: Call) -> bool:
    """Autograd's own index_put that adds is the unsafe kind, which does not look at the indices' range."""
    return not call.accumulate or bool(current_graph_task_id() == -1)


@rule("aten._unsafe_index_put.default")
def unsafe_index_put_rule(call: Call) -> Script | None:
    """``index_put`` itself, in spite of its name."""
    return _index_put(call, Script().output(0), True)


@rule("aten.index_select.default")
def index_select_rule(call: Call) -> Script | None:
    return fill_resized(Script().output(0), call.self.element_size()) if fills_resized() else None


def _index_put(call: Call, script: Script, checks_range: bool) -> Script | None:
    tensor, indices, values = call.self, call.indices, call.values
    used = [index for index in indices if index is not None]
    if not used or any(index.dtype in (torch.bool, torch.uint8) for index in used):
        return None
    if not call.accumulate and not torch.are_deterministic_algorithms_enabled():
        return _overwrite(script, tensor, indices, values)
    shape = torch.broadcast_shapes(*(index.shape for index in used))
    count = math.prod(shape)
    if count == 0:
        return None
    held = []
    if not tensor.is_contiguous():
        held.append(script.take(bytes_of(tensor), "contiguous tensor"))
    held.append(_take_linear_index(script, used, count, checks_range, call.card))
    if _are_apart(indices) and tensor.is_contiguous():
        held.append(script.take(bytes_of(tensor), "contiguous tensor with the indexed dimensions in front"))
    held += _take_values(script, tensor, indices, values, shape)
    sliced = _slice_elements(tensor, indices)
    ordered = take_sorted_indices(script, count, 8, ((tensor.numel() - 1) // sliced).bit_length(), call.card)
    script.give(*reversed(ordered), *reversed(held))
    return script


def _overwrite(script: Script, tensor: torch.Tensor, indices: Sequence[Any], values: torch.Tensor) -> Script | None:
    """A number is copied to the device first, then the indices that have to be."""
    held = []
    if _on_host(values):
        held.append(script.take(values.element_size(), "number on the device"))
    held += _take_copies(script, indices)
    if not held:
        return None
    script.give(*reversed(held))
    return script


def _check_range(script: Script, index: torch.Tensor, card: Card) -> None:
    """Largest and smallest index, of a contiguous copy, and their comparisons with the bounds; one after the other in
    older versions."""
    for bounds in (2,) if versions.BOUNDS_IN_ONE_PASS.holds(card.torch_version) else (1, 1):
        held = [script.take(8, "index bound") for _ in range(bounds)]
        if not index.is_contiguous():
            script.give(script.take(index.numel() * index.element_size(), "contiguous index"))
        for _ in held:
            script.give(script.take(1, "index check"))
        script.give(*reversed(held))


def _take_linear_index(
    script: Script, indices: Sequence[torch.Tensor], count: int, checks_range: bool, card: Card
) -> int:
    linear = 0
    for position, index in enumerate(indices):
        if _on_host(index):  # computed there, then copied
            copied = script.take(count * 8, "linear index")
            if position == 0:
                linear = copied
            else:
                script.give(copied)
            continue
        if checks_range:
            _check_range(script, index, card)
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


def _are_apart(indices: Sequence[Any]) -> bool:
    """Whether dimensions that are not indexed lie between those that are (``hasContiguousSubspace`` is false)."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    return used[-1] - used[0] >= len(used)


def _slice_elements(tensor: torch.Tensor, indices: Sequence[Any]) -> int:
    """Elements that one linear index stands for: the dimensions behind the indexed ones, or all others where the
    indexed ones are brought to the front."""
    if _are_apart(indices):
        used = [dim for dim, index in enumerate(indices) if index is not None]
        return int(tensor.numel() // max(1, math.prod(tensor.shape[dim] for dim in used)))
    last = max(dim for dim, index in enumerate(indices) if index is not None)
    return math.prod(tensor.shape[last + 1 :])


@rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange_rule(call: Call) -> Script | None:
    """Made empty, then resized."""
    return fill_resized(Script().output(0), call.outputs[0].element_size()) if fills_resized() else None
