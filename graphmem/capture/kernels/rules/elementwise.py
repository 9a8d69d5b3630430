"""Operators that are more than one kernel. Orders observed on the CUDA build of PyTorch 2.13."""

from __future__ import annotations

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


@recorded_rule("aten.abs.default", "aten.angle.default")
def complex_to_real_rule(call: Call) -> Script | None:
    """Of complex numbers: computed as complex, then copied (ATen/native/UnaryOps.cpp)."""
    return Script().output(0).scratch(bytes_of(call.self), "complex result") if call.self.is_complex() else None


@recorded_rule("aten._efficientzerotensor.default")
def zero_tensor_rule(call: Call) -> Script:
    """A tensor of zeros without memory: the gradient of ``sgn`` (``sgn_backward``, FunctionsManual.cpp)."""
    return Script().output(0, 0)


@recorded_rule("aten.where.self")
def where_rule(call: Call) -> Script | None:
    """Values of another type than the result's are converted first (``where_self_out``,
    ATen/native/TensorCompare.cpp)."""
    values = (value for value in (call.self, call.other) if value.is_cuda and value.numel() > 0)
    converted = [value for value in values if value.dtype is not call.dtype]
    if not converted:
        return None
    script = Script()
    size = call.outputs[0].element_size()
    tokens = [script.take(value.numel() * size, "values in the result's type") for value in converted]
    return script.output(0).give(*reversed(tokens))


@recorded_rule("aten.unfold_backward.default")
def unfold_backward_rule(call: Call) -> Script | None:
    """Positions along the unfolded dimension (ATen/native/UnfoldBackward.h); slices that do not overlap are copied.
    Positions behind the last slice do not count."""
    sizes, dim = call.input_sizes, call.dim
    if not sizes or call.step >= call.size:
        return None
    slices = (int(sizes[dim]) - call.size) // call.step + 1
    return Script().output(0).scratch(8 * ((slices - 1) * call.step + call.size), "positions")


@recorded_rule("aten._padded_dense_to_jagged_forward.default")
def padded_to_jagged_rule(call: Call) -> Script:
    """``_fbgemm_dense_to_jagged_forward_symint`` (ATen/native/nested/cuda/NestedTensorTransformerFunctions.cu) makes
    values that its kernel reads beside the padded tensor, and the output like them."""
    script = Script()
    values = script.take(bytes_of(call.outputs[0]), "values beside the padded tensor")
    return script.output(0).give(values)
