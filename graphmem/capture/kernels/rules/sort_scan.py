"""Buffers of sort, median, topk and cumulative sums.

Sources: ``aten/src/ATen/native/cuda/Sort.cpp``, ``Sorting.cpp``, ``SortStable.cu``, ``TensorTopK.cu`` and
``ScanKernels.cpp`` of PyTorch 2.13; orders observed on the real 2.13.0 CUDA build.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts import cub
from graphmem.capture.kernels.parts.layout import bytes_of, contiguous_strides, is_dense, last_order
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule

_INDEX = 8
#: Longer slices are sorted by CUB (should_use_small_sort of ATen/native/cuda/Sort.h).
_SMALL_SORT = 4096


# --- sort -------------------------------------------------------------------------------------------------------------


@recorded_rule("aten.sort.default", "aten.sort.stable")
def sort_rule(call: Call) -> Script | None:
    tensor = call.self
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    script = Script().outputs(0, 1)
    write_sort(script, tensor, call.dim % tensor.dim(), call.outputs[0].stride(), call.card)
    return script


def write_sort(script: Script, tensor: torch.Tensor, dim: int, stride: Sequence[int], card: Card) -> None:
    """The buffers of sorting ``tensor`` into values and indices of the given strides."""
    length = int(tensor.shape[dim])
    if length <= _SMALL_SORT:
        script.scratch(length * _INDEX, "range of indices")
        return
    copies = []
    if not (tensor.stride(dim) == 1 and is_dense(tensor)):
        copies.append(script.take(bytes_of(tensor), "input with the sorted dimension innermost"))
        if tuple(stride) != contiguous_strides(tensor.shape, last_order(tensor.dim(), dim)):
            copies.append(script.take(bytes_of(tensor), "values with the sorted dimension innermost"))
            copies.append(script.take(tensor.numel() * _INDEX, "indices with the sorted dimension innermost"))
    _segmented_sort(script, int(tensor.numel()), length, tensor.element_size(), card)
    script.give(*reversed(copies))


def _segmented_sort(script: Script, numel: int, length: int, key: int, card: Card) -> None:
    remaining = numel
    batch = min(numel, 2**31 - 1) // length * length
    while remaining > 0:
        items = min(remaining, batch)
        segments = items // length
        if segments == 1 or length >= 1000000:
            _sort_each(script, segments, length, key, card)
        elif segments < 128:
            _sort_all_then_by_segment(script, segments, items, key, card)
        else:
            order = script.take(items * _INDEX, "range of indices")
            script.scratch(cub.segmented_sort_bytes(items, key, _INDEX), "segmented sort").give(order)
        remaining -= items


def _sort_each(script: Script, segments: int, length: int, key: int, card: Card) -> None:
    order = script.take(length * _INDEX, "range of indices")
    size = cub.radix_sort_bytes(length, key, _INDEX, 8 * key, card)
    for _ in range(segments):
        script.scratch(size, "radix sort")
    script.give(order)


def _sort_all_then_by_segment(script: Script, segments: int, items: int, key: int, card: Card) -> None:
    """One sort of everything by value, and a stable one by segment."""
    pairs = [script.take(items * 8, "index and segment") for _ in range(2)]
    keys = script.take(items * key, "sorted keys")
    script.scratch(cub.radix_sort_bytes(items, key, 8, 8 * key, card), "radix sort").give(keys)
    bits = max(1, math.ceil(math.log2(segments)))
    script.scratch(cub.radix_sort_bytes(items, 8, 0, bits, card), "radix sort").give(*reversed(pairs))


@recorded_rule("aten.median.default", "aten.nanmedian.default")
def median_rule(call: Call) -> Script | None:
    """Everything is sorted, the order thrown away, and one value picked (``median_impl``)."""
    items, element = call.self.numel(), call.self.element_size()
    if items == 0:
        return None
    script = Script()
    values = script.take(items * element, "sorted values")
    order = script.take(items * _INDEX, "order")
    write_sort(script, torch.empty(items, dtype=call.self.dtype, device="meta"), 0, (1,), call.card)
    script.give(order)
    flag = script.take(1, "whether the last is NaN")
    return script.output(0).give(flag, values)


# --- topk -------------------------------------------------------------------------------------------------------------

#: TensorTopK.cu: threads of a block, items a thread takes, registers of a thread.
_THREADS, _LEAST_ITEMS, _MOST_ITEMS, _REGISTERS = 256, 4, 64, 40
_DIGITS = 256
#: Registers and blocks an SM holds on every card since compute capability 7.0 (CUDA C++ programming guide).
_SM_REGISTERS, _SM_BLOCKS = 65536, 32


#: Up to so many slices, many blocks work on each from this length on (``should_use_multiblock``).
_MANY_BLOCKS_FROM = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
_MANY_BLOCKS_FROM_LAST = 400


@recorded_rule("aten.topk.default")
def topk_rule(call: Call) -> Script | None:
    tensor, k = call.self, call.k
    dim = call.dim
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    dim %= tensor.dim()
    script = Script().outputs(0, 1)
    copies = script.contiguous(tensor, "contiguous input")
    length = int(tensor.shape[dim])
    slices = int(tensor.numel()) // length
    if _uses_many_blocks(slices, length):
        _radix_select(script, slices, length, tensor.element_size(), call.card)
    script.give(*copies)
    if call.sorted and call.outputs[0].numel() > 1 and k > _SMALL_SORT:
        _sort_selected(script, call.outputs[0], dim, call.card)
    return script


def _uses_many_blocks(slices: int, length: int) -> bool:
    return length >= next((least for most, least in _MANY_BLOCKS_FROM if slices <= most), _MANY_BLOCKS_FROM_LAST)


def _radix_select(script: Script, slices: int, length: int, element: int, card: Card) -> None:
    blocks_per_sm = min(_SM_REGISTERS // (_REGISTERS * _THREADS), _SM_BLOCKS)
    items = -(-slices * length // (card.sm_count * blocks_per_sm * _THREADS))
    blocks = -(-length // (max(_LEAST_ITEMS, min(items, _MOST_ITEMS)) * _THREADS))
    per_block = slices * blocks
    taken = [script.take(slices * element, "kth values"), *_take_wanted(script, slices, element, card)]
    taken.append(script.take(per_block * _DIGITS * 2, "digit counts"))
    if versions.SELECTION_SUMS_DIGITS.holds(card.torch_version):
        taken.append(script.take(slices * _DIGITS * 4, "digit sums"))
    taken.append(script.take(per_block * 4, "counts within k"))
    taken.append(script.take(per_block * 4, "counts of the kth"))
    for _ in range(2):
        script.scratch(cub.scan_by_key_bytes(per_block), "scan by key")
    script.give(*reversed(taken))


def _take_wanted(script: Script, slices: int, element: int, card: Card) -> list[int]:
    """Take the buffers of a search by digits: of each slice, the rank and the digits that are still looked for."""
    if versions.SELECTION_SUMS_DIGITS.holds(card.torch_version):
        desired = script.take(slices * 8, "semaphores and remaining ks")
        return [desired, script.take(slices * 2 * max(4, element), "desired digits")]
    semaphores = script.take(slices * 4, "semaphores")
    wide = 2 if versions.SELECTION_IN_64_BITS.holds(card.torch_version) else 1
    remaining = script.take(slices * 4 * wide, "remaining ks")
    return [semaphores, remaining, script.take(slices * wide * max(4, element), "desired digits")]


def _sort_selected(script: Script, values: torch.Tensor, dim: int, card: Card) -> None:
    indices = script.take(values.numel() * _INDEX, "sorted indices")
    ordered = script.take(bytes_of(values), "sorted values")
    write_sort(script, values, dim, values.stride(), card)
    gathered = script.take(values.numel() * _INDEX, "gathered indices")
    script.give(gathered, ordered, indices)


# --- cumulative sums --------------------------------------------------------------------------------------------------


@recorded_rule(
    "aten.cumsum.default", "aten.cumsum_.default", "aten.cumprod.default", "aten.cumprod_.default",
    "aten.logcumsumexp.default",
)  # fmt: skip
def cumulative_rule(call: Call) -> Script | None:
    """In place, a result that is not contiguous is written elsewhere first (``contiguous_out_arg``,
    ATen/native/cuda/ScanKernels.cpp)."""
    tensor, dim = call.self, call.dim
    output = call.outputs[0]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    script = Script().output(0)
    copies = script.contiguous(output, "contiguous result")
    if tensor.dtype != output.dtype:
        copies.append(script.take(tensor.numel() * output.element_size(), "cast input"))
    elif not tensor.is_contiguous():
        copies += script.contiguous(tensor, "contiguous input")
    if tensor.numel() == tensor.shape[dim]:
        script.scratch(cub.scan_bytes(int(tensor.numel()), output.element_size(), call.card), "scan")
    return script.give(*reversed(copies))
