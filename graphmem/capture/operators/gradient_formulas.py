"""Formulas of gradients that go another way on a card: they write in place, read data back, or compute in single
precision.

C++ asks whether a tensor "is like a subclass", as every fake tensor is, and then avoids writing in place and reading
data (``areAnyTensorSubclassLike``, torch/csrc/autograd/FunctionsManual.cpp); and it asks the device, which is not CUDA
to C++. Formulas are no operators, so they are known by the node that runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.base.versions import Since
from graphmem.capture.operators import Perhaps
from graphmem.capture.torch_internals import OpOverload, suggest_memory_format
from graphmem.capture.values.assumed_values import Selection
from graphmem.diagnostics import Code, Diagnostic

_aten = torch.ops.aten

_EVENLY_DISTRIBUTED = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
_CLAMPED = frozenset({"ClampBackward0"})
#: Out-of-place operator -> (what a card runs, names of the autograd nodes that call it so).
IN_PLACE_IN_BACKWARD: dict[OpOverload, tuple[Any, frozenset[str]]] = {
    _aten.index_put.default: (_aten.index_put_.default, frozenset({"IndexBackward0"})),
    _aten.put.default: (_aten.put_.default, frozenset({"TakeBackward0"})),
    _aten.logical_and.default: (_aten.logical_and_.default, _EVENLY_DISTRIBUTED | _CLAMPED),
    _aten.logical_or.default: (_aten.logical_or_.default, _EVENLY_DISTRIBUTED | _CLAMPED),
    _aten.masked_fill.Scalar: (_aten.masked_fill_.Scalar, frozenset({"Atan2Backward0"})),
    _aten.add.Tensor: (_aten.add_.Tensor, frozenset({"AminmaxBackward0"})),  # aminmax_backward, FunctionsManual.cpp
    _aten.sub.Tensor: (_aten.sub_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
    _aten.mul.Tensor: (
        _aten.mul_.Tensor,
        frozenset({"BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0"}),
    ),
}

_PRODUCTS = Code.GRADIENT_OF_PROD.about()
#: Name of an autograd node -> what is assumed where its formula, for fake tensors, goes another way than on a card.
OTHER_WAYS = {
    "ProdBackward0": _PRODUCTS,
    "ProdBackward1": _PRODUCTS,
}


@dataclass(frozen=True)
class GradientFormula:
    """The operators that a card runs in place of one that an autograd ``node`` calls. ``decomposition`` answers
    NotImplemented where they are the same; a ``remark`` then has the assumption. ``since``: versions before that change
    run the decomposition.
    """

    node: str
    decomposition: Callable[..., Any]
    remark: Diagnostic | None = None
    since: Since | None = None


def _selected_of_mask(selection: Selection, mask: Tensor, grad: Tensor, zero: Tensor) -> Perhaps:
    """``masked_fill_backward``: the gradient of the fill value is the sum of the selected elements."""
    return NotImplemented if selection.share is None else _aten.masked_select.default(grad, mask)


def _host_zero(selection: Selection, value: object, **_: object) -> Perhaps:
    """The other argument of ``where``, which a card does not call."""
    return NotImplemented if selection.share is None else torch.zeros((), device="cpu")


def _in_its_format(_: Selection, tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Perhaps:
    """``tensor.contiguous()`` of a tensor read in channels_last; the rule copies what is in another format."""
    kept = suggest_memory_format(tensor)
    if memory_format is not torch.contiguous_format or kept is torch.contiguous_format:
        return NotImplemented
    return tensor if tensor.is_contiguous(memory_format=kept) else tensor.clone(memory_format=kept)


def _in_single(func: OpOverload) -> Callable[..., Any]:
    """``renorm_backward`` accumulates in ``toAccumulateType`` of the device, which is single on CUDA."""

    def accumulate(_: Selection, self: Tensor, *args: object, dtype: torch.dtype | None = None) -> Perhaps:
        if dtype is not torch.float64 or self.dtype is torch.float64:
            return NotImplemented
        return func(self, *args, dtype=torch.float32)

    return accumulate


#: Operator -> what a card runs instead of it in one formula.
GRADIENT_FORMULAS: dict[OpOverload, GradientFormula] = {
    _aten.where.self: GradientFormula("MaskedFillBackward1", _selected_of_mask, Code.GRADIENT_OF_FILL.about()),
    _aten.scalar_tensor.default: GradientFormula("MaskedFillBackward1", _host_zero),
    _aten.clone.default: GradientFormula(
        "NativeGroupNormBackward0", _in_its_format, since=versions.GROUP_NORM_KEEPS_CHANNELS_LAST
    ),
    _aten.linalg_vector_norm.default: GradientFormula("RenormBackward0", _in_single(_aten.linalg_vector_norm.default)),
    _aten.sum.dim_IntList: GradientFormula("RenormBackward0", _in_single(_aten.sum.dim_IntList)),
}

#: (in-place operator, name of the operator before it, node): out of place on a card too, unlike others of the node. The
#: gradient of targets is ``-input * grad``.
OUT_OF_PLACE_AFTER = {(_aten.mul_.Tensor, "aten.neg.default", "BinaryCrossEntropyWithLogitsBackward0")}
