"""Medians. Source: ``median_impl`` of ATen/native/cuda/Sorting.cpp, PyTorch 2.13; order observed on its CUDA build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.script import Card, Script, rule
from graphmem.capture.kernels.rules.sort_scan import write_sort


@rule("aten.median.default", "aten.nanmedian.default")
def median_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """Everything is sorted, the order thrown away, and one value picked."""
    items, element = args[0].numel(), args[0].element_size()
    if items == 0:
        return None
    flat = torch.empty(items, dtype=args[0].dtype, device="meta")
    script = Script()
    values = script.take(items * element, "sorted values")
    order = script.take(items * 8, "order")
    write_sort(script, flat, 0, (1,), card)
    script.give(order)
    flag = script.take(1, "whether the last is NaN")
    script.output(0)
    script.give(flag, values)
    return script
