"""Fourier transforms (``aten/src/ATen/native/cuda/SpectralOps.cpp``, 2.13), whose plans are cuFFT's.

PyTorch gives a plan its work area for the call. Its size is cuFFT's own choice; by the library's guide plans
take between one and eight times the complex elements of a batch. One is assumed here, and labelled an estimate.
The copy that a transform to real numbers makes of its input was recorded on the CUDA build.
"""

from __future__ import annotations

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule
from graphmem.labels import CUFFT


@recorded_rule("aten._fft_r2c.default", "aten._fft_c2c.default")
def to_complex_rule(call: Call) -> Script | None:
    """The result, and the work area around the call. Real numbers have half the frequencies, the rest are mirrored."""
    tensor, dims = call.self, call.dim
    if not dims or not tensor.numel():
        return None
    elements = int(tensor.numel())
    if not tensor.is_complex():
        length = int(tensor.shape[dims[-1]])
        elements = elements // length * (length // 2 + 1)
    return Script().output(0).scratch(elements * call.outputs[0].element_size(), CUFFT)


@recorded_rule("aten._fft_c2r.default")
def to_real_rule(call: Call) -> Script | None:
    """cuFFT may overwrite the input of a transform to real numbers, so it is always copied (issue 34551)."""
    tensor = call.self
    if not tensor.numel():
        return None
    script = Script().output(0)
    copied = script.take(bytes_of(tensor), "copy of the input, which cuFFT overwrites")
    return script.scratch(bytes_of(tensor), CUFFT).give(copied)
