"""Results whose size is data: ``nonzero``, boolean masks, ``unique``. What is known is counted; else they select all
that they can, or what the user says. Where the program itself says the size (the gradient of a masked selection, counts
with ``minlength``), nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.values.selection import Selection

_aten = torch.ops.aten


def outputs_of(func: Any, selection: Selection, args: Any, kwargs: Any) -> Any:
    """The outputs of an operator of :data:`SELECTING`, by its rules of shape."""
    return SELECTING[func](selection, *args, **kwargs)


def _nonzero(selection: Selection, self: Tensor) -> Tensor:
    rows = selection.rows(self.numel(), "nonzero, or a mask,")
    return self.new_empty((self.dim(), rows), dtype=torch.int64).t()


def _unique(
    selection: Selection,
    self: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    del sorted
    rows = selection.rows(self.numel(), "unique")
    inverse = self.new_empty(self.shape if return_inverse else (0,), dtype=torch.int64)
    return self.new_empty(rows), inverse, self.new_empty(rows if return_counts else 0, dtype=torch.int64)


def _unique_in_two(
    selection: Selection, self: Tensor, sorted: bool = True, return_inverse: bool = False
) -> tuple[Tensor, Tensor] | None:
    """``_unique``, the older operator, which the gradient of ``index_fill`` calls."""
    found = _unique(selection, self, sorted, return_inverse)
    return None if found is None else found[:2]


def _unique_consecutive(
    selection: Selection, self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: Any = None
) -> Any:
    if dim is not None:
        return _unique_dim(selection, self, dim, True, return_inverse, return_counts)
    return _unique(selection, self, True, return_inverse, return_counts)


def _unique_dim(
    selection: Selection,
    self: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Any:
    del sorted
    length = self.shape[dim]
    rows = selection.rows(length, "unique")
    shape = list(self.shape)
    shape[dim] = rows
    counts = self.new_empty(rows if return_counts else 0, dtype=torch.int64)
    inverse = self.new_empty(length if return_inverse else 0, dtype=torch.int64)
    return self.new_empty(shape), inverse, counts


def _unique_dim_consecutive(
    selection: Selection, self: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Any:
    return _unique_dim(selection, self, dim, True, return_inverse, return_counts)


def _bincount(selection: Selection, self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As long as ``minlength``, which models set to the number of classes or experts."""
    length = max(1, minlength or selection.rows(self.numel(), "bincount"))
    if weights is None:
        return self.new_empty(length, dtype=torch.int64)
    return self.new_empty(length, dtype=weights.dtype if weights.dtype is torch.float32 else torch.float64)


def _repeat_interleave(selection: Selection, repeats: Tensor, output_size: int | None = None) -> Tensor:
    rows = (
        output_size if output_size is not None else selection.rows(repeats.numel(), "repeat_interleave, of each once,")
    )
    return repeats.new_empty(rows)


#: Operators of PyTorch whose outputs' size is data -> their outputs for a given selection.
SELECTING: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten._unique.default: _unique_in_two,
    _aten._unique2.default: _unique,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_dim_consecutive.default: _unique_dim_consecutive,
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
}
