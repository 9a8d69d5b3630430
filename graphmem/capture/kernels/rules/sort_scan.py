"""Buffers of sort, topk and cumulative sums.

Sources: ``aten/src/ATen/native/cuda/Sort.cpp``, ``SortStable.cu``, ``TensorTopK.cu`` and ``ScanKernels.cpp`` of PyTorch
2.13; orders observed on the real 2.13.0 CUDA build.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts import cub
from graphmem.capture.kernels.parts.layout import bytes_of, contiguous_strides, is_dense
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule

_INDEX = 8
#: Longer slices are sorted by CUB (should_use_small_sort of ATen/native/cuda/Sort.h).
_SMALL_SORT = 4096


# --- sort -------------------------------------------------------------------------------------------------------------


@rule("aten.sort.default", "aten.sort.stable")
def sort_rule(call: Call) -> Script | None:
    tensor = call.self
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    script = Script().output(0).output(1)
    write_sort(script, tensor, call.dim % tensor.dim(), call.outputs[0].stride(), call.card)
    return script


def write_sort(script: Script, tensor: torch.Tensor, dim: int, stride: Sequence[int], card: Card) -> None:
    """The buffers of sorting ``tensor`` into values and indices of the given strides."""
    length = int(tensor.shape[dim])
    if length <= _SMALL_SORT:
        script.give(script.take(length * _INDEX, "range of indices"))
        return
    copies = []
    if not (tensor.stride(dim) == 1 and is_dense(tensor)):
        copies.append(script.take(bytes_of(tensor), "input with the sorted dimension innermost"))
        if tuple(stride) != contiguous_strides(tensor.shape, _with_last(tensor.dim(), dim)):
            copies.append(script.take(bytes_of(tensor), "values with the sorted dimension innermost"))
            copies.append(script.take(tensor.numel() * _INDEX, "indices with the sorted dimension innermost"))
    _segmented_sort(script, int(tensor.numel()), length, tensor.element_size(), card)
    script.give(*reversed(copies))


def _with_last(dims: int, last: int) -> list[int]:
    """The order of dimensions in which ``last`` is the innermost."""
    return [*(dim for dim in range(dims) if dim != last), last]


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
            script.give(script.take(cub.segmented_sort_bytes(items, key, _INDEX), "segmented sort"), order)
        remaining -= items


def _sort_each(script: Script, segments: int, length: int, key: int, card: Card) -> None:
    order = script.take(length * _INDEX, "range of indices")
    size = cub.radix_sort_bytes(length, key, _INDEX, 8 * key, card)
    for _ in range(segments):
        script.give(script.take(size, "radix sort"))
    script.give(order)


def _sort_all_then_by_segment(script: Script, segments: int, items: int, key: int, card: Card) -> None:
    """One sort of everything by value, and a stable one by segment."""
    pairs = [script.take(items * 8, "index and segment") for _ in range(2)]
    keys = script.take(items * key, "sorted keys")
    script.give(script.take(cub.radix_sort_bytes(items, key, 8, 8 * key, card), "radix sort"), keys)
    bits = max(1, math.ceil(math.log2(segments)))
    script.give(script.take(cub.radix_sort_bytes(items, 8, 0, bits, card), "radix sort"))
    script.give(*reversed(pairs))


# --- topk -------------------------------------------------------------------------------------------------------------

#: TensorTopK.cu: threads of a block, items a thread takes, registers of a thread.
_THREADS, _LEAST_ITEMS, _MOST_ITEMS, _REGISTERS = 256, 4, 64, 40
_DIGITS = 256
#: Registers and blocks an SM holds on every card since compute capability 7.0 (CUDA C++ programming guide).
_SM_REGISTERS, _SM_BLOCKS = 65536, 32


@rule("aten.topk.default")
def topk_rule(call: Call) -> Script | None:
    tensor, k = call.self, call.k
    dim = call.dim
    if tensor.dim() == 0 or tensor.numel() == 0:
        return None
    dim %= tensor.dim()
    script = Script().output(0).output(1)
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
    return (
        (slices <= 20 and length >= 20000)
        or (20 < slices <= 40 and length >= 10000)
        or (40 < slices <= 80 and length >= 8000)
        or (80 < slices < 200 and length >= 5000)
        or (200 <= slices < 800 and length >= 3000)
        or (800 <= slices <= 4000 and length >= 800)
        or (slices > 4000 and length >= 400)
    )


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
        script.give(script.take(cub.scan_by_key_bytes(per_block), "scan by key"))
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


@rule(
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
        script.give(script.take(cub.scan_bytes(int(tensor.numel()), output.element_size(), call.card), "scan"))
    script.give(*reversed(copies))
    return script
