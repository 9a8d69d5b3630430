"""bitsandbytes' own CUDA backend in place of its fake kernels, so that every buffer that it takes is recorded.

Its kernels are Python that makes tensors with PyTorch and hands their addresses to a C library
(``bitsandbytes/backends/cuda/ops.py`` and ``backends/default/ops.py``, 0.50): 4-bit and 8-bit quantisation, the choice
between a fused product and dequantised weights (by card and shape), scratch for nested statistics. A private copy of
these two files runs here, with a C library whose functions do nothing. Updates of optimizers allocate nothing and keep
their fake kernels.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from graphmem.capture.operators import Decomposition
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import OpOverload, disable_current_modes
from graphmem.capture.values import device_values
from graphmem.capture.values.assumed_values import Selection
from graphmem.diagnostics import Code
from graphmem.torch_names import private

_PACKAGE, _OPERATORS = "bitsandbytes", "bitsandbytes._ops"
#: Files whose kernels a CUDA tensor reaches, the later ones before the earlier ones.
_BACKENDS = ("bitsandbytes.backends.default.ops", "bitsandbytes.backends.cuda.ops")
#: They write into tensors that are there.
_UPDATES = ("bitsandbytes::optimizer_update_",)
#: What LLM.int8() does with activations beyond its threshold depends on them.
NO_OUTLIERS = Code.NO_OUTLIERS.about()


class _Backend:
    """The private copies: their kernels by qualified operator name."""

    def __init__(self) -> None:
        self.kernels: dict[str, Decomposition] = {}
        self.modules: list[ModuleType] = []

    def load(self) -> None:
        """Run the package's backends once more, once it is imported, and note the kernels that they register.
        PyTorch and bitsandbytes are patched meanwhile."""
        if self.kernels or _OPERATORS not in sys.modules:
            return
        patches = Patches()
        try:
            patches.set(sys.modules[_OPERATORS], "register_kernel", self._register)
            patches.set(sys.modules["bitsandbytes.cextension"], "lib", _NoLibrary())
            patches.set(torch, "compile", lambda function=None, **_: function or (lambda given: given))
            with disable_current_modes():
                for name in _BACKENDS:
                    self.modules.append(_run_again(name))
        finally:
            patches.undo()
        self.kernels["bitsandbytes::int8_vectorwise_dequant"] = _int8_vectorwise_dequant

    def _register(self, name: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def note(kernel: Callable[..., object]) -> Callable[..., Any]:
            if device in ("cuda", "default") and not name.startswith(_UPDATES):
                self.kernels[name] = kernel
            return kernel

        return note

    def forget_card(self) -> None:
        """Forget the card's properties that the copies keep, and the choices made by them."""
        for module in self.modules:
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class _NoLibrary:
    """The C library: every function is there, does nothing, and reports no error."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: 0


class _NoContext:
    """``bitsandbytes.functional.CUBLAS_Context``: cuBLAS's handle, which is made outside PyTorch's allocator."""

    @classmethod
    def get_instance(cls) -> _NoContext:
        return cls()

    def get_context(self, _: object) -> int:
        return 0


_backend = _Backend()


def follow_bitsandbytes() -> None:
    """Load the backend once the package is imported; at the start of a capture, forget the last one's card."""
    _backend.load()
    _backend.forget_card()


def decomposition_of(func: OpOverload) -> Callable[..., Any] | None:
    """The decomposition of an operator of bitsandbytes, instead of its fake kernel; None for any other operator."""
    if func.namespace != _PACKAGE:
        return None
    kernel = _backend.kernels.get(func._schema.name + (f".{func._overloadname}" * (func._overloadname != "default")))
    return None if kernel is None else partial(_run, kernel)


def is_update(func: OpOverload) -> bool:
    """True if it is one of bitsandbytes' updates of parameters, which take nothing (the recorded optimizers)."""
    return bool(func._schema.name.startswith(_UPDATES))


def _run(kernel: Callable[..., object], _: Selection, *args: object, **kwargs: object) -> Any:
    """Its operators have no kernel of autocast, which therefore still casts the operators that the kernel calls:
    ``linear`` of dequantised weights (recorded under ``autocast("cuda", torch.float16)``)."""
    with device_values.answering(False, NO_OUTLIERS), _as_outside():
        return kernel(*args, **kwargs)


def _as_outside() -> Any:
    """Autocast as it was when PyTorch began to dispatch to Python: there its key is excluded, with all before it."""
    lost = "bitsandbytes under autocast is not cast once more"
    outside = private("torch._C._RestorePythonTLSSnapshot", lost, contextlib.nullcontext)
    with outside():
        is_on = torch.is_autocast_enabled("cuda")
    if not is_on:
        return contextlib.nullcontext()
    key = private("torch._C.DispatchKey.AutocastCUDA", lost, None)
    guard = private("torch._C._SetExcludeDispatchKeyGuard", lost, lambda *_: contextlib.nullcontext())
    return guard(key, False)


def _int8_vectorwise_dequant(quantized: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """The kernel of that name in ``bitsandbytes/_ops.py``: two products, one after the other."""
    return quantized * stats.view(-1, 1) * (1 / 127)


def _run_again(name: str) -> ModuleType:
    """Run the file of an imported module once more, as a module of its own that ``sys.modules`` does not know, with a
    cuBLAS context and streams that ask no card."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in (("CUBLAS_Context", _NoContext), ("_get_raw_stream", lambda *_: 0)):
        if hasattr(module, name):
            vars(module)[name] = value
    return module
