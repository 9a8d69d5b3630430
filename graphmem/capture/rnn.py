"""Recurrent networks as CUDA runs them: cuDNN's fused kernels, or fused cells step by step where cuDNN is not used.

The composites ``lstm``, ``gru`` and ``rnn_*`` of a CPU build multiply all inputs of a layer at once; on CUDA every step
does its own products, and a fused cell does the rest (``aten/src/ATen/native/RNN.cpp``: FullLayer, LSTMCell, GRUCell).
With cuDNN one operator runs all steps and layers on a flat buffer of the weights
(``aten/src/ATen/native/cudnn/RNN.cpp``). Packed sequences: ``packed_rnn``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphmem.capture.fakes import Patches
from graphmem.capture.kernels.script import Card

_aten = torch.ops.aten
_CUDNN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: ``torch.backends.cudnn.CUDNN_TENSOR_DTYPES``: what ``flatten_parameters`` accepts, which leaves bfloat16 out.
_FLATTENED_DTYPES = (torch.float16, torch.float32, torch.float64)
#: cudnnRNNMode_t, and the gates of each mode.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}

#: Weights of one layer in one direction: w_ih, w_hh, b_ih, b_hh, w_hr.
Weights = tuple[Tensor, Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]
#: One step: input, hidden state (LSTM: with cell state), weights -> the next hidden state.
Cell = Callable[..., Any]


def rnn_substitutes(card: Card) -> dict[Any, Callable[..., Any]]:
    """By operator: what CUDA's version of a recurrent composite calls."""
    del card
    return {
        _aten.lstm.input: _lstm,
        _aten.gru.input: _one_hidden("gru", gru_cell),
        _aten.rnn_tanh.input: _one_hidden("rnn_tanh", simple_cell(torch.tanh)),
        _aten.rnn_relu.input: _one_hidden("rnn_relu", simple_cell(torch.relu)),
    }


def rnn_fakes() -> dict[str, Callable[..., Any]]:
    """By operator name: shapes of recurrent kernels whose meta kernel is missing or wants more than callers give."""
    return {
        "aten::_thnn_fused_lstm_cell": _fused_lstm_cell,
        "aten::_thnn_fused_gru_cell": _fused_gru_cell,
        "aten::_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
        "aten::_cudnn_rnn": _cudnn_rnn,
        "aten::_cudnn_rnn_backward": _cudnn_rnn_backward,
    }


def patch_rnn_modules(patches: Patches) -> None:
    """``nn.RNNBase.flatten_parameters`` for fake device tensors, until ``patches`` are undone."""
    patches.set(nn.RNNBase, "flatten_parameters", _flatten_parameters)


# --- operators --------------------------------------------------------------------------------------------------------


