"""What Python reads of a fake tensor's data, outside PyTorch's dispatcher: ``.numpy()`` and formatted numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphmem.capture.patches import Patches
from graphmem.capture.values.host_values import LIMIT


def patch_reading(patches: Patches) -> None:
    """Let logs and metrics of a training loop read tensors: what ``.item()`` would assume stands for each element."""
    patches.set(torch.Tensor, "numpy", _numpy(torch.Tensor.numpy))
    patches.set(torch.Tensor, "__format__", _format(torch.Tensor.__format__))


def _numpy(original: Any) -> Any:
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, force=force)
        import numpy

        if force:
            self = self.detach().cpu()
        if self.is_cuda:
            raise TypeError("can't convert a tensor on cuda:0 to numpy; call .cpu() first")
        if self.requires_grad:
            raise RuntimeError("can't call numpy() on a tensor that requires a gradient; call .detach() first")
        dtype = numpy.dtype(str(self.dtype).removeprefix("torch."))
        if self.numel() == 0:
            return numpy.empty(tuple(self.shape), dtype)
        value = numpy.asarray(self.new_empty(()).item(), dtype)
        values = numpy.broadcast_to(value, tuple(self.shape))
        return values.copy() if self.numel() <= LIMIT else values

    return numpy


def _format(original: Any) -> Any:
    def format_(self: torch.Tensor, spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0:
            return format(self.detach().item(), spec)
        return str(original(self, spec))

    return format_
