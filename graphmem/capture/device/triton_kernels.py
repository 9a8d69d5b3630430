"""Kernels that libraries write in Triton, where Triton is not installed: launched without effect, as on a card.

Without Triton a library falls back to PyTorch's operators, which take other memory than the kernels of a card. A kernel
itself asks for none: it reads and writes the tensors that it is given, whose values nobody knows then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from graphmem.capture.device.watched_imports import watched_imports
from graphmem.capture.patches import Patches

#: Modules with such kernels, functions whose names end so, and the flag that says whether Triton is there. TRL 1.16:
#: log-probabilities of a language model's head, vocabulary chunk by chunk.
_MODULES = {"trl.kernels.chunked_logprob": "_TRITON_AVAILABLE", "trl.kernels.chunked_divergence": None}
_KERNEL = "_kernel"
#: What such modules ask of Triton on the host, for the size of a grid (``triton/__init__.py``, 3.x).
_HOST_SIDE = SimpleNamespace(cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda n: 1 << (n - 1).bit_length())


@contextlib.contextmanager
def triton_kernels(forget: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Until the end those libraries find Triton; ``forget`` is told of every tensor that a kernel is given."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    patches = Patches()

    def follow(name: str) -> None:
        if name in sys.modules:
            _launch_nothing(patches, sys.modules[name], _MODULES[name], forget)

    def execute(name: str, import_it: Callable[[], None]) -> None:
        import_it()
        follow(name)

    try:
        for name in _MODULES:
            follow(name)
        with watched_imports(patches.threads, {name: partial(execute, name) for name in _MODULES}):
            yield
    finally:
        patches.undo()


def _launch_nothing(
    patches: Patches, module: ModuleType, flag: str | None, forget: Callable[[torch.Tensor], None]
) -> None:
    is_here = patches.threads.only(lambda: True)
    if flag is not None:
        patches.share(module, flag, _Flag(is_here, vars(module)[flag]))
    patches.share(module, "triton", _HOST_SIDE)
    for name, value in list(vars(module).items()):
        if name.endswith(_KERNEL) and isinstance(value, FunctionType):
            patches.share(module, name, _Kernel(value, forget))


class _Flag:
    """Triton is there for the threads of the capture."""

    def __init__(self, is_here: Callable[[], bool | None], found: bool) -> None:
        self._is_here = is_here
        self._found = found

    def __bool__(self) -> bool:
        return bool(self._is_here()) or self._found


class _Kernel:
    """A compiled kernel: ``kernel[grid](arguments)``. Called without a grid it is the function that it was."""

    def __init__(self, function: Callable[..., Any], forget: Callable[[torch.Tensor], None]) -> None:
        self._function = function
        self._forget = forget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self._forget(value)
