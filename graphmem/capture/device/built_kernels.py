"""Kernels that libraries build when they are first used: neither built nor run, as on a card they take no memory.

FlashInfer compiles CUDA for the card that is there (``flashinfer/jit/core.py``, 0.2 to 0.7), and so does SGLang
(``sglang/kernels/jit``, 0.5.23): for minutes, and with a toolkit that a machine without a card need not have. CuTe's
kernels are Python that its own compiler reads (``cutlass/base_dsl/compiler.py``, 4.8), for tensors that it is shown by
their addresses (``cutlass/cute/runtime.py``). What a kernel writes it is given, by Python around it, which runs as it
is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor

#: Where CuTe's compiler is shown tensors: none has an address here.
_SHOWN = "cutlass.cute.runtime"
#: Modules, and the function of each, by class where it is a method, that gives the kernels of one specification.
_BUILDERS = {
    "cutlass.base_dsl.compiler": ("CompileCallable", "__call__"),
    "flashinfer.jit.core": ("JitSpec", "build_and_load"),
    "sglang.kernels.jit.utils.compile.loader": (None, "load_jit"),
}


@contextlib.contextmanager
def built_kernels(forget: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Until the end kernels are not built; ``forget`` gets every tensor that one is given."""

    def follow(patches: Patches, module: ModuleType) -> None:
        if module.__name__ == _SHOWN:
            patches.around(module, {"from_dlpack": _shown})
            return
        class_name, function = _BUILDERS[module.__name__]
        owner = module if class_name is None else getattr(module, class_name)
        is_captured = patches.threads.only(lambda: True)

        def unbuilt(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return _Unbuilt(partial(original, *args, **kwargs), lambda: bool(is_captured()), forget)

        patches.around(owner, {function: unbuilt})

    with patched_imports(dict.fromkeys((*_BUILDERS, _SHOWN), follow)):
        yield


def _shown(original: Callable[..., Any], tensor: object, *args: Any, **kwargs: Any) -> Any:
    return _Shown(tensor) if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)


class _Shown:
    """A tensor as CuTe's compiler is shown it, with methods that mark what of it may change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride = tuple(tensor.shape), tensor.stride()

    def __getattr__(self, name: str) -> Callable[..., _Shown]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


class _Unbuilt:
    """What a library keeps as its kernel, or its module of kernels, perhaps for longer than the capture: outside of it
    ``build`` gives the real one."""

    def __init__(
        self, build: Callable[[], Any], is_captured: Callable[[], bool], forget: Callable[[torch.Tensor], None]
    ) -> None:
        self._build, self._is_captured, self._forget = build, is_captured, forget

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self._call, lambda built: getattr(built, name))

    __getitem__ = __getattr__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(lambda built: built, *args, **kwargs)

    def _call(self, kernel_of: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_captured():
            return kernel_of(self._build())(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self._forget(value)
        return None
