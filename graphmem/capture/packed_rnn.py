"""Packed sequences: packing, padding, and recurrent networks on them, as CUDA runs them.

The lengths are values. A list or a small host tensor of numbers is known in an analysis; lengths that come from the
device are not, and are refused. Sources (PyTorch 2.13): ``aten/src/ATen/native/PackedSequence.cpp``
(``_pack_padded_sequence`` and its backward), ``RNN.cpp`` (PackedLayer, ReversedPackedLayer, PackedBidirectionalLayer),
``cudnn/RNN.cpp`` (``_cudnn_impl`` of packed inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.capture.rnn import (
    Cell,
    Weights,
    cudnn,
    cudnn_acceptable,
    gather,
    gru_cell,
    lstm_cell,
    simple_cell,
)
from graphmem.errors import CaptureError

_aten = torch.ops.aten


def packed_rnn_substitutes() -> dict[Any, Callable[..., Any]]:
    """By operator: what CUDA's version calls."""
    return {
        _aten._pack_padded_sequence.default: _pack,
        _aten._pad_packed_sequence.default: _pad,
        _aten.lstm.data: _lstm,
        _aten.gru.data: _one_hidden("gru", gru_cell),
        _aten.rnn_tanh.data: _one_hidden("rnn_tanh", simple_cell(torch.tanh)),
        _aten.rnn_relu.data: _one_hidden("rnn_relu", simple_cell(torch.relu)),
    }


def _known(tensor: Tensor) -> list[int]:
    """The numbers of a host tensor. Raises :class:`CaptureError` where an analysis does not have them."""
    if isinstance(tensor, FakeTensor):
        raise CaptureError(
            "the lengths of packed sequences are values of a tensor, and an analysis has only shapes; give "
            "pack_padded_sequence a list of numbers, or a tensor made of numbers on the host"
        )
    with unset_fake_temporarily():
        numbers: list[int] = tensor.tolist()
    return numbers


# --- packing ----------------------------------------------------------------------------------------------------------


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    return _Pack.apply(input, _known(lengths), batch_first)  # type: ignore[no-any-return]


class _Pack(torch.autograd.Function):  # type: ignore[misc]
    """``_pack_padded_sequence``: blocks of steps with one batch size are made contiguous, then joined."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, lengths: list[int], batch_first: bool) -> tuple[Tensor, Tensor]:
        steps = input.transpose(0, 1) if batch_first else input
        blocks, sizes, before = [], [], 0
        for index in range(len(lengths)):
            length, size = lengths[-1 - index], len(lengths) - index
            if length > before:
                block = steps[before:length, :size].contiguous()
                blocks.append(block.view(-1, *steps.shape[2:]))
                sizes += [size] * (length - before)
                before = length
        del block
        ctx.shape, ctx.sizes, ctx.batch_first = steps.shape, sizes, batch_first
        batch_sizes = torch.tensor(sizes)
        ctx.mark_non_differentiable(batch_sizes)
        packed = torch.cat(blocks)
        while blocks:  # C++ destroys a vector from the first element on
            del blocks[0]
        return packed, batch_sizes

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        gradient = gradients[0].new_zeros(ctx.shape)
        return (gradient.transpose(0, 1) if ctx.batch_first else gradient), None, None


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """``_pad_packed_sequence``: blocks of steps with one batch size are copied into a tensor full of the padding."""
    sizes = _known(batch_sizes)
    length = max(total_length, len(sizes))
    output = torch.full((length, sizes[0], *data.shape[1:]), padding_value, dtype=data.dtype, device=data.device)
    lengths: list[int] = []
    before = offset = 0
    for step, size in enumerate([*sizes, 0]):
        last = sizes[max(0, step - 1)]
        if size == last:
            continue
        count = last * (step - before)
        block = data[offset : offset + count].view(step - before, last, *data.shape[1:])
        output[before:step].narrow(1, 0, last).copy_(block)
        lengths = [step] * (last - size) + lengths
        offset, before = offset + count, step
    return (output.transpose(0, 1) if batch_first else output), torch.tensor(lengths)


# --- networks ---------------------------------------------------------------------------------------------------------


def _lstm(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``at::lstm`` of packed sequences."""
    sizes = _known(batch_sizes)
    options = (params, has_biases, num_layers, dropout, train, bidirectional, False)
    if cudnn_acceptable(data):
        return cudnn("lstm", data, hx[0], hx[1], *options, batch_sizes=sizes)
    hidden = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    weights = gather(params, has_biases, projected=hx[0].shape[2] != hx[1].shape[2])
    output, final = _layers(data, sizes, hidden, weights, num_layers, dropout, train, bidirectional, lstm_cell)
    del hidden
    hidden_states, cell_states = [h for h, _ in final], [c for _, c in final]
    del final
    cy = torch.stack(cell_states, 0)  # first: C++ evaluates arguments from right to left
    hy = torch.stack(hidden_states, 0)
    del cell_states
    return output, hy, cy


