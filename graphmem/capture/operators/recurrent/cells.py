"""Cells of recurrent networks as CUDA runs them: products of one step, and a fused kernel for the rest.

Source: ``aten/src/ATen/native/RNN.cpp`` (LSTMCell, GRUCell, SimpleCell) and ``native/cuda/RNN.cu`` of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Shapes

_aten = torch.ops.aten

#: Weights of one layer in one direction: w_ih, w_hh, b_ih, b_hh, w_hr.
Weights = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]
#: The state between two steps; of an LSTM the hidden state and the cell state.
Hidden: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
#: One step: input, hidden state (LSTM: with cell state), weights -> the next hidden state.
Cell = Callable[..., "Hidden"]


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


@named("aten._thnn_fused_lstm_cell.default")
def _fused_lstm_cell(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    states = [torch.empty_like(call.cx, memory_format=torch.contiguous_format) for _ in range(2)]
    return states[0], states[1], torch.empty_like(call.input_gates, memory_format=torch.contiguous_format)


@named("aten._thnn_fused_gru_cell.default")
def _fused_gru_cell(call: Arguments) -> tuple[Tensor, Tensor]:
    """The workspace keeps five values for every hidden one (GRU_WORKSPACE_MULTIPLIER of native/cuda/RNN.cu)."""
    hx = call.hx
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], hx.shape[1] * 5))


def _fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty((batch, hidden * 3)) for _ in range(2)]
    biases = [workspace.new_empty((hidden * 3,)) for _ in range(2)] if has_bias else [None, None]
    return (*gates, torch.empty_like(grad_hy, memory_format=torch.contiguous_format), *biases)


#: By operator name: shapes of fused cells, whose meta kernel is missing or wants more than callers give.
CELL_SHAPES: dict[str, Shapes] = {
    "aten::_thnn_fused_lstm_cell": _fused_lstm_cell,
    "aten::_thnn_fused_gru_cell": _fused_gru_cell,
    "aten::_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
}
