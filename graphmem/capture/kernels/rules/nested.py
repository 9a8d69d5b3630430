"""Buffers of nested tensors of jagged layout (``ATen/native/nested/cuda/NestedTensorTransformerFunctions.cu``)."""

from __future__ import annotations

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


@recorded_rule("aten._padded_dense_to_jagged_forward.default")
def padded_to_jagged_rule(call: Call) -> Script:
    """``_fbgemm_dense_to_jagged_forward_symint`` makes values that its kernel reads beside the padded tensor, and the
    output like them."""
    script = Script()
    values = script.take(bytes_of(call.outputs[0]), "values beside the padded tensor")
    return script.output(0).give(values)
