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
    _aten.sub.Tensor: (_aten.sub_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
    _aten.mul.Tensor: (_aten.mul_.Tensor, frozenset({"BinaryCrossEntropyWithLogitsBackward0"})),
}

#: Nodes whose formulas end in a sum of temporaries, which must not be taken for the engine's fan-in of gradients.
ADDED_OUT_OF_PLACE = frozenset({"Atan2Backward0", "LogcumsumexpBackward0", "StdMeanBackward0", "VarMeanBackward0"})
