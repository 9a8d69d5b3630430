"""Recurrent networks as CUDA runs them: cuDNN's fused kernels, or fused cells step by step where cuDNN is not used.

The composites ``lstm``, ``gru`` and ``rnn_*`` of a CPU build multiply all inputs of a layer at once; on CUDA every step
does its own products, and a fused cell does the rest. Sources (PyTorch 2.13): ``aten/src/ATen/native/RNN.cpp``
(``lstm``, ``gru``, ``_rnn_impl_with_concat``) and ``cudnn/RNN.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.recurrent.cells import Cell, gru_cell, lstm_cell, simple_cell
from graphmem.capture.operators.recurrent.cudnn import cudnn_acceptable, cudnn_network
from graphmem.capture.operators.recurrent.layers import (
    Layers,
    Options,
    gather,
    layer_stack,
    packed_layers,
    plain_layers,
)
from graphmem.capture.operators.recurrent.packing import known_lengths, pack, pad
from graphmem.capture.torch_internals import OpOverload

if TYPE_CHECKING:
    from graphmem.capture.operators.composites import Build

_aten = torch.ops.aten
#: Mode of a network -> its cell.
_CELLS: dict[str, Cell] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "rnn_tanh": simple_cell(torch.tanh),
    "rnn_relu": simple_cell(torch.relu),
}


_Hidden: TypeAlias = "Tensor | Sequence[Tensor]"


def _of_one_length(
    mode: str, build: Build, input: Tensor, hx: _Hidden, params: Sequence[Tensor], *options: bool
) -> tuple[Tensor, ...]:
    """``at::lstm``, ``at::gru``, ``at::rnn_*``; ``options``: those of :class:`Options`, then ``batch_first``."""
    given, batch_first = Options(*options[:-1]), options[-1]
    if cudnn_acceptable(input):
        return cudnn_network(build.dropout, mode, input, hx, params, given, batch_first)
    steps = input.transpose(0, 1) if batch_first else input
    output, *final = _step_by_step(mode, steps, hx, params, given, plain_layers())
    return (output.transpose(0, 1) if batch_first else output), *final


def _packed(
    mode: str, build: Build, data: Tensor, batch_sizes: Tensor, hx: _Hidden, params: Sequence[Tensor],
    *options: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same of packed sequences."""
    sizes, given = known_lengths(batch_sizes), Options(*options)
    if cudnn_acceptable(data):
        return cudnn_network(build.dropout, mode, data, hx, params, given, batch_sizes=sizes)
    return _step_by_step(mode, data, hx, params, given, packed_layers(sizes))


def _step_by_step(
    mode: str, data: Tensor, hx: Tensor, params: Sequence[Tensor], options: Options, layers: Layers
) -> tuple[Tensor, ...]:
    if mode == "lstm":
        return _lstm_step_by_step(data, hx, params, options, layers)
    weights = gather(params, options.has_biases, projected=False)
    output, final = layer_stack(data, hx.unbind(0), weights, options, layers, _CELLS[mode])
    return output, torch.stack(final, 0)


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


@named("aten.lstm_cell.default")
def _lstm_cell(call: Arguments) -> tuple[Tensor, Tensor]:
    """``at::lstm_cell``, which ``nn.LSTMCell`` calls: one step, never cuDNN's."""
    return lstm_cell(call.input, tuple(call.hx), (call.w_ih, call.w_hh, call.b_ih, call.b_hh, None))


@named("aten.gru_cell.default")
def _gru_cell(call: Arguments) -> Tensor:
    """``at::gru_cell``, which ``nn.GRUCell`` calls: one step, never cuDNN's."""
    return gru_cell(call.input, call.hx, (call.w_ih, call.w_hh, call.b_ih, call.b_hh, None))


#: Recurrent composites -> their decompositions on CUDA; those of whole networks are given the build.
CELLS: dict[OpOverload, Decomposition] = {
    _aten._pad_packed_sequence.default: pad,
    _aten.lstm_cell.default: _lstm_cell,
    _aten.gru_cell.default: _gru_cell,
}
NETWORKS: dict[OpOverload, Decomposition] = {
    _aten._pack_padded_sequence.default: pack,
    **{getattr(_aten, mode).input: partial(_of_one_length, mode) for mode in _CELLS},
    **{getattr(_aten, mode).data: partial(_packed, mode) for mode in _CELLS},
}
