"""Modules of libraries in which a capture replaces names once they are imported; the import of bitsandbytes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch

from graphmem.base.imports import watched_imports
from graphmem.capture.patches import Patches, constant
from graphmem.capture.threads import Threads
from graphmem.capture.torch_internals import disable_current_modes


@contextlib.contextmanager
def patched_imports(followed: Mapping[str, Callable[[Patches, ModuleType], None]]) -> Iterator[None]:
    """Until the end, modules of these full names are patched by their functions: those that are there now, others once
    this capture imports them."""

    def execute(module: ModuleType, run: Callable[[], None]) -> None:
        run()
        followed[module.__name__](patches, module)

    with Patches() as patches:
        for name, follow in followed.items():
            if name in sys.modules:
                follow(patches, sys.modules[name])
        with watched_imports(dict.fromkeys(followed, execute), patches.threads.only(lambda: True)):
            yield


def bitsandbytes_without_card(
    threads: Threads, loaded: Callable[[], None] = lambda: None
) -> contextlib.AbstractContextManager[None]:
    """Until the end, one of ``threads`` imports the package as without a card, and without the modes of a capture;
    ``loaded`` is called afterwards.

    Its import looks for a card (``bitsandbytes/__init__.py``, 0.50), and where it finds one takes its CUDA library,
    whose functions it needs at once. Here it is imported as on a machine without one, which is what there is; its CUDA
    kernels come from :mod:`graphmem.capture.operators.bitsandbytes`.
    """

    def execute(_: ModuleType, import_it: Callable[[], None]) -> None:
        with Patches() as patches:
            patches.table(torch.cuda, {"is_available": constant(False), "device_count": constant(0)})
            with disable_current_modes():
                import_it()
        loaded()

    return watched_imports({"bitsandbytes": execute}, threads.only(lambda: True))