def _one_hidden(mode: str, cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def rnn(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Tensor,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, Tensor]:
        """``at::gru``, ``at::rnn_tanh``, ``at::rnn_relu`` of packed sequences."""
        sizes = _known(batch_sizes)
        if cudnn_acceptable(data):
            options = (params, has_biases, num_layers, dropout, train, bidirectional, False)
            return cudnn(mode, data, hx, None, *options, batch_sizes=sizes)[:2]
        weights = gather(params, has_biases, projected=False)
        output, final = _layers(data, sizes, hx.unbind(0), weights, num_layers, dropout, train, bidirectional, cell)
        return output, torch.stack(final, 0)

    return rnn


def _layers(
    data: Tensor,
    sizes: Sequence[int],
    hidden: Sequence[Any],
    weights: Sequence[Weights],
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    cell: Cell,
) -> tuple[Tensor, list[Any]]:
    """``apply_layer_stack``: data of the last layer, and the final hidden states."""
    output, final = data, []
    for layer in range(num_layers):
        if bidirectional:
            pair = slice(2 * layer, 2 * layer + 2)
            output, ends = _both_directions(output, sizes, hidden[pair], weights[pair], cell)
            final += ends
        else:
            output, end = _forward(output, sizes, hidden[layer], weights[layer], cell)
            final.append(end)
        if dropout != 0 and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
    return output, final


def _forward(data: Tensor, sizes: Sequence[int], hidden: Any, weights: Weights, cell: Cell) -> tuple[Tensor, Any]:
    """``PackedLayer``: the states of sequences that end are put aside."""
    outputs, ended, start, last = [], [], 0, sizes[0]
    for size in sizes:
        step = data.narrow(0, start, size)
        start += size
        if size < last:
            ended.append(_sliced(hidden, size, last))
            hidden = _sliced(hidden, 0, size)
        last = size
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    ended.append(hidden)
    return torch.cat(outputs, 0), _joined(ended[::-1])


def _backward(data: Tensor, sizes: Sequence[int], first: Any, weights: Weights, cell: Cell) -> tuple[Tensor, Any]:
    """``ReversedPackedLayer``: sequences join as their last step is reached."""
    outputs, start, last = [], data.shape[0], sizes[-1]
    hidden = _sliced(first, 0, last)
    for size in reversed(sizes):
        if size > last:
            hidden = _joined([hidden, _sliced(first, last, size)])
        step = data.narrow(0, start - size, size)
        start -= size
        last = size
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return torch.cat(outputs[::-1], 0), hidden


def _both_directions(
    data: Tensor, sizes: Sequence[int], hidden: Sequence[Any], weights: Sequence[Weights], cell: Cell
) -> tuple[Tensor, list[Any]]:
    """``PackedBidirectionalLayer``."""
    forward, forward_end = _forward(data, sizes, hidden[0], weights[0], cell)
    backward, backward_end = _backward(data, sizes, hidden[1], weights[1], cell)
    return torch.cat([forward, backward], -1), [forward_end, backward_end]


def _sliced(hidden: Any, start: int, end: int) -> Any:
    """``hidden_slice``; C++ evaluates arguments from right to left, here and below."""
    if isinstance(hidden, tuple):
        return tuple(part.narrow(0, start, end - start) for part in reversed(hidden))[::-1]
    return hidden.narrow(0, start, end - start)


def _joined(parts: Sequence[Any]) -> Any:
    """``hidden_concat``."""
    if isinstance(parts[0], tuple):
        return tuple(torch.cat([part[index] for part in parts], 0) for index in reversed(range(len(parts[0]))))[::-1]
    return torch.cat(list(parts), 0)
