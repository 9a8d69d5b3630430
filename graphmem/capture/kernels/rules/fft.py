"""Fourier transforms (``aten/src/ATen/native/cuda/SpectralOps.cpp``, 2.13), whose plans are cuFFT's, and windows.

PyTorch gives a plan its work area for the call. Its size is cuFFT's own choice; by the library's guide plans
take between one and eight times the complex elements of a batch. One is assumed here, and labelled an estimate.
The copy that a transform to real numbers makes of its input was recorded on the CUDA build.

A periodic window is a symmetric one of one element more, whose last element is left out of the result's view
(``aten/src/ATen/native/TensorFactories.cpp``, 2.13).
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


@recorded_rule(
    "aten.bartlett_window.default",
    "aten.bartlett_window.periodic",
    "aten.hann_window.default",
    "aten.hann_window.periodic",
    "aten.hamming_window.default",
    "aten.hamming_window.periodic",
    "aten.hamming_window.periodic_alpha",
    "aten.hamming_window.periodic_alpha_beta",
)
def window_rule(call: Call) -> Script:
    """Numbers from 0 on, made into the window in place."""
    return Script().output(0, _window_bytes(call))


@recorded_rule("aten.blackman_window.default", "aten.blackman_window.periodic")
def blackman_rule(call: Call) -> Script:
    """The angles, two terms of cosines, their difference, and that with the constant."""
    size = _window_bytes(call)
    if call.window_length <= 1:
        return Script().output(0, size)
    script = Script()
    taken = [script.take(size, name) for name in ("angles", "cosines of 4", "cosines of 2", "difference")]
    return script.output(0, size).give(*taken)


@recorded_rule("aten.kaiser_window.default", "aten.kaiser_window.periodic", "aten.kaiser_window.beta")
def kaiser_rule(call: Call) -> Script:
    """Numbers from 0 on, and the window."""
    size = _window_bytes(call)
    if call.window_length <= 1:
        return Script().output(0, size)
    script = Script()
    numbers = script.take(size, "numbers from 0 on")
    return script.output(0, size).give(numbers)


def _window_bytes(call: Call) -> int:
    """Bytes of the symmetric window."""
    length = int(call.window_length)
    more = 1 if length > 1 and call.get("periodic", True) else 0
    return int((length + more) * call.dtype.itemsize)
