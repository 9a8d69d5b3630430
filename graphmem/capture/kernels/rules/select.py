"""Buffers of selections: ``nonzero``, ``unique``, ``bincount``, ``masked_scatter``, repeats.

Sources: ATen/native/cuda/Nonzero.cu, Unique.cu, UniqueCub.cu, SummaryOps.cu, IndexKernel.cpp, Repeat.h of PyTorch 2.13;
orders and tiles observed on its CUDA build (CUDA 13.0, compute capability 9.0).
"""

from __future__ import annotations

import math

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts import cub
from graphmem.capture.kernels.parts.layout import bytes_of, lies_in_order
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule

_INDEX = 8
#: Items that one block of DeviceReduce::Sum takes alone, its threads, and how many blocks are launched for each that
#: fits the card (CUB_SUBSCRIPTION_FACTOR of cub/util_arch.cuh).
_ONE_BLOCK, _BLOCK_THREADS, _SUBSCRIPTION = 4096, 256, 5


def _counts_bytes(items: int, card: Card) -> int:
    """Storage of the sum that counts elements other than zero: one partial sum a block."""
    if items <= _ONE_BLOCK:
        return 1
    return cub.storage(card.sm_count * (card.max_threads_per_sm // _BLOCK_THREADS) * _SUBSCRIPTION * 4)


@recorded_rule("aten.nonzero.default")
def nonzero_rule(call: Call) -> Script | None:
    tensor = call.self
    items = int(tensor.numel())
    if items == 0:
        return None
    script = Script()
    copies = script.contiguous(tensor, "contiguous mask")
    count = script.take(4, "number of nonzeros")
    script.scratch(_counts_bytes(items, call.card), "count")
    script.output(0)
    selected = [script.take(cub.select_bytes(items, _INDEX, call.card), "select")] if tensor.dim() else []
    return script.give(*selected, count, *copies)


@recorded_rule("aten.nonzero_static.default")
def nonzero_static_rule(call: Call) -> Script | None:
    """Counts of each block's findings, and of those before it: 512 threads with 16 items at a time, in as many rounds
    as leave a block a multiprocessor (``nonzero_static_cuda_out_impl``, Nonzero.cu)."""
    items = int(call.self.numel())
    if items == 0 or call.size == 0:
        return None
    tiles = -(-items // (512 * 16))
    blocks = -(-tiles // -(-tiles // call.card.sm_count))
    script = Script().output(0)
    found = script.take(blocks * 4, "found by each block")
    before = script.take(blocks * _INDEX, "found before each block")
    return script.give(before, found)


@recorded_rule("aten._unique.default", "aten._unique2.default")
def unique_rule(call: Call) -> Script | None:
    """Sorted, then the first of every run. The result keeps the bytes of the whole input."""
    tensor = call.self
    items, element = int(tensor.numel()), tensor.element_size()
    if items == 0 or tensor.dtype is torch.bool:
        return None
    script = Script()
    held = [script.take(items * element, "sorted values")]
    inverse = call.return_inverse
    if inverse:
        held.append(script.take(items * _INDEX, "sorted indices"))
        order = script.take(items * _INDEX, "range of indices")
    value = _INDEX if inverse else 0
    floating = tensor.is_floating_point()
    size = cub.radix_sort_bytes(items, element, value, 8 * element, call.card, floating)
    script.scratch(size, "radix sort")
    if inverse:
        script.give(order)
        starts = script.take(items * _INDEX, "where runs start")
        script.output(1).scratch(cub.run_numbers_bytes(items, call.card), "scan").give(starts)
    _first_of_runs(script, tensor, call.get("return_counts", False), call.card)
    return script.give(*reversed(held))


@recorded_rule("aten.unique_consecutive.default")
def unique_consecutive_rule(call: Call) -> Script | None:
    tensor = call.self
    if tensor.numel() == 0:
        return None
    if call.dim is not None:
        return unique_slices_rule(call)
    script = Script()
    if call.outputs[1].numel():
        script.output(1)
        starts = script.take(int(tensor.numel()) * 4, "where runs start")
        script.give(script.take(cub.run_numbers_bytes(int(tensor.numel()), call.card), "scan"), starts)
    _first_of_runs(script, tensor, call.return_counts, call.card)
    return script


@recorded_rule("aten.unique_dim.default", "aten.unique_dim_consecutive.default")
def unique_slices_rule(call: Call) -> Script | None:
    """Slices are rows of a contiguous copy; their positions are sorted (``unique_dim_cuda_template``, Unique.cu)."""
    if not call.self.numel():
        return None
    tensor, dim = call.self, call.dim % call.self.dim()
    count = int(tensor.shape[dim])
    script = Script()
    rows = tensor.movedim(dim, 0)
    held = [] if lies_in_order(rows.shape, rows.stride()) else [script.take(bytes_of(tensor), "slices as rows")]
    held.append(script.take(count * _INDEX, "positions of slices"))
    if call.operator == "aten.unique_dim.default":
        script.scratch(cub.sorted_positions_bytes(count, call.card), "sort")
    if call.return_inverse:
        script.output(1)
        numbers = script.take(count * _INDEX, "numbers of runs")
        script.scratch(cub.DIFFERENCE_BYTES, "where runs start")
        script.give(script.take(cub.position_sums_bytes(count, call.card), "scan"), numbers)
    if call.return_counts:
        ends = script.take((count + 1) * _INDEX, "where runs end")
        script.scratch(cub.counted_positions_bytes(count, call.card), "unique")
        if call.outputs[2].numel():
            script.output(2).give(script.take(cub.DIFFERENCE_BYTES, "lengths of runs"))
        script.give(ends)
    else:
        script.scratch(cub.unique_positions_bytes(count, call.card), "unique")
    script.output(0).give(*reversed(held))
    return script


def _first_of_runs(script: Script, tensor: torch.Tensor, counts: bool, card: Card) -> None:
    items, element = int(tensor.numel()), tensor.element_size()
    script.output(0, items * element)
    length = script.take(8, "number of runs")
    if counts:
        script.output(2, items * _INDEX)
    half = tensor.is_floating_point() and element == 2
    size = cub.run_lengths_bytes(items) if counts else cub.select_bytes(items, element, card, half)
    script.give(script.take(size, "unique"), length)


def _take_bounds(script: Script, call: Call) -> list[int]:
    """``aminmax`` of the values; older versions read back the smallest before they looked for the largest."""
    scalar = torch.empty((), dtype=call.self.dtype, device="meta")
    if not versions.BOUNDS_IN_ONE_PASS.holds(call.card.torch_version):
        for operator, label in (("aten.min", "smallest"), ("aten.max", "largest")):
            script.give(*script.call(operator, call.self, card=call.card, outputs=[scalar], births=[label]))
        return []
    outputs = [scalar, scalar]
    return script.call("aten.aminmax", call.self, card=call.card, outputs=outputs, births=["smallest", "largest"])


@recorded_rule("aten.histc.default")
def histc_rule(call: Call) -> Script | None:
    """Without limits, the smallest and the largest value are looked up."""
    if call.min != call.max or not call.self.numel():
        return None
    script = Script().output(0)
    return script.give(*_take_bounds(script, call))


@recorded_rule("aten.bincount.default")
def bincount_rule(call: Call) -> Script | None:
    """The smallest and the largest value are looked at first, with the buffers of such a reduction. Weights that are
    neither single nor double are made double before."""
    if not call.self.numel():
        return None
    script = Script()
    weights = call.weights
    converted = []
    if weights is not None and weights.dtype not in (torch.float32, torch.float64):
        converted.append(script.take(weights.numel() * 8, "weights in double precision"))
    bounds = _take_bounds(script, call)
    script.output(0)
    return script.give(*bounds, *converted)


@recorded_rule("aten.masked_scatter.default", "aten.masked_scatter_.default")
def masked_scatter_rule(call: Call) -> Script | None:
    """The running sum of the mask gives which element of the source goes where."""
    items = int(call.outputs[0].numel())
    if items == 0:
        return None
    script = Script().output(0)
    held = [script.take(items * _INDEX, "running sum of the mask")]
    if call.mask.numel() != items or not call.mask.is_contiguous():
        held.append(script.take(items, "contiguous mask"))
    _scan(script, items, call.card)
    return script.give(*reversed(held))


#: Items that one call of CUB scans: ``max_cub_size`` of ATen/cuda/cub.cuh.
_SCANNED_AT_ONCE = 2**30


def _scan(script: Script, items: int, card: Card) -> None:
    """``exclusive_scan`` of ATen/cuda/cub.cuh: long ones in parts, each from the sum of those before."""
    script.scratch(cub.scan_bytes(min(items, _SCANNED_AT_ONCE), _INDEX, card), "scan")
    for start in range(_SCANNED_AT_ONCE, items, _SCANNED_AT_ONCE):
        first = script.take(_INDEX, "sum of the parts before")
        part = min(items - start, _SCANNED_AT_ONCE)
        script.give(script.take(cub.scan_bytes(part, _INDEX, card), "scan"), first)


@recorded_rule("aten.repeat_interleave.Tensor")
def repeat_rule(call: Call) -> Script | None:
    """The running sum of the repeats gives where each begins; where it gives how many there are, none may be negative
    (``native/Repeat.cpp``)."""
    items = int(call.repeats.numel())
    if items == 0:
        return None
    script = Script()
    sums = script.take(items * _INDEX, "running sum of the repeats")
    wide = [] if call.repeats.dtype is torch.int64 else [script.take(items * _INDEX, "64-bit repeats")]
    script.give(script.take(cub.scan_bytes(items, _INDEX, call.card), "scan"), *wide)
    if call.output_size is None and versions.REPEATS_BY_SMALLEST.holds(call.card.torch_version):
        found = torch.empty((), dtype=call.repeats.dtype, device="meta")
        script.give(*script.call("aten.min", call.repeats, card=call.card, outputs=[found], births=["smallest repeat"]))
    elif call.output_size is None:
        compared = torch.empty(items, dtype=torch.bool, device="meta")
        held = script.take(items, "repeats that are not negative")
        found = compared.new_empty(())
        whether = script.call("aten.all", compared, card=call.card, outputs=[found], births=["whether all are"])
        script.give(*whether, held)
    script.output(0).give(sums)
    return script


@recorded_rule(
    "aten.index_reduce.default", "aten.index_reduce_.default", "aten.scatter_reduce.two", "aten.scatter_reduce_.two"
)
def reduce_by_index_rule(call: Call) -> Script | None:
    """A mean divides by counts, which a sum of ones gives (ATen/native/TensorAdvancedIndexing.cpp)."""
    if call.reduce != "mean":
        return None
    scatters = call.operator.startswith("aten.scatter")
    ones, counts = bytes_of(call.get("src" if scatters else "source")), bytes_of(call.self)
    script = Script().output(0)
    if scatters:
        held = [script.take(ones, "ones"), script.take(counts, "counts")]
    else:
        held = [script.take(counts, "counts")]
        script.scratch(ones, "ones")
    return script.scratch(call.self.numel(), "counts below one").give(*reversed(held))


@recorded_rule("aten.segment_reduce.default", "aten._segment_reduce_backward.default")
def segment_reduce_rule(call: Call) -> Script:
    """Lengths are summed up to offsets, offsets differenced to lengths (ATen/native/cuda/SegmentReduce.cu)."""
    lengths, offsets, script = call.lengths, call.offsets, Script()
    copies = script.contiguous(call.data, "contiguous values")
    if lengths is not None:
        copies += script.contiguous(lengths, "contiguous lengths")
        script.output(0)
        first = script.take(math.prod(lengths.shape[:-1]) * _INDEX, "zeros")
        sums = torch.empty((*lengths.shape[:-1], lengths.shape[-1] + 1), dtype=lengths.dtype, device="meta")
        held = script.take(bytes_of(sums), "offsets of segments")
        script.give(first)
        script.call("aten.cumsum", sums, -1, card=call.card, outputs=[sums], births=[None])
        script.give(held)
    elif offsets is not None:
        lengths_bytes = (offsets.numel() - math.prod(offsets.shape[:-1])) * offsets.element_size()
        script.output(0).scratch(lengths_bytes, "lengths of segments")
    return script.give(*copies)