def _lstm(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``at::lstm``."""
    if cudnn_acceptable(input):
        return cudnn(
            "lstm", input, hx[0], hx[1], params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    steps = input.transpose(0, 1) if batch_first else input
    hidden = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    weights = gather(params, has_biases, projected=hx[0].shape[2] != hx[1].shape[2])
    output, final = _layers(steps, hidden, weights, num_layers, dropout, train, bidirectional, lstm_cell)
    del hidden
    hidden_states, cell_states = [h for h, _ in final], [c for _, c in final]
    del final
    cy = torch.stack(cell_states, 0)  # first: C++ evaluates arguments from right to left
    hy = torch.stack(hidden_states, 0)
    del cell_states
    return (output.transpose(0, 1) if batch_first else output), hy, cy


def _one_hidden(mode: str, cell: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rnn(
        input: Tensor,
        hx: Tensor,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """``at::gru``, ``at::rnn_tanh``, ``at::rnn_relu``."""
        if cudnn_acceptable(input):
            return cudnn(
                mode, input, hx, None, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
            )[:2]
        steps = input.transpose(0, 1) if batch_first else input
        weights = gather(params, has_biases, projected=False)
        output, final = _layers(steps, hx.unbind(0), weights, num_layers, dropout, train, bidirectional, cell)
        hy = torch.stack(final, 0)
        return (output.transpose(0, 1) if batch_first else output), hy

    return rnn


def cudnn_acceptable(input: Tensor) -> bool:
    """``at::cudnn_is_acceptable``."""
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_DTYPES and input.numel() > 0


def gather(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[Weights]:
    """``gather_params``: the flat list, layer by layer and direction by direction."""
    width = (4 if has_biases else 2) + projected
    layers: list[Weights] = []
    for start in range(0, len(params), width):
        part = params[start : start + width]
        biases = (part[2], part[3]) if has_biases else (None, None)
        layers.append((part[0], part[1], *biases, part[-1] if projected else None))
    return layers


# --- step by step -----------------------------------------------------------------------------------------------------


def _layers(
    input: Tensor,
    hidden: Sequence[Any],
    weights: Sequence[Weights],
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    cell: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """``apply_layer_stack``: outputs of the last layer, and the final hidden states."""
    output, final = input, []
    for layer in range(num_layers):
        if bidirectional:
            pair = slice(2 * layer, 2 * layer + 2)
            output, ends = _both_directions(output, hidden[pair], weights[pair], cell)
            final += ends
        else:
            outputs, end = _steps(output.unbind(0), hidden[layer], weights[layer], cell)
            stacked = torch.stack(outputs, 0)
            del outputs  # before the layer's input, as in C++
            output = stacked
            del stacked
            final.append(end)
        if dropout != 0 and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
    return output, final


def _steps(
    inputs: Sequence[Tensor], hidden: Any, weights: Weights, cell: Callable[..., Any]
) -> tuple[list[Tensor], Any]:
    """``FullLayer``."""
    outputs = []
    for step in inputs:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return outputs, hidden


def _both_directions(
    input: Tensor, hidden: Sequence[Any], weights: Sequence[Weights], cell: Callable[..., Any]
) -> tuple[Tensor, list[Any]]:
    """``FullBidirectionalLayer``."""
    inputs = input.unbind(0)
    forward, forward_end = _steps(inputs, hidden[0], weights[0], cell)
    forward_output = torch.stack(forward, 0)
    backward, backward_end = _steps(inputs[::-1], hidden[1], weights[1], cell)
    backward_output = torch.stack(backward[::-1], 0)
    output = torch.cat([forward_output, backward_output], -1)
    # C++ destroys locals from last to first.
    del backward_output
    del backward
    del forward_output
    del forward
    return output, [forward_end, backward_end]


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


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def cudnn(
    mode: str,
    input: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``_cudnn_impl``: one operator on the flat weights, which are gathered for every call if they are not flat."""
    hidden_size, proj_size = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hx.shape[2]:
        hidden_size, proj_size = cx.shape[2], hx.shape[2]
    with torch.no_grad():
        buffer = _weight_buffer(params, _flat_size(_MODES[mode], params, has_biases, hidden_size, len(hx)))
    result = _aten._cudnn_rnn.default(
        input, params, (4 if has_biases else 2) + (proj_size != 0), buffer, hx, cx, _MODES[mode], hidden_size,
        proj_size, num_layers, batch_first, dropout, train, bidirectional, list(batch_sizes), None,
    )  # fmt: skip
    return result[0], result[1], result[2]


def _flat_size(mode: int, params: Sequence[Tensor], has_biases: bool, hidden_size: int, layers: int) -> int:
    """Values in cuDNN's weight space: the weights as they are, and two biases of every layer even where unused.

    Observed from cudnnGetRNNWeightSpaceSize of cuDNN 9.20, which adds no padding. ``layers`` counts both directions.
    """
    numbers = sum(int(p.numel()) for p in params)
    return numbers if has_biases else numbers + layers * 2 * _GATES[mode] * hidden_size


def _weight_buffer(params: Sequence[Tensor], size: int) -> Tensor | None:
    """``try_get_weight_buf``: the buffer that the parameters lie in, if they do."""
    first = params[0]
    storage = first.untyped_storage()
    if storage.nbytes() < size * first.element_size():
        return None
    if any(p.untyped_storage()._cdata != storage._cdata for p in params):
        return None
    return first.detach().as_strided((size,), (1,), 0)


def _cudnn_rnn(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Any,
) -> tuple[Tensor, ...]:
    """The size of the reserve is the rule's matter (``capture.kernels.recurrent``)."""
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    steps_first = (input.shape[1], input.shape[0]) if batch_first and not batch_sizes else input.shape[:-1]
    output = input.new_empty((*steps_first, width))
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    if weight_buf is None:
        has_biases = weight_stride0 - (proj_size != 0) == 4
        weight_buf = input.new_empty(_flat_size(mode, weight, has_biases, hidden_size, hx.shape[0]))
    return output, hy, cy, input.new_empty(0, dtype=torch.uint8), weight_buf


def _cudnn_rnn_backward(
    input: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_output: Any,
    grad_hy: Any,
    grad_cy: Any,
    *options: Any,
) -> tuple[Any, ...]:
    """Gradients of the weights are views into one buffer, like the weights."""
    batch_first, packed = options[4], bool(options[8])
    steps = input.transpose(0, 1) if batch_first and not packed else input
    dx = torch.empty_like(steps, memory_format=torch.contiguous_format)
    if batch_first and not packed:
        dx = dx.transpose(0, 1)
    dhx = torch.empty_like(hx, memory_format=torch.contiguous_format)
    dcx = None if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    if not options[-1][3]:
        return dx, dhx, dcx, [input.new_empty(0) for _ in weight]
    if weight_stride0 - (cx is not None and cx.shape[2] != hx.shape[2]) != 4:
        # Without biases the views would not line up with the weights: they are copied out of the buffer.
        return dx, dhx, dcx, [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weight]
    return dx, dhx, dcx, _views(torch.empty_like(weight_buf), weight)


def _views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """One view of ``flat`` for every weight; where each lies does not matter to memory."""
    views, offset = [], 0
    for weight in weights:
        size = math.prod(weight.shape)
        views.append(flat[offset : offset + size].view(weight.shape))
        offset += size
    return views


def _flatten_parameters(self: nn.RNNBase) -> None:
    """Moves the weights into one flat buffer, as ``flatten_parameters`` does on a card that has cuDNN."""
    weights = self._flat_weights
    complete = len(weights) == len(self._flat_weights_names) and all(isinstance(w, Tensor) for w in weights)
    if not complete or not torch.backends.cudnn.enabled or not all(w.is_cuda for w in weights):
        return
    dtype = weights[0].dtype
    if dtype not in _FLATTENED_DTYPES or any(w.dtype != dtype for w in weights):
        return
    if len({id(w) for w in weights}) != len(weights):
        return
    mode = _MODES[self.mode.lower()]
    with torch.no_grad():
        layers = self.num_layers * (2 if self.bidirectional else 1)
        flat = weights[0].new_zeros(_flat_size(mode, weights, self.bias, self.hidden_size, layers))
        for weight, view in zip(weights, _views(flat, weights), strict=True):
            weight.data = view
