"""Softmax kernels with more inside than their one output."""

from __future__ import annotations

from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule("aten._safe_softmax.default")
def safe_softmax(call: Call) -> Script:
    """The softmax, a boolean tensor of -inf positions, its row-wise ``all``, and the zero that such rows are filled
    with (``_safe_softmax`` in ATen/native/transformers/attention.cpp; order seen in the recorded runs of 2.13)."""
    scores, dim = call.self, call.dim
    script = Script().output(0)
    script.give(*script.contiguous(scores, "contiguous scores"))
    masked = script.take(scores.numel(), "-inf positions")
    rows = script.take(scores.numel() // max(1, scores.shape[dim]), "rows of -inf")
    zero = script.take(call.outputs[0].element_size(), "zero")
    script.give(zero, rows, masked)
    return script
