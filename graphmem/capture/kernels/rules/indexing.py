"""Buffers of indexing with tensors, and of accumulating index_put, which is its gradient.

Sources: ``aten/src/ATen/native/cuda/Indexing.cu`` (index_put_with_sort_kernel) and
``aten/src/ATen/native/TensorAdvancedIndexing.cpp`` (make_info, _index_put_impl_) of PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import bytes_of, contiguous_strides
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule, scratch_of_deterministic_fill
from graphmem.capture.kernels.rules.embedding import take_sorted_indices

_MASKS = (torch.bool, torch.uint8)


@recorded_rule("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_rule(call: Call) -> Script:
    """Indices on the host, and those of 32 bits, are copied before the result is made."""
    script = Script()
    copies = _take_copies(script, call.indices)
    return script.output(0).give(*reversed(copies))


_Indices = Sequence["torch.Tensor | None"]


def _take_copies(script: Script, indices: _Indices) -> list[int]:
    """Copies of indices that are held until the operator ends, in the order of ``make_info`` and ``AdvancedIndex``:
    to the device, to 64 bits, and, where several are broadcast in different ways, contiguous ones of the full shape."""
    used = [index for index in indices if index is not None and index.dtype not in _MASKS]
    if not used:
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in used))
    contiguous = contiguous_strides(shape)
    held: dict[int, int] = {}
    strides = [_expanded_strides(index, shape) for index in used]
    for is_copied, element_size, label in (
        (_on_host, None, "index copied to the device"),
        (_is_narrow, 8, "64-bit index"),
    ):
        for position, index in enumerate(used):
            if is_copied(index):
                _copy(script, held, position, math.prod(shape) * (element_size or index.element_size()), label)
                strides[position] = contiguous
    apart = [] if len(set(strides)) == 1 else [place for place, own in enumerate(strides) if own != contiguous]
    for position in apart:
        _copy(script, held, position, math.prod(shape) * 8, "contiguous index")
    return [held[position] for position in sorted(held)]


def _copy(script: Script, held: dict[int, int], position: int, size: int, label: str) -> None:
    """The copy of one index, which takes the place of the one before."""
    before = held.pop(position, None)
    held[position] = script.take(size, label)
    if before is not None:
        script.give(before)


def _expanded_strides(index: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the index broadcast to ``shape``; those of dimensions of one element as in a contiguous tensor."""
    added = len(shape) - index.dim()
    own = (0,) * added + tuple(index.stride())
    sizes = (1,) * added + tuple(index.shape)
    usual = contiguous_strides(shape)
    return tuple(usual[dim] if shape[dim] == 1 else 0 if sizes[dim] == 1 else own[dim] for dim in range(len(shape)))


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _is_narrow(index: torch.Tensor) -> bool:
    return bool(index.dtype == torch.int32)


@recorded_rule("aten._index_put_impl_.default", "aten.index_put_.default")
def index_put_in_place_rule(call: Call) -> Script | None:
    """Into a tensor that is there; the unsafe kind does not look at the indices' range."""
    unsafe = call.get("unsafe")
    return _index_put(call, Script(), _checks_range(call) if unsafe is None else not unsafe)


@recorded_rule("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put_rule(call: Call) -> Script | None:
    """Into a copy. ``_unsafe_index_put`` is ``index_put`` itself, in spite of its name."""
    is_unsafe = call.operator.startswith("aten._unsafe")
    return _index_put(call, Script().output(0), is_unsafe or _checks_range(call))


def _checks_range(call: Call) -> bool:
    """Autograd's own index_put that adds is the unsafe kind, which does not look at the indices' range."""
    return not call.accumulate or not call.card.in_backward


def _index_put(call: Call, script: Script, checks_range: bool) -> Script | None:
    tensor, indices, values = call.self, call.indices, call.values
    used = [index for index in indices if index is not None]
    if not used or any(index.dtype in _MASKS for index in used):
        return None
    if not call.accumulate and not torch.are_deterministic_algorithms_enabled():
        return _overwrite(script, indices, values)
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
    return script.give(*reversed(ordered), *reversed(held))


def _overwrite(script: Script, indices: _Indices, values: torch.Tensor) -> Script:
    """A number is copied to the device first, then the indices that have to be."""
    held = [script.take(values.element_size(), "number on the device")] if _on_host(values) else []
    held += _take_copies(script, indices)
    return script.give(*reversed(held))


def _check_range(script: Script, index: torch.Tensor, card: Card) -> None:
    """Largest and smallest index, of a contiguous copy, and their comparisons with the bounds; one after the other in
    older versions."""
    for bounds in (2,) if versions.BOUNDS_IN_ONE_PASS.holds(card.torch_version) else (1, 1):
        held = [script.take(8, "index bound") for _ in range(bounds)]
        if not index.is_contiguous():
            script.scratch(bytes_of(index), "contiguous index")
        for _ in held:
            script.scratch(1, "index check")
        script.give(*reversed(held))


def _take_linear_index(
    script: Script, indices: Sequence[torch.Tensor], count: int, checks_range: bool, card: Card
) -> int:
    """The index of each dimension in turn, added to the first one, which is kept."""
    linear = 0
    for index in indices:
        wide = []
        if _on_host(index):  # computed there, then copied
            scaled = script.take(count * 8, "linear index")
        else:
            if checks_range:
                _check_range(script, index, card)
            wide = [] if index.dtype == torch.int64 else [script.take(index.numel() * 8, "64-bit index")]
            wrapped = script.take(count * 8, "wrapped index")
            scaled = script.take(count * 8, "linear index")
            script.give(wrapped)
        if linear:
            script.give(scaled)
        linear = linear or scaled
        script.give(*wide)
    return linear


def _take_values(
    script: Script, tensor: torch.Tensor, indices: _Indices, values: torch.Tensor, shape: Sequence[int]
) -> list[int]:
    """Values are expanded to one per element that is put, and made contiguous."""
    kept = [size for dim, size in enumerate(tensor.shape) if dim >= len(indices) or indices[dim] is None]
    wanted = math.prod(kept) * math.prod(shape)
    if values.numel() == wanted and values.is_contiguous():
        return []
    return [script.take(wanted * values.element_size(), "contiguous values")]


def _are_apart(indices: _Indices) -> bool:
    """True if dimensions that are not indexed lie between those that are (``hasContiguousSubspace`` is false)."""
    used = [dim for dim, index in enumerate(indices) if index is not None]
    return used[-1] - used[0] >= len(used)


def _slice_elements(tensor: torch.Tensor, indices: _Indices) -> int:
    """Elements that one linear index stands for: the dimensions behind the indexed ones, or all others where the
    indexed ones are brought to the front."""
    if _are_apart(indices):
        used = [dim for dim, index in enumerate(indices) if index is not None]
        return int(tensor.numel() // max(1, math.prod(tensor.shape[dim] for dim in used)))
    last = max(dim for dim, index in enumerate(indices) if index is not None)
    return math.prod(tensor.shape[last + 1 :])


@recorded_rule("aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.index_select.default")
def resized_rule(call: Call) -> Script:
    """Made empty, then resized."""
    return scratch_of_deterministic_fill(Script().output(0), call.dtype.itemsize)
