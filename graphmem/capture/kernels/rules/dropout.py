"""Dropout's fused kernel."""

from __future__ import annotations

from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule("aten.native_dropout.default")
def native_dropout(call: Call) -> Script:
    """The mask (one byte an element) is allocated before the output (``dropout_cuda`` in ATen/native/cuda/Dropout.cu;
    order seen in the recorded runs of 2.13)."""
    return Script().output(1).output(0)
