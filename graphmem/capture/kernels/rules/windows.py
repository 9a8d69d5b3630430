"""Window functions, made on the card (``aten/src/ATen/native/TensorFactories.cpp``, 2.13).

A periodic window is a symmetric one of one element more, whose last element is left out of the result's view.
"""

from __future__ import annotations

from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule


@recorded_rule(
    *(f"aten.{name}_window.{kind}" for name in ("bartlett", "hann") for kind in ("default", "periodic")),
    *(f"aten.hamming_window.{kind}" for kind in ("default", "periodic", "periodic_alpha", "periodic_alpha_beta")),
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


@recorded_rule(*(f"aten.kaiser_window.{kind}" for kind in ("default", "periodic", "beta")))
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
