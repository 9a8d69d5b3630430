"""Operators that are more than one kernel. Orders observed on the CUDA build of PyTorch 2.13."""

from __future__ import annotations

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, rule


@rule("aten.abs.default", "aten.angle.default")
def complex_to_real_rule(call: Call) -> Script | None:
    """Of complex numbers: computed as complex, then copied (ATen/native/UnaryOps.cpp)."""
    if not call.self.is_complex():
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(call.self), "complex result"))
    return script


@rule("aten._efficientzerotensor.default")
def zero_tensor_rule(call: Call) -> Script:
    """A tensor of zeros without memory: the gradient of ``sgn`` (``sgn_backward``, FunctionsManual.cpp)."""
    return Script().output(0, 0)


@rule("aten.where.self")
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
    script.output(0)
    script.give(*reversed(tokens))
    return script


@rule("aten.unfold_backward.default")
def unfold_backward_rule(call: Call) -> Script | None:
    """Positions along the unfolded dimension (ATen/native/UnfoldBackward.h); slices that do not overlap are copied.
    Positions behind the last slice do not count."""
    sizes, dim = call.input_sizes, call.dim
    if not sizes or call.step >= call.size:
        return None
    script = Script().output(0)
    slices = (int(sizes[dim]) - call.size) // call.step + 1
    script.give(script.take(8 * ((slices - 1) * call.step + call.size), "positions"))
    return script


@rule("aten.soft_margin_loss_backward.default")
def soft_margin_backward_rule(call: Call) -> Script | None:
    """exp(-target * input) from two full-size tensors, then its sum with one (ATen/native/Loss.cpp)."""
    size = bytes_of(call.self)
    script = Script().output(0)
    product = script.take(size, "target times input")
    exponential = script.take(size, "exponential")
    script.give(product, exponential)
    script.give(script.take(size, "gradient of the sum"))
    return script


@rule("aten.rrelu_with_noise.default")
def rrelu_rule(call: Call) -> Script | None:
    """In training the kernel takes contiguous values (``_rrelu_with_noise_cuda_train``, RreluWithNoise.cu)."""
    if not call.training or call.self.is_contiguous():
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(call.self), "contiguous input"))
    return script
