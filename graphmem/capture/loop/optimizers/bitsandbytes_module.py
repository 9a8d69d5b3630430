"""An installed bitsandbytes inside a capture: importing it, and its calls into its own native library.

Its update kernels are operators with fake implementations (``bitsandbytes/_ops.py``, 0.50) and need nothing here.
Paged states are made by C functions, which are replaced, and its import asks for a driver, which is kept from it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphmem.capture.patches import Patches
from graphmem.capture.record.managed_memory import managed_memory
from graphmem.capture.threads import current_threads

_PACKAGE, _FUNCTIONS = "bitsandbytes", "bitsandbytes.functional"


@contextlib.contextmanager
def bitsandbytes_in_captures() -> Iterator[None]:
    """Follow bitsandbytes for the duration, whether it is imported already or by the step itself."""
    patches = Patches()
    finder = _Finder(lambda: _patch_native_calls(patches))
    _patch_native_calls(patches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        patches.undo()


def _patch_native_calls(patches: Patches) -> None:
    functions = sys.modules.get(_FUNCTIONS)
    if functions is not None and hasattr(functions, "get_paged"):
        patches.set(functions, "get_paged", _get_paged)
        patches.set(functions, "prefetch_tensor", lambda *_, **__: None)
        patches.set(functions, "fill", lambda *_, **__: None)


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """``bitsandbytes.functional.get_paged``: ``cget_managed_ptr``, seen as a host tensor."""
    tensor: Any = managed_memory(shape, dtype)
    tensor.is_paged = True
    tensor.page_deviceid = getattr(device, "index", 0)
    return tensor


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package as usual, and loads it under :class:`_Loader`."""

    def __init__(self, loaded: Callable[[], None]) -> None:
        self._loaded = loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _PACKAGE or current_threads() is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec


class _Loader(importlib.abc.Loader):
    """Executes the package as on a machine without a card, which is what there is."""

    def __init__(self, original: Any, loaded: Callable[[], None]) -> None:
        self._original = original
        self._loaded = loaded

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._original.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        patches = Patches()
        try:
            patches.set(torch.cuda, "is_available", lambda: False)
            patches.set(torch.cuda, "device_count", lambda: 0)
            with _disable_current_modes():
                self._original.exec_module(module)
        finally:
            patches.undo()
        self._loaded()
