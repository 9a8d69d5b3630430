"""Fake implementations of operators, in the spellings of PyTorch 2.4 and later.

Each function does the same under every supported version; the comment says which version brought the new spelling.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping
from typing import Any

from graphmem.capture.patches import Patches
from graphmem.capture.threads import Threads
from graphmem.torch_names import private

_registry: Any = private(
    "torch._library.simple_registry.singleton", "operators that exist on GPUs alone, as cuDNN's, have no shapes", None
)
# FakeTensorMode imports it when first made; that must be before torch.cuda's classes are replaced.
private("torch._dynamo.config", "PyTorch's compiler is imported during the analysis", None)


class ExistingFakes:
    """Fake implementations that stand for those PyTorch has, for the threads of the capture, until they are restored.

    ``register_fake(allow_override=True)`` came after 2.6, and means every thread. The tables it writes to are written
    directly.
    """

    def __init__(self) -> None:
        self._threads = Patches().threads
        self._replaced: list[tuple[Any, Any]] = []

    def replace(self, fakes: Mapping[str, Callable[..., Any]]) -> None:
        """``fakes`` by qualified operator name."""
        for name, fake in fakes.items() if _registry is not None else ():
            entry: Any = _registry.find(name)
            holder = entry.fake_impl if hasattr(entry, "fake_impl") else entry.abstract_impl  # renamed in 2.5
            kernel = _FakeKernel(fake, holder.kernel, self._threads)
            self._replaced.append((holder, kernel))
            if hasattr(holder, "kernels"):  # since 2.7 those before it are kept
                holder.kernels.append(kernel)
            else:
                holder.kernel = kernel

    def restore(self) -> None:
        """Put back those that were there before."""
        while self._replaced:
            holder, kernel = self._replaced[-1]
            if not hasattr(holder, "kernels"):
                holder.kernel = kernel.found
            elif kernel in holder.kernels:
                holder.kernels.remove(kernel)
            self._replaced.pop()


class _FakeKernel:
    """A ``torch._library.utils.Kernel`` that is there for some threads; for others it is the one ``found``, or false,
    which PyTorch takes for none."""

    source = "graphmem"

    def __init__(self, func: Callable[..., Any], found: Callable[..., object], threads: Threads) -> None:
        self.func = func
        self.found = found
        self._threads = threads

    def _is_here(self) -> bool:
        return get_ident() in self._threads or self._threads.adopts()

    def __bool__(self) -> bool:
        return self._is_here() or bool(self.found)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return (self.func if self._is_here() else self.found)(*args, **kwargs)
