"""Multi-tensor kernels (``aten/src/ATen/native/cuda/ForeachReduceOp.cu``, PyTorch 2.4 to 2.13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.script import Card, Script, rule

#: ``kChunkSize``: elements that one block reduces (``ATen/native/cuda/MultiTensorApply.cuh``).
CHUNK_ELEMENTS = 65536


@rule("aten._foreach_norm.Scalar", "aten._foreach_max.default")
def foreach_reduction(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """One partial result a chunk and tensor, zero-filled, before the scalars are allocated; freed at the end."""
    del kwargs, card
    tensors = args[0]
    if not tensors:
        return None
    chunks = max(-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in tensors)
    accumulate = 8 if tensors[0].dtype is torch.float64 else 4
    script = Script()
    partial = script.take(len(tensors) * chunks * accumulate, "partial norms")
    for index in range(len(outputs)):
        script.output(index)
    script.give(partial)
    return script
