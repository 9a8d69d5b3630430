"""An installed bitsandbytes inside a capture: importing it, its CUDA kernels, its calls into its own native library.

Its update kernels are operators with fake implementations (``bitsandbytes/_ops.py``, 0.50) and need nothing here.
Paged states are made by C functions, which are replaced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from graphmem.capture.device.watched_imports import bitsandbytes_without_card
from graphmem.capture.loop.optimizers.bitsandbytes_states import managed_memory
from graphmem.capture.operators.bitsandbytes import follow_bitsandbytes
from graphmem.capture.patches import Patches

_FUNCTIONS = "bitsandbytes.functional"


@contextlib.contextmanager
def bitsandbytes_in_captures() -> Iterator[None]:
    """Follow bitsandbytes for the duration, whether it is imported already or by the step itself."""
    patches = Patches()

    def follow() -> None:
        _patch_native_calls(patches)
        follow_bitsandbytes()

    try:
        follow()
        with bitsandbytes_without_card(patches.threads, follow):
            yield
    finally:
        patches.undo()


def _patch_native_calls(patches: Patches) -> None:
    functions = sys.modules.get(_FUNCTIONS)
    if functions is not None and hasattr(functions, "get_paged"):
        patches.set(functions, "get_paged", _get_paged)
        patches.set(functions, "prefetch_tensor", lambda *_, **__: None)
        patches.set(functions, "fill", lambda *_, **__: None)
        patches.set(functions, "name2qmap", {})  # it keeps tensors of the device


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    """``bitsandbytes.functional.get_paged``: ``cget_managed_ptr``, seen as a host tensor."""
    tensor: Any = managed_memory(shape, dtype)
    tensor.is_paged = True
    tensor.page_deviceid = getattr(device, "index", 0)
    return tensor
