"""Medians. Source: ``median_impl`` of ATen/native/cuda/Sorting.cpp, PyTorch 2.13; order observed on its CUDA build."""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.script import Call, Script, rule
from graphmem.capture.kernels.rules.sort_scan import write_sort


@rule("aten.median.default", "aten.nanmedian.default")
def median_rule(call: Call) -> Script | None:
    """Everything is sorted, the order thrown away, and one value picked."""
    items, element = call.self.numel(), call.self.element_size()
    if items == 0:
        return None
    flat = torch.empty(items, dtype=call.self.dtype, device="meta")
    script = Script()
    values = script.take(items * element, "sorted values")
    order = script.take(items * 8, "order")
    write_sort(script, flat, 0, (1,), call.card)
    script.give(order)
    flag = script.take(1, "whether the last is NaN")
    script.output(0)
    script.give(flag, values)
    return script
