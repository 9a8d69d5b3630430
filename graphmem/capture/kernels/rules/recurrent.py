"""Buffers of recurrent kernels: the fused cells, and cuDNN's networks.

The fused cells follow ``aten/src/ATen/native/cuda/RNN.cu``, cuDNN's networks ``aten/src/ATen/native/cudnn/RNN.cpp``;
what cuDNN asks for is in :mod:`graphmem.cudnn.predicted.recurrent`, or asked of the user's library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule
from graphmem.cudnn.predicted.recurrent import algorithm, is_certain, reserve_bytes, workspace_bytes
from graphmem.cudnn.recurrent import STANDARD, Network
from graphmem.labels import CUDNN, CUDNN_ESTIMATE


@rule("aten._thnn_fused_lstm_cell.default")
def lstm_cell_rule(call: Call) -> Script | None:
    return Script().output(2).output(0).output(1)


@rule("aten._thnn_fused_gru_cell.default")
def gru_cell_rule(call: Call) -> Script | None:
    return Script().output(1).output(0)


@rule("aten._thnn_fused_lstm_cell_backward_impl.default")
def lstm_cell_backward_rule(call: Call) -> Script | None:
    """``_thnn_fused_lstm_cell_backward_impl_cuda`` sums the gradients of the gates over the batch for the biases."""
    script = Script().output(0).output(1)
    if call.has_bias:
        _sum_over_batch(script, call, 0, 2)
    return script


@rule("aten._thnn_fused_gru_cell_backward.default")
def gru_cell_backward_rule(call: Call) -> Script | None:
    """``_thnn_fused_gru_cell_backward_cuda`` sums both gradients of the gates over the batch for the biases."""
    script = Script().output(0).output(1).output(2)
    if call.has_bias:
        _sum_over_batch(script, call, 0, 3)
        _sum_over_batch(script, call, 1, 4)
    return script


def _sum_over_batch(script: Script, call: Call, gates: int, bias: int) -> None:
    """``grad_gates.sum(0)``; both are given by their numbers among the outputs."""
    gradients, sums = call.outputs[gates], call.outputs[bias]
    script.call("aten.sum.dim_IntList", gradients, [0], False, card=call.card, outputs=[sums], births=[bias])


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
        told = card.cudnn.recurrent_spaces(network, training) if card.cudnn_workspaces and card.cudnn else None
        self._none = not card.cudnn_workspaces
        self._label = CUDNN if told or is_certain(network) else CUDNN_ESTIMATE
        self._work, self._reserve = told or (
            workspace_bytes(network, capability, training=training),
            reserve_bytes(network),
        )
        if card.cudnn_workspaces and not told and not is_certain(network):
            card.predicted.add(network)

    @property
    def reserve(self) -> int:
        """Bytes kept from forward to backward."""
        return 0 if self._none else self._reserve

    def take(self, script: Script) -> list[int]:
        """The work space, as a list of none or one token."""
        return [] if self._none else [script.take(self._work, self._label)]


@rule("aten._cudnn_rnn.default")
def cudnn_rnn_rule(call: Call) -> Script | None:
    network = _network(call)
    script = Script()
    copies = script.contiguous(_steps_first(call.input, call), "contiguous input")
    # The last output is the weight buffer, which is new only if the weights were not flat.
    script.output(0).output(1).output(2).output(4)
    spaces = _Spaces(network, call.card, forward=True, training=bool(call.train))
    workspace = spaces.take(script)
    script.output(3, spaces.reserve if call.train else 0)
    script.give(*workspace, *copies)
    return script


@rule("aten._cudnn_rnn_backward.default")
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
    script.output(0).output(1)
    if cx is not None:
        script.output(2)
    script.give(*spaces.take(script), *reversed(copies))
    if call.output_mask[3]:
        _weight_gradients(script, call, spaces, bool(network.projected))
    script.give(*reversed(zeros))
    return script


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
