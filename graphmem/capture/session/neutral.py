"""The modes that a caller has on, set aside while it analyses: an answer does not depend on where it is asked.

A step begins as a program of its own does, with gradients, and nobody between it and PyTorch: neither the caller's
``no_grad`` or ``inference_mode``, nor function and dispatch modes (a profiler of operators, a ``FakeTensorMode``), nor
transforms of ``torch.func``, nor the default device ``meta``, on which models are made without memory. Afterwards all
are on again, in their order.

Modes that are settings of the step stay: autocast, the default dtype, a default device that computes, hooks of saved
tensors (``save_on_cpu``), anomaly detection, deterministic algorithms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import overrides
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from graphmem.errors import CaptureError


@contextlib.contextmanager
def neutral_state() -> Iterator[None]:
    """For the duration. Raises :class:`CaptureError` where PyTorch follows the caller's own code: it would take what an
    analysis does for that code."""
    _refuse_tracing()
    with (
        temporarily_clear_interpreter_stack(),
        torch._C._EnableTorchFunction(),
        _without_function_modes(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _refuse_tracing() -> None:
    follows = (
        ("torch.fx", torch.fx._symbolic_trace._is_fx_tracing_flag),
        ("torch.jit.trace", torch._C._get_tracing_state() is not None),
        ("torch.compile", torch.compiler.is_compiling()),
        ("a backward pass", torch._C._current_graph_task_id() != -1),
    )
    for name, is_on in follows:
        if is_on:
            raise CaptureError(f"{name} is running the code that asks for this analysis; ask outside of it")


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Only default devices stay that have memory."""
    stack = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    kept = [mode for mode in stack if isinstance(mode, DeviceContext) and mode.device.type != "meta"]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    for mode in kept:
        overrides._push_mode(mode)
    if default is not None and default not in kept:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            overrides._pop_mode()
        for mode in stack:
            overrides._push_mode(mode)
        if default is not None:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = default
