"""Buffers of recurrent kernels: the fused cells, and cuDNN's networks.

The fused cells follow ``aten/src/ATen/native/cuda/RNN.cu``, cuDNN's networks ``aten/src/ATen/native/cudnn/RNN.cpp``;
the memory that cuDNN asks for is in :mod:`graphmem.cudnn.predicted.recurrent`, or asked of the user's library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule
from graphmem.cudnn.predicted.recurrent import algorithm, is_certain, reserve_bytes, workspace_bytes
from graphmem.cudnn.recurrent import STANDARD, Network
from graphmem.labels import CUDNN, CUDNN_ESTIMATE


@recorded_rule("aten._thnn_fused_lstm_cell_backward_impl.default", "aten._thnn_fused_gru_cell_backward.default")
def cell_backward_rule(call: Call) -> Script:
    """The gradients of the gates, of a GRU two, are summed over the batch for the biases (``grad_gates.sum(0)``)."""
    sums = {0: 2} if "lstm" in call.operator else {0: 3, 1: 4}
    script = Script().outputs(*range(len(sums) + 1))
    for gates, bias in sums.items() if call.has_bias else ():
        outputs = [call.outputs[bias]]
        script.call("aten.sum.dim_IntList", call.outputs[gates], [0], card=call.card, outputs=outputs, births=[bias])
    return script


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _network(call: Call) -> Network:
    tensor = call.input
    if call.batch_sizes:
        steps, batch = len(call.batch_sizes), int(call.batch_sizes[0])
    else:
        steps, batch = _steps_first(tensor, call).shape[:2]
    return Network(
        int(call.mode), STANDARD, str(tensor.dtype).removeprefix("torch."), int(steps), int(batch),
        int(tensor.shape[-1]), int(call.hidden_size), int(call.proj_size), int(call.num_layers),
        2 if call.bidirectional else 1, dropout=bool(call.train and call.dropout),
        tf32=torch.backends.cudnn.allow_tf32, lengths=_lengths(call.batch_sizes),
    )  # fmt: skip


def _lengths(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the sequences that a packed batch has so many of at each step (``rnn_descriptor_sequence``)."""
    return tuple(sum(size > index for size in batch_sizes) for index in range(batch_sizes[0] if batch_sizes else 0))


def _steps_first(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    return tensor.transpose(0, 1) if call.batch_first and not call.batch_sizes else tensor


class _Spaces:
    """The buffers that cuDNN asks for to run a network forward or backward."""

    def __init__(self, network: Network, card: Card, *, forward: bool, training: bool) -> None:
        capability = card.device.compute_capability or (0, 0)
        chosen = algorithm(network, capability, card.sm_count, forward=forward)
        network = replace(network, algorithm=chosen)
        asked = card.cudnn.recurrent_spaces(network, training) if card.cudnn_workspaces and card.cudnn else None
        self._none = not card.cudnn_workspaces
        self._label = CUDNN if asked or is_certain(network) else CUDNN_ESTIMATE
        self._work, self._reserve = asked or (
            workspace_bytes(network, capability, training=training),
            reserve_bytes(network),
        )
        if card.cudnn_workspaces and not asked and not is_certain(network):
            card.predicted.add(network)

    @property
    def reserve(self) -> int:
        """Bytes kept from forward to backward."""
        return 0 if self._none else self._reserve

    def take(self, script: Script) -> list[int]:
        """The work space, as a list of none or one token."""
        return [] if self._none else [script.take(self._work, self._label)]


@recorded_rule("aten._cudnn_rnn.default")
def cudnn_rnn_rule(call: Call) -> Script | None:
    network = _network(call)
    script = Script()
    copies = script.contiguous(_steps_first(call.input, call), "contiguous input")
    # The last output is the weight buffer, which is new only if the weights were not flat.
    script.outputs(0, 1, 2, 4)
    spaces = _Spaces(network, call.card, forward=True, training=bool(call.train))
    workspace = spaces.take(script)
    script.output(3, spaces.reserve if call.train else 0)
    return script.give(*workspace, *copies)


@recorded_rule("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward_rule(call: Call) -> Script | None:
    tensor, hx, cx = call.input, call.hx, call.cx
    grad_output, grad_hy, grad_cy = call.grad_output, call.grad_hy, call.grad_cy
    network = _network(call)
    spaces = _Spaces(network, call.card, forward=False, training=True)
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
    script.outputs(0, 1)
    if cx is not None:
        script.output(2)
    script.give(*spaces.take(script), *reversed(copies))
    if call.output_mask[3]:
        _weight_gradients(script, call, spaces, bool(network.projected))
    return script.give(*reversed(zeros))


def _weight_gradients(script: Script, call: Call, spaces: _Spaces, projected: bool) -> None:
    weights, outputs = call.weight, call.outputs
    copies = script.contiguous(_steps_first(call.input, call), "contiguous input")
    first = len(outputs) - len(weights)
    if call.weight_stride0 - projected == 4:
        script.output(first)
        script.give(*spaces.take(script), *copies)
        return
    flat = script.take(bytes_of(call.weight_buf), "gradients of all weights")
    taken = spaces.take(script)
    for index in range(first, len(outputs)):
        script.output(index)
    script.give(*taken, flat, *copies)
