"""``torch.nn.init`` on fake tensors.

Nobody reads the values of a parameter, so on the host the initializers of parameters return at once, and the program's
generator is set ahead by as many words as they draw. On the device they run, except truncated normals, whose rejection
loop asks the data whether it is done: one round of resampling is recorded, which holds as much memory as any further
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from graphmem.base import versions
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values import generators
from graphmem.capture.values.known_values import KnownValues

_CONSTANTS = ("constant_", "ones_", "zeros_", "eye_", "dirac_", "_no_grad_fill_", "_no_grad_zero_")
_UNIFORM = ("uniform_", "xavier_uniform_", "kaiming_uniform_", "_no_grad_uniform_")
#: An orthogonal matrix is made of a normal one.
_NORMAL = ("normal_", "xavier_normal_", "kaiming_normal_", "_no_grad_normal_", "orthogonal_")


def patch_initializers(patches: Patches, values: KnownValues) -> None:
    """Replace the initializers until ``patches`` are undone."""
    init = torch.nn.init
    for names, words in (
        (_CONSTANTS, lambda tensor: 0),
        (_UNIFORM, lambda tensor: generators.words_of_uniform(tensor.numel(), tensor.dtype)),
        (_NORMAL, _words_of_normal),
        (("sparse_",), _words_of_sparse),
    ):
        patches.around(init, dict.fromkeys(names, _skip_on_host(words, values)))
    patches.around(init, {"_no_grad_trunc_normal_": _one_round(values)})


def _words_of_normal(tensor: torch.Tensor) -> int | None:
    return generators.words_of_normal(tensor.numel(), tensor.dtype) if tensor.is_contiguous() else None


def _words_of_sparse(tensor: torch.Tensor) -> int | None:
    """Normal ones, and for each column an order of its rows, of which the last has no choice."""
    words = _words_of_normal(tensor)
    rows, columns = tensor.shape
    return None if words is None else words + columns * (rows - 1)


_Fill = Callable[..., torch.Tensor]


def _skip_on_host(words_of: Callable[[torch.Tensor], int | None], values: KnownValues) -> _Fill:
    def fill(original: _Fill, tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) and not tensor.is_cuda and values.is_weight(tensor):
            words = words_of(tensor)
            if words is not None and kwargs.get("generator") is None:
                generators.current().skip(words)
                return tensor
        return original(tensor, *args, **kwargs)

    return fill


def _one_round(values: KnownValues) -> _Fill:
    def fill(
        original: _Fill, tensor: torch.Tensor, mean: float, std: float, a: float, b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if not isinstance(tensor, FakeTensor):
            return original(tensor, mean, std, a, b, generator)
        by_rejection = versions.TRUNCATED_NORMAL_BY_REJECTION.holds(versions.version_of(torch.__version__))
        if not tensor.is_cuda:
            words = _words_of_truncated(tensor, mean, std, a, b, by_rejection)
            if words is not None and generator is None and values.is_weight(tensor):
                generators.current().skip(words)
                return tensor
            return values.draw_aside(tensor, lambda real, drawn: original(real, mean, std, a, b, drawn), generator)
        with torch.no_grad():
            if not by_rejection:
                return _by_inverse(tensor, a, b, mean, std)
            result = tensor.normal_(mean, std)
            mask = (result < a) | (result > b)
            result = torch.where(mask, torch.empty_like(result).normal_(mean, std), result)
            return tensor.copy_(result)

    return fill


def _words_of_truncated(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, by_rejection: bool
) -> int | None:
    """Words that a truncated normal draws where nothing is out of bounds; None where something may be.

    The largest normal number of a uniform one of n bits is sqrt(2 n log 2) (Box, Muller); floats have 24, doubles 53.
    """
    if not by_rejection:
        return generators.words_of_uniform(tensor.numel(), tensor.dtype)
    largest = math.sqrt(2 * 53 * math.log(2)) if tensor.dtype is torch.float64 else math.sqrt(2 * 24 * math.log(2))
    is_within = a < mean - 1.01 * largest * std and b > mean + 1.01 * largest * std
    return _words_of_normal(tensor) if is_within else None


def _by_inverse(tensor: torch.Tensor, a: float, b: float, mean: float, std: float) -> torch.Tensor:
    """The older method: in place throughout (``torch/nn/init.py``)."""
    tensor.uniform_(2 * a - 1, 2 * b - 1).erfinv_()
    return tensor.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(min=a, max=b)
