"""Sets aside the modes of PyTorch that the caller has on, so that an answer does not depend on where it is asked.

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
from typing import Any

import torch

from graphmem.capture.torch_internals import (
    DeviceContext,
    current_graph_task_id,
    default_context,
    disable_current_modes,
    pop_function_mode,
    push_function_mode,
)
from graphmem.errors import CaptureError
from graphmem.torch_names import private

_LOST = "what the caller has on while it asks is part of the analysis"
_without_transforms: Any = private(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _LOST, contextlib.nullcontext
)
_with_torch_function: Any = private("torch._C._EnableTorchFunction", _LOST, contextlib.nullcontext)
_tracing: Any = private("torch._C._get_tracing_state", "torch.jit.trace is not noticed", lambda: None)
_function_modes_on: Any = private("torch._C._len_torch_function_stack", _LOST, lambda: 0)


@contextlib.contextmanager
def neutral_state() -> Iterator[None]:
    """For the duration. Raises :class:`CaptureError` where PyTorch follows the caller's own code: it would take an
    analysis's work for that code."""
    _refuse_tracing()
    with (
        _without_transforms(),
        _with_torch_function(),
        _without_function_modes(),
        disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _refuse_tracing() -> None:
    follows = (
        ("torch.fx", private("torch.fx._symbolic_trace._is_fx_tracing_flag", "torch.fx is not noticed", False)),
        ("torch.jit.trace", _tracing() is not None),
        ("torch.compile", torch.compiler.is_compiling()),
        ("a backward pass", current_graph_task_id() != -1),
    )
    for name, is_on in follows:
        if is_on:
            raise CaptureError(f"{name} is running the code that asks for this analysis; ask outside of it")


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Only default devices stay that have memory."""
    stack = [pop_function_mode() for _ in range(_function_modes_on())][::-1]
    kept = [mode for mode in stack if isinstance(mode, DeviceContext) and mode.device.type != "meta"]
    default = getattr(default_context, "device_context", None)
    for mode in kept:
        push_function_mode(mode)
    if default is not None and default not in kept:
        default_context.device_context = None
    try:
        yield
    finally:
        while _function_modes_on():
            pop_function_mode()
        for mode in stack:
            push_function_mode(mode)
        if default is not None:
            default_context.device_context = default
