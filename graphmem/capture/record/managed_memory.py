"""Managed memory (``cudaMallocManaged``): allocated by the driver, moved between host and card page by page.

PyTorch's allocator knows nothing of it. To Python the tensors lie on the host, as ``torch.frombuffer`` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.torch_internals import dispatch_modes
from graphmem.trace import Place


def managed_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in managed memory, noted as such in the running capture."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    for mode in dispatch_modes():
        if isinstance(mode, RecordingMode):
            mode.recorder.storages.place(tensor, Place.MANAGED)
    return tensor
