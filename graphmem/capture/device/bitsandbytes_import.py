"""Importing bitsandbytes where ``torch.cuda`` answers for a card that is not there.

Its import looks for a card (``bitsandbytes/__init__.py``, 0.50), and where it finds one takes its CUDA library, whose
functions it needs at once. Here it is imported as on a machine without one, which is what there is; its CUDA kernels
come from :mod:`graphmem.capture.operators.bitsandbytes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from graphmem.capture.device.watched_imports import watched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.threads import Threads
from graphmem.capture.torch_internals import disable_current_modes


def bitsandbytes_without_card(
    threads: Threads, loaded: Callable[[], None] = lambda: None
) -> contextlib.AbstractContextManager[None]:
    """Until the end, one of ``threads`` imports the package as without a card, and without the modes of a capture;
    ``loaded`` is called afterwards."""

    def execute(import_it: Callable[[], None]) -> None:
        patches = Patches()
        try:
            patches.set(torch.cuda, "is_available", lambda: False)
            patches.set(torch.cuda, "device_count", lambda: 0)
            with disable_current_modes():
                import_it()
        finally:
            patches.undo()
        loaded()

    return watched_imports(threads, {"bitsandbytes": execute})
