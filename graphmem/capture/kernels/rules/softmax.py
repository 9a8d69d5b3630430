"""Softmax kernels with more inside than their one output."""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Script:
    """The softmax, a boolean tensor of -inf positions, its row-wise ``all``, and the zero that such rows are filled
    with (``_safe_softmax`` in ATen/native/transformers/attention.cpp; order seen in the recorded runs of 2.13)."""
    scores, dim = call.self, call.dim
    script = Script().output(0)
    script.give(*script.contiguous(scores, "contiguous scores"))
    masked = script.take(scores.numel(), "-inf positions")
    shape = list(scores.shape)
    shape[dim] = 1
    mask = torch.empty(scores.shape, dtype=torch.bool, device="meta")
    outputs = [torch.empty(shape, dtype=torch.bool, device="meta")]
    (rows,) = script.call("aten.all.dim", mask, dim, True, card=call.card, outputs=outputs, births=["rows of -inf"])
    zero = script.take(call.outputs[0].element_size(), "zero")
    script.give(zero, rows, masked)
    return script
