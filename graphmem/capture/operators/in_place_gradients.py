"""Formulas of gradients that write in place on a card.

C++ asks whether a tensor "is like a subclass", as every fake tensor is, and then avoids writing in place
(``areAnyTensorSubclassLike``, torch/csrc/autograd/FunctionsManual.cpp). Formulas are no operators, so they are known
by the node that runs.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten

_EVENLY_DISTRIBUTED = frozenset({"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"})
_CLAMPED = frozenset({"ClampBackward0"})
#: Out-of-place operator -> (what a card runs, names of the autograd nodes that call it so).
IN_PLACE_IN_BACKWARD: dict[Any, tuple[Any, frozenset[str]]] = {
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

_PRODUCTS = "the gradient of prod was taken to go the way of inputs with zeros; without any, a card takes less"
_FILLED = "the gradient of a fill value was taken to hold the whole tensor; a card holds what the mask selects"
_NORMS = "the gradient of renorm was taken to be computed in double precision; a card computes it in single"
_SIGNS = "the gradient of sgn was taken to be a tensor of zeros; a card makes none"
#: Name of an autograd node -> what is assumed where its formula, for fake tensors, goes another way than on a card.
OTHER_WAYS = {
    "ProdBackward0": _PRODUCTS,
    "ProdBackward1": _PRODUCTS,
    "MaskedFillBackward1": _FILLED,
    "RenormBackward0": _NORMS,
    "SgnBackward0": _SIGNS,
}

#: (in-place operator, name of the operator before it, node): out of place on a card too, unlike others of the node. The
#: gradient of targets is ``-input * grad``.
OUT_OF_PLACE_AFTER = {(_aten.mul_.Tensor, "aten.neg.default", "BinaryCrossEntropyWithLogitsBackward0")}
