"""``torch.nn.init`` on fake tensors.

Filling a host tensor allocates nothing on the device and computes values nobody will read, so on fake host tensors the
initializers return at once. On the device they run, except truncated normals, whose rejection loop asks the data
whether it is done: one round of resampling is recorded, which holds as much memory as any further round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphmem import versions
from graphmem.capture.patches import Patches

_FILLERS = (
    "uniform_", "normal_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_",
    "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_", "_no_grad_uniform_", "_no_grad_normal_",
    "_no_grad_fill_", "_no_grad_zero_",
)  # fmt: skip


def patch_initializers(patches: Patches) -> None:
    """Replace the initializers until ``patches`` are undone."""
    init = torch.nn.init
    for name in _FILLERS:
        if hasattr(init, name):
            patches.set(init, name, _skip_on_host(getattr(init, name)))
    truncated = getattr(init, "_no_grad_trunc_normal_", None)
    if truncated is not None:
        patches.set(init, "_no_grad_trunc_normal_", _one_round(truncated))


def _skip_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    def fill(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, FakeTensor) and not tensor.is_cuda:
            return tensor
        return original(tensor, *args, **kwargs)

    return fill


def _one_round(original: Callable[..., Any]) -> Callable[..., Any]:
    def fill(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, mean, std, a, b, generator)
        if not tensor.is_cuda:
            return tensor
        with torch.no_grad():
            if not versions.TRUNCATED_NORMAL_BY_REJECTION.holds(versions.version_of(torch.__version__)):
                return _by_inverse(tensor, a, b, mean, std)
            result = tensor.normal_(mean, std)
            mask = (result < a) | (result > b)
            result = torch.where(mask, torch.empty_like(result).normal_(mean, std), result)
            return tensor.copy_(result)

    return fill


def _by_inverse(tensor: Any, a: float, b: float, mean: float, std: float) -> Any:
    """The older method: in place throughout (``torch/nn/init.py``)."""
    tensor.uniform_(2 * a - 1, 2 * b - 1).erfinv_()
    return tensor.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)
