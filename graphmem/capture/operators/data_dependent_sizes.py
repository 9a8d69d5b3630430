"""Results whose size is data: ``nonzero``, boolean masks, ``unique``. Known values are counted; else they select all
that they can, or the share that the user gives. Where the program itself fixes the size (the gradient of a masked
selection, counts with ``minlength``), nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.assumed_values import Selection

_aten = torch.ops.aten


def outputs_of(func: OpOverload, selection: Selection, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
    """The outputs of an operator of :data:`SELECTING`, by its rules of shape."""
    return SELECTING[func](selection, *args, **kwargs)


def _nonzero(selection: Selection, self: Tensor) -> Tensor:
    rows = selection.rows(self.numel(), "nonzero, or a mask,")
    return self.new_empty((self.dim(), rows), dtype=torch.int64).t()


def _unique_of(operator: str, outputs: int = 3) -> Decomposition:
    """The distinct values, of all elements or of the slices along ``dim``, the place of each, and how often."""

    @named(operator)
    def unique(selection: Selection, call: Arguments) -> tuple[Tensor, ...]:
        tensor, dim = call.self, call.get("dim")
        count = tensor.numel() if dim is None else tensor.shape[dim]
        rows = selection.rows(count, "unique")
        shape = [rows]
        if dim is not None:
            shape = list(tensor.shape)
            shape[dim] = rows
        places = (tensor.shape if dim is None else count) if call.return_inverse else (0,)
        inverse = tensor.new_empty(places, dtype=torch.int64)
        counts = tensor.new_empty(rows if call.get("return_counts") else 0, dtype=torch.int64)
        return (tensor.new_empty(shape), inverse, counts)[:outputs]

    return unique


def _bincount(selection: Selection, self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As long as ``minlength``, which models set to the number of classes or experts."""
    length = max(1, minlength or selection.rows(self.numel(), "bincount"))
    if weights is None:
        return self.new_empty(length, dtype=torch.int64)
    return self.new_empty(length, dtype=weights.dtype if weights.dtype is torch.float32 else torch.float64)


def _repeat_interleave(selection: Selection, repeats: Tensor, output_size: int | None = None) -> Tensor:
    if output_size is None:
        output_size = selection.rows(repeats.numel(), "repeat_interleave, of each once,")
    return repeats.new_empty(output_size)


#: Operators of PyTorch whose outputs' size is data -> their outputs for a given selection.
SELECTING: dict[OpOverload, Decomposition] = {
    _aten.nonzero.default: _nonzero,
    _aten._unique.default: _unique_of("aten._unique.default", outputs=2),  # the gradient of index_fill calls it
    _aten._unique2.default: _unique_of("aten._unique2.default"),
    _aten.unique_consecutive.default: _unique_of("aten.unique_consecutive.default"),
    _aten.unique_dim.default: _unique_of("aten.unique_dim.default"),
    _aten.unique_dim_consecutive.default: _unique_of("aten.unique_dim_consecutive.default"),
    _aten.bincount.default: _bincount,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
}
#: Those of them whose outputs are as many as there are values, of all elements.
VALUES = {_aten._unique.default, _aten._unique2.default}
