"""Recurrent networks as CUDA runs them: cuDNN's fused kernels, or fused cells step by step where cuDNN is not used.

The composites ``lstm``, ``gru`` and ``rnn_*`` of a CPU build multiply all inputs of a layer at once; on CUDA every step
does its own products, and a fused cell does the rest. Sources (PyTorch 2.13): ``aten/src/ATen/native/RNN.cpp``
(``lstm``, ``gru``, ``_rnn_impl_with_concat``) and ``cudnn/RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.operators.recurrent.cells import Cell, cell_fakes, gru_cell, lstm_cell, simple_cell
from graphmem.capture.operators.recurrent.cudnn import DropoutState, cudnn_acceptable, cudnn_fakes, cudnn_network
from graphmem.capture.operators.recurrent.layers import (
    Layers,
    Options,
    gather,
    layer_stack,
    packed_layers,
    plain_layers,
)
from graphmem.capture.operators.recurrent.packing import known_lengths, pack, pad
from graphmem.capture.values.known_values import KnownValues

_aten = torch.ops.aten


def recurrent_composites(card: Card, values: KnownValues) -> dict[Any, Callable[..., Any]]:
    """Recurrent composites -> their decompositions on that card."""
    state = DropoutState(card)
    composites: dict[Any, Callable[..., Any]] = {
        _aten.lstm.input: partial(_lstm, state),
        _aten.lstm.data: partial(_packed_lstm, state),
        _aten._pack_padded_sequence.default: partial(pack, values),
        _aten._pad_packed_sequence.default: pad,
        _aten.lstm_cell.default: _lstm_cell,
        _aten.gru_cell.default: _gru_cell,
    }
    for mode, cell in (
        ("gru", gru_cell),
        ("rnn_tanh", simple_cell(torch.tanh)),
        ("rnn_relu", simple_cell(torch.relu)),
    ):
        operator = getattr(_aten, mode)
        composites[operator.input] = _one_hidden(state, mode, cell)
        composites[operator.data] = _packed_one_hidden(state, mode, cell)
    return composites


def recurrent_fakes() -> dict[str, Callable[..., Any]]:
    """By operator name: shapes of recurrent kernels that have no meta kernel of use here."""
    return cell_fakes() | cudnn_fakes()


# --- LSTM -------------------------------------------------------------------------------------------------------------


def _lstm(
    state: DropoutState, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``at::lstm``; ``options``: those of :class:`Options`, then ``batch_first``."""
    given, batch_first = Options(*options[:-1]), options[-1]
    if cudnn_acceptable(input):
        return cudnn_network(state, "lstm", input, hx[0], hx[1], params, given, batch_first)
    steps = input.transpose(0, 1) if batch_first else input
    output, hy, cy = _lstm_step_by_step(steps, hx, params, given, plain_layers())
    return (output.transpose(0, 1) if batch_first else output), hy, cy


def _packed_lstm(
    state: DropoutState,
    data: Tensor,
    batch_sizes: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``at::lstm`` of packed sequences."""
    sizes, given = known_lengths(batch_sizes), Options(*options)
    if cudnn_acceptable(data):
        return cudnn_network(state, "lstm", data, hx[0], hx[1], params, given, batch_sizes=sizes)
    return _lstm_step_by_step(data, hx, params, given, packed_layers(sizes))


def _lstm_step_by_step(
    data: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], options: Options, layers: Layers
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    weights = gather(params, options.has_biases, projected=hx[0].shape[2] != hx[1].shape[2])
    output, final = layer_stack(data, hidden, weights, options, layers, lstm_cell)
    del hidden
    hidden_states, cell_states = [h for h, _ in final], [c for _, c in final]
    del final
    cy = torch.stack(cell_states, 0)  # first: C++ evaluates arguments from right to left
    hy = torch.stack(hidden_states, 0)
    del cell_states
    return output, hy, cy


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``at::lstm_cell``, which ``nn.LSTMCell`` calls: one step, never cuDNN's."""
    return lstm_cell(input, (hx[0], hx[1]), (w_ih, w_hh, b_ih, b_hh, None))


# --- GRU and plain networks -------------------------------------------------------------------------------------------


def _one_hidden(state: DropoutState, mode: str, cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def rnn(input: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
        """``at::gru``, ``at::rnn_tanh``, ``at::rnn_relu``."""
        given, batch_first = Options(*options[:-1]), options[-1]
        if cudnn_acceptable(input):
            return cudnn_network(state, mode, input, hx, None, params, given, batch_first)[:2]
        steps = input.transpose(0, 1) if batch_first else input
        output, hy = _step_by_step(steps, hx, params, given, plain_layers(), cell)
        return (output.transpose(0, 1) if batch_first else output), hy

    return rnn


def _packed_one_hidden(state: DropoutState, mode: str, cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def rnn(
        data: Tensor, batch_sizes: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Any
    ) -> tuple[Tensor, Tensor]:
        """``at::gru``, ``at::rnn_tanh``, ``at::rnn_relu`` of packed sequences."""
        sizes, given = known_lengths(batch_sizes), Options(*options)
        if cudnn_acceptable(data):
            return cudnn_network(state, mode, data, hx, None, params, given, batch_sizes=sizes)[:2]
        return _step_by_step(data, hx, params, given, packed_layers(sizes), cell)

    return rnn


def _step_by_step(
    data: Tensor, hx: Tensor, params: Sequence[Tensor], options: Options, layers: Layers, cell: Cell
) -> tuple[Tensor, Tensor]:
    weights = gather(params, options.has_biases, projected=False)
    output, final = layer_stack(data, hx.unbind(0), weights, options, layers, cell)
    return output, torch.stack(final, 0)


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``at::gru_cell``, which ``nn.GRUCell`` calls: one step, never cuDNN's."""
    return gru_cell(input, hx, (w_ih, w_hh, b_ih, b_hh, None))
