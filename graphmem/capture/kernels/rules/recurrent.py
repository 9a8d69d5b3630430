"""Buffers of recurrent kernels: the fused cells, and cuDNN's networks.

The fused cells follow ``aten/src/ATen/native/cuda/RNN.cu``, cuDNN's networks ``aten/src/ATen/native/cudnn/RNN.cpp``.

cuDNN tells the sizes of its reserve and work space by ``cudnnGetRNNTempSpaceSizes``. Asked without a device it returns
them together with an error; from 153 such answers of cuDNN 9.20 (``tests/oracles/cudnn/ask_rnn.py``) the reserve is
known to the block. The work space is not: its main parts are, and the rest depends on the algorithm that PyTorch
chooses (``get_algo``, the same file: one of its own for few hidden values), so it is labelled an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule

_RELU, _TANH, _LSTM, _GRU = range(4)


@rule("aten._thnn_fused_lstm_cell.default")
def lstm_cell_rule(call: Call) -> Script | None:
    return Script().output(2).output(0).output(1)


@rule("aten._thnn_fused_gru_cell.default")
def gru_cell_rule(call: Call) -> Script | None:
    return Script().output(1).output(0)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """What cuDNN's sizes depend on."""

    mode: int
    steps: int
    batch: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    directions: int
    dtype: torch.dtype

    @property
    def state(self) -> int:
        """Bytes of one hidden state of every step."""
        return self.steps * self.batch * self.hidden * int(self.dtype.itemsize)


#: Hidden states that a layer keeps of every step for its backward pass: activations of the gates, cell states.
_KEPT = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 6}
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}
_CUBLAS_WORKSPACE = 8 << 20
_ALIGNMENT = 256


def reserve_bytes(network: Network) -> int:
    """Reserve space: what every layer keeps, the outputs between layers, and with a projection the states before it."""
    kept = (_KEPT[network.mode] * network.layers + network.layers - 1) * network.directions * network.state
    if network.projected:
        states = network.state + network.steps * network.batch * network.projected * int(network.dtype.itemsize)
        kept += network.layers * network.directions * states
    return -(-kept // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT


def workspace_bytes(network: Network) -> int:
    """Work space: a cuBLAS workspace for every layer and direction, a copy of the weight matrices and of the input, and
    intermediate states of every step, whose number depends on the algorithm that fits (:data:`_STATES`)."""
    e = int(network.dtype.itemsize)
    outputs = network.projected or network.hidden
    matrices = 0
    for layer in range(network.layers):
        inputs = network.inputs if layer == 0 else outputs * network.directions
        matrices += _GATES[network.mode] * network.hidden * (inputs + outputs) + network.hidden * network.projected
    few = network.hidden < _MANY_HIDDEN and network.dtype in (torch.float32, torch.float16)
    states = _STATES[few][network.mode][network.directions - 1] * network.state
    copied = network.steps * network.batch * network.inputs * e
    fixed = network.layers * network.directions * _CUBLAS_WORKSPACE
    return fixed + matrices * network.directions * e + int(states) + copied


_MANY_HIDDEN = 256
#: With few hidden values or many -> mode -> states of every step in a network of one direction, and of two.
_STATES: dict[bool, dict[int, tuple[float, float]]] = {
    True: {_RELU: (13.5, 21), _TANH: (13.5, 21), _LSTM: (21, 31), _GRU: (18.5, 25.5)},
    False: {_RELU: (4, 13), _TANH: (4, 13), _LSTM: (6, 15), _GRU: (4.5, 13)},
}


def _network(call: Call) -> Network:
    tensor = call.input
    if call.batch_sizes:
        steps, batch = len(call.batch_sizes), int(call.batch_sizes[0])
    else:
        steps, batch = _steps_first(tensor, call).shape[:2]
    return Network(
        int(call.mode), int(steps), int(batch), int(tensor.shape[-1]), int(call.hidden_size), int(call.proj_size),
        int(call.num_layers), 2 if call.bidirectional else 1, tensor.dtype,
    )  # fmt: skip


def _steps_first(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    return tensor.transpose(0, 1) if call.batch_first and not call.batch_sizes else tensor


def _take_workspace(script: Script, network: Network, card: Card) -> list[int]:
    if not card.cudnn_workspaces:
        return []
    return [script.take(workspace_bytes(network), "cuDNN workspace (estimate)")]


@rule("aten._cudnn_rnn.default")
def cudnn_rnn_rule(call: Call) -> Script | None:
    network = _network(call)
    script = Script()
    copies = script.contiguous(_steps_first(call.input, call), "contiguous input")
    # The last output is the weight buffer, which is new only if the weights were not flat.
    script.output(0).output(1).output(2).output(4)
    workspace = _take_workspace(script, network, call.card)
    script.output(3, reserve_bytes(network) if call.train and call.card.cudnn_workspaces else 0)
    script.give(*workspace, *copies)
    return script


@rule("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward_rule(call: Call) -> Script | None:
    tensor, hx, cx = call.input, call.hx, call.cx
    grad_output, grad_hy, grad_cy = call.grad_output, call.grad_hy, call.grad_cy
    network = _network(call)
    script = Script()
    zeros = [] if grad_output is not None else [script.take(bytes_of(call.output), "zero gradient of the output")]
    zeros += [] if grad_hy is not None else [script.take(bytes_of(hx), "zero gradient of the hidden state")]
    if cx is not None and grad_cy is None:
        zeros.append(script.take(bytes_of(cx), "zero gradient of the cell state"))
    steps = _steps_first(call.input, call)
    copies = script.contiguous(steps, "contiguous input")
    if grad_output is not None:
        copies += script.contiguous(_steps_first(grad_output, call), "contiguous gradient")
    elif steps is not tensor and min(steps.shape[:2]) > 1:
        copies.append(script.take(bytes_of(call.output), "contiguous gradient"))  # of the zeros, which are batch first
    script.output(0).output(1)
    if cx is not None:
        script.output(2)
    script.give(*_take_workspace(script, network, call.card), *reversed(copies))
    if call.output_mask[3]:
        _weight_gradients(script, call, network)
    script.give(*reversed(zeros))
    return script


def _weight_gradients(script: Script, call: Call, network: Network) -> None:
    weights, outputs, card = call.weight, call.outputs, call.card
    copies = script.contiguous(_steps_first(call.input, call), "contiguous input")
    first = len(outputs) - len(weights)
    if call.weight_stride0 - bool(network.projected) == 4:
        script.output(first)
        script.give(*_take_workspace(script, network, card), *copies)
        return
    flat = script.take(bytes_of(call.weight_buf), "gradients of all weights")
    taken = _take_workspace(script, network, card)
    for index in range(first, len(outputs)):
        script.output(index)
    script.give(*taken, flat, *copies)
