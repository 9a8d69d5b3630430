"""Decompositions of vLLM's products with packed weights, Marlin's and Machete's, whose library gives their outputs'
shapes alone: their kernels also take sums (:mod:`graphmem.base.packed_products`)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, uint8

from graphmem.base.packed_products import machete_bytes, marlin_bytes, marlin_experts_bytes
from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.values.assumed_values import Selection


def _processors(tensor: Tensor) -> int:
    count: int = torch.cuda.get_device_properties(tensor.device).multi_processor_count
    return count


def _marlin(_: Selection, call: Arguments) -> Tensor:
    a, out = call.a, call.get("c_or_none")
    if out is None:
        is_half = a.dtype in (torch.half, torch.bfloat16)
        out = a.new_empty((call.size_m, call.size_n), dtype=a.dtype if is_half else call.b_scales.dtype)
    if call.get("use_fp32_reduce"):
        a.new_empty(marlin_bytes(_processors(a), call.size_m), dtype=uint8)
    return cast("Tensor", out)


@named("_moe_C.moe_wna16_marlin_gemm.default")
def _marlin_experts(_: Selection, call: Arguments) -> Tensor:
    a, out = call.a, call.get("c_or_none")
    if out is None:
        out = a.new_empty((call.size_m * call.top_k, call.size_n))
    if call.get("use_fp32_reduce") and not call.get("use_atomic_add"):
        rows, tile = call.sorted_token_ids.shape[0], call.moe_block_size
        a.new_empty(marlin_experts_bytes(_processors(a), call.size_n, tile, rows), dtype=uint8)
    return cast("Tensor", out)


@named("_C.machete_mm.default")
def _machete(_: Selection, call: Arguments) -> Tensor:
    (tokens, inputs), columns = call.A.shape, call.B.shape[1]
    out: Tensor = call.A.new_empty((tokens, columns), dtype=call.out_type or call.A.dtype)
    if sums := machete_bytes(_processors(call.A), tokens, inputs, columns):
        call.A.new_empty(sums, dtype=uint8)
    return out


#: Operator by full name -> its decomposition. The library is not loaded by this, so there are no objects to name.
DECOMPOSITIONS: dict[str, Decomposition] = {
    "_C.marlin_gemm.default": named("_C.marlin_gemm.default")(_marlin),
    "_C.gptq_marlin_gemm.default": named("_C.gptq_marlin_gemm.default")(_marlin),  # as it was called before
    "_moe_C.moe_wna16_marlin_gemm.default": _marlin_experts,
    "_C.machete_mm.default": _machete,
}
