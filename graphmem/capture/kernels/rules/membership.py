"""Which values occur, and which most often: ``isin``, ``mode``.

Sources: ATen/native/TensorCompare.cpp (``isin_Tensor_Tensor_out``, ``isin_default_kernel_gpu``),
ATen/native/cuda/TensorModeKernel.cpp of PyTorch 2.13.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule("aten.isin.Tensor_Tensor")
def isin_rule(call: Call) -> Script | None:
    """Few values are compared with every element at once; many are sorted together, which is not modelled."""
    elements, values = call.elements, call.test_elements
    if not elements.numel() or not values.numel() or values.numel() >= 10.0 * elements.numel() ** 0.145:
        return None
    shape = (*elements.shape, *[1] * values.dim())
    same = torch.empty(torch.broadcast_shapes(shape, values.shape), dtype=torch.bool, device="meta")
    script = Script().output(0)
    held = script.take(same.numel(), "every element beside every value")
    dims = list(range(elements.dim(), same.dim()))
    found = script.call("aten.any.dims", same, dims, False, card=call.card, outputs=[call.outputs[0]], births=["found"])
    script.give(*found, held)
    return script


@rule("aten.mode.default")
def mode_rule(call: Call) -> Script | None:
    """Another dimension than the last is brought to the end. Slices of more than 1,024 elements are sorted one by one,
    which is not modelled."""
    if not call.self.dim() or call.self.shape[call.dim] <= 1:
        return None
    moved = call.self.transpose(call.dim, -1)
    script = Script().output(0).output(1)
    script.give(*script.contiguous(moved, "contiguous copy with the dimension last"))
    return script
