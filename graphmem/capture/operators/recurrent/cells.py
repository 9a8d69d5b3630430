"""Cells of recurrent networks as CUDA runs them: products of one step, and a fused kernel for the rest.

Source: ``aten/src/ATen/native/RNN.cpp`` (LSTMCell, GRUCell, SimpleCell) and ``native/cuda/RNN.cu`` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten

#: Weights of one layer in one direction: w_ih, w_hh, b_ih, b_hh, w_hr.
Weights = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]
#: One step: input, hidden state (LSTM: with cell state), weights -> the next hidden state.
Cell = Callable[..., Any]


def cell_fakes() -> dict[str, Callable[..., Any]]:
    """By operator name: shapes of fused cells, whose meta kernel is missing or wants more than callers give."""
    return {
        "aten::_thnn_fused_lstm_cell": _fused_lstm_cell,
        "aten::_thnn_fused_gru_cell": _fused_gru_cell,
        "aten::_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
    }


def lstm_cell(input: Tensor, hidden: tuple[Tensor, Tensor], weights: Weights) -> tuple[Tensor, Tensor]:
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    hx, cx = hidden
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    hy, cy, workspace = _aten._thnn_fused_lstm_cell.default(*gates, cx, b_ih, b_hh)
    if w_hr is None:
        return hy, cy
    projected = torch.matmul(hy, w_hr.t())
    del hy
    del workspace
    return projected, cy


def gru_cell(input: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    w_ih, w_hh, b_ih, b_hh, _ = weights
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hidden, w_hh.t())
    hy: Tensor = _aten._thnn_fused_gru_cell.default(*gates, hidden, b_ih, b_hh)[0]
    return hy


def simple_cell(nonlinearity: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(input: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
        w_ih, w_hh, b_ih, b_hh, _ = weights
        linear = nn.functional.linear
        # Both products live until the end of the expression.
        of_hidden, of_input = linear(hidden, w_hh, b_hh), linear(input, w_ih, b_ih)
        return nonlinearity(of_hidden.add_(of_input))

    return cell


def _fused_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    del hidden_gates, input_bias, hidden_bias
    states = [torch.empty_like(cx, memory_format=torch.contiguous_format) for _ in range(2)]
    return states[0], states[1], torch.empty_like(input_gates, memory_format=torch.contiguous_format)


def _fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    """The workspace keeps five values for every hidden one (GRU_WORKSPACE_MULTIPLIER of native/cuda/RNN.cu)."""
    del input_gates, hidden_gates, input_bias, hidden_bias
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def _fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty((batch, hidden * 3)) for _ in range(2)]
    biases = [workspace.new_empty((hidden * 3,)) for _ in range(2)] if has_bias else [None, None]
    return (*gates, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases)
