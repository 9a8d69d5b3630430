"""Nested tensors of jagged layout, made of values and offsets: three sequences one after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.registry import add, group, module, t

_ROWS, _FEATURES = 4096, 256
_VALUES = t(_ROWS, _FEATURES)


def _jagged(values: torch.Tensor) -> Any:
    offsets = torch.tensor([0, 1000, 1100, _ROWS], device=values.device)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


group("nested")
module(
    "jagged_layers",
    lambda: nn.Sequential(nn.Linear(_FEATURES, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 64)),
    _VALUES,
    run=lambda layers, values: layers(_jagged(values)).values(),
)
add(
    "jagged_arithmetic",
    lambda values: (_jagged(values) * 2 + _jagged(values).sigmoid().values().mean()).values(),
    _VALUES,
)
add("jagged_softmax", lambda values: _jagged(values).softmax(-1).values(), _VALUES)
add("jagged_dropout", lambda values: F.dropout(_jagged(values), 0.1).values(), _VALUES)
add("jagged_sum_of_sequences", lambda values: _jagged(values).sum(dim=1), _VALUES, grad=False)
add("jagged_padded", lambda values: _jagged(values).to_padded_tensor(0.0), _VALUES, true_values=True)


def _attended(values: torch.Tensor, dtype: torch.dtype, causal: bool = False) -> torch.Tensor:
    """Attention of four heads; half precision takes flash, fp32 the efficient kernel."""
    parts = values.to(dtype).split([1000, 100, _ROWS - 1100])
    together = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    heads = [together.unflatten(-1, [4, -1]).transpose(1, 2) for _ in range(3)]
    out = F.scaled_dot_product_attention(*heads, is_causal=causal)
    return out.transpose(1, 2).flatten(-2).values()


add("jagged_attention", lambda values: _attended(values, torch.bfloat16), _VALUES, true_values=True)
add("jagged_attention_causal", lambda values: _attended(values, torch.float16, True), _VALUES, true_values=True)
add("jagged_attention_efficient", lambda values: _attended(values, torch.float32), _VALUES, true_values=True)
