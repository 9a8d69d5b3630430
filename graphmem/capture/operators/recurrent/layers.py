"""Layers of recurrent networks, step by step, on sequences of one length and on packed ones.

C++ destroys locals and temporaries in its own order; where storages depend on it, that order is written out.
Source: ``aten/src/ATen/native/RNN.cpp`` of PyTorch 2.13, whose names are given below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphmem.capture.operators.recurrent.cells import Cell, Hidden, Weights


class Options(NamedTuple):
    """The options of a recurrent operator's network, in the order of its arguments."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


class Layers(NamedTuple):
    """Runs one layer: data, hidden state and weights (two each for both directions), cell -> data, final states."""

    one_way: Callable[[Tensor, Hidden, Weights, Cell], tuple[Tensor, Hidden]]
    both_ways: Callable[[Tensor, Sequence[Hidden], Sequence[Weights], Cell], tuple[Tensor, list[Hidden]]]


def gather(params: Sequence[Tensor], has_biases: bool, projected: bool) -> list[Weights]:
    """``gather_params``: the flat list, layer by layer and direction by direction."""
    width = (4 if has_biases else 2) + projected
    layers: list[Weights] = []
    for start in range(0, len(params), width):
        part = params[start : start + width]
        biases = (part[2], part[3]) if has_biases else (None, None)
        layers.append((part[0], part[1], *biases, part[-1] if projected else None))
    return layers


def layer_stack(
    data: Tensor, hidden: Sequence[Hidden], weights: Sequence[Weights], options: Options, layers: Layers, cell: Cell
) -> tuple[Tensor, list[Hidden]]:
    """``apply_layer_stack``: data of the last layer, and the final hidden states."""
    final: list[Hidden] = []
    for layer in range(options.num_layers):
        if options.bidirectional:
            pair = slice(2 * layer, 2 * layer + 2)
            data, ends = layers.both_ways(data, hidden[pair], weights[pair], cell)
            final += ends
        else:
            data, end = layers.one_way(data, hidden[layer], weights[layer], cell)
            final.append(end)
        if options.dropout != 0 and options.train and layer < options.num_layers - 1:
            data = torch.dropout(data, options.dropout, True)
    return data, final


# --- sequences of one length ------------------------------------------------------------------------------------------


def plain_layers() -> Layers:
    """Layers over data of shape (steps, batch, features)."""
    return Layers(_one_way, _both_ways)


def _one_way(data: Tensor, hidden: Hidden, weights: Weights, cell: Cell) -> tuple[Tensor, Hidden]:
    """``FullLayer`` of a whole tensor."""
    outputs, end = _steps(data.unbind(0), hidden, weights, cell)
    return torch.stack(outputs, 0), end


def _steps(inputs: Sequence[Tensor], hidden: Hidden, weights: Weights, cell: Cell) -> tuple[list[Tensor], Hidden]:
    """``FullLayer``."""
    outputs = []
    for step in inputs:
        hidden = cell(step, hidden, weights)
        outputs.append(hidden[0] if isinstance(hidden, tuple) else hidden)
    return outputs, hidden


def _both_ways(
    data: Tensor, hidden: Sequence[Hidden], weights: Sequence[Weights], cell: Cell
) -> tuple[Tensor, list[Hidden]]:
    """``FullBidirectionalLayer``."""
    inputs = data.unbind(0)
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


# --- packed sequences -------------------------------------------------------------------------------------------------


def packed_layers(sizes: Sequence[int]) -> Layers:
    """Layers over packed data of shape (values, features) with a batch of ``sizes[t]`` at step ``t``."""

    def one_way(data: Tensor, hidden: Hidden, weights: Weights, cell: Cell) -> tuple[Tensor, Hidden]:
        return _forward(data, sizes, hidden, weights, cell)

    def both_ways(
        data: Tensor, hidden: Sequence[Hidden], weights: Sequence[Weights], cell: Cell
    ) -> tuple[Tensor, list[Hidden]]:
        """``PackedBidirectionalLayer``."""
        forward, forward_end = _forward(data, sizes, hidden[0], weights[0], cell)
        backward, backward_end = _backward(data, sizes, hidden[1], weights[1], cell)
        return torch.cat([forward, backward], -1), [forward_end, backward_end]

    return Layers(one_way, both_ways)


def _forward(data: Tensor, sizes: Sequence[int], hidden: Hidden, weights: Weights, cell: Cell) -> tuple[Tensor, Hidden]:
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


def _backward(data: Tensor, sizes: Sequence[int], first: Hidden, weights: Weights, cell: Cell) -> tuple[Tensor, Hidden]:
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


def _sliced(hidden: Hidden, start: int, end: int) -> Hidden:
    """``hidden_slice``; C++ evaluates arguments from right to left, here and below."""
    if isinstance(hidden, tuple):
        return tuple(part.narrow(0, start, end - start) for part in reversed(hidden))[::-1]
    return hidden.narrow(0, start, end - start)


def _joined(parts: Sequence[Hidden]) -> Hidden:
    """``hidden_concat``."""
    if isinstance(parts[0], tuple):
        return tuple(torch.cat([part[index] for part in parts], 0) for index in reversed(range(len(parts[0]))))[::-1]
    return torch.cat(list(parts), 0)
