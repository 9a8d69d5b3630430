"""cuDNN's recurrent networks: one operator runs all steps and layers on a flat buffer of the weights.

Source: ``aten/src/ATen/native/cudnn/RNN.cpp`` of PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphmem.capture.kernels.parts.script import Arguments, Card, named
from graphmem.capture.operators import Shapes
from graphmem.capture.operators.recurrent.layers import Options
from graphmem.capture.patches import Patches
from graphmem.capture.values import generators
from graphmem.cudnn.predicted.recurrent import states_bytes

_aten = torch.ops.aten
_CUDNN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: ``torch.backends.cudnn.CUDNN_TENSOR_DTYPES``: what ``flatten_parameters`` accepts, which leaves bfloat16 out.
_FLATTENED_DTYPES = (torch.float16, torch.float32, torch.float64)
#: cudnnRNNMode_t, and the gates of each mode.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}


def patch_rnn_modules(patches: Patches) -> None:
    """``nn.RNNBase.flatten_parameters`` for fake device tensors, until ``patches`` are undone."""
    patches.set(nn.RNNBase, "flatten_parameters", _flatten_parameters)


def cudnn_acceptable(input: Tensor) -> bool:
    """``at::cudnn_is_acceptable``."""
    return torch.backends.cudnn.enabled and input.dtype in _CUDNN_DTYPES and input.numel() > 0


class DropoutState:
    """``DropoutState`` of a device: cuDNN's generators, made when a network first wants dropout, and anew after the
    program has seeded the device (``get_dropout_state``). They stay until the process ends."""

    def __init__(self, card: Card) -> None:
        self._size = states_bytes(card.sm_count, card.max_threads_per_sm) if card.cudnn_workspaces else 0
        self._buffer: Tensor | None = None
        self._seedings = 0

    def buffer(self, options: Options, device: torch.device) -> Tensor | None:
        if not options.train or not options.dropout:
            return self._buffer
        seedings = generators.current().device_seedings
        if self._buffer is None or self._seedings != seedings:
            self._seedings = seedings
            with torch.no_grad():
                torch.empty((), dtype=torch.int64, device=device)  # cuDNN's seed, read back
                self._buffer = torch.empty(self._size, dtype=torch.uint8, device=device)
        return self._buffer


def cudnn_network(
    state: DropoutState, mode: str, input: Tensor, hidden: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    options: Options, batch_first: bool = False, batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """``_cudnn_impl``: one operator on the flat weights, which are gathered for every call if they are not flat.
    ``hidden``: of an LSTM the hidden state and the cell state."""
    hx, cx = (hidden, None) if isinstance(hidden, Tensor) else hidden
    hidden_size, proj_size = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hx.shape[2]:
        hidden_size, proj_size = cx.shape[2], hx.shape[2]
    with torch.no_grad():
        buffer = _weight_buffer(params, _flat_size(_MODES[mode], params, options.has_biases, hidden_size, len(hx)))
    result = _aten._cudnn_rnn.default(
        input, params, (4 if options.has_biases else 2) + (proj_size != 0), buffer, hx, cx, _MODES[mode], hidden_size,
        proj_size, options.num_layers, batch_first, options.dropout, options.train, options.bidirectional,
        list(batch_sizes), state.buffer(options, input.device),
    )  # fmt: skip
    return tuple(result[:2] if cx is None else result[:3])


def weights_in_half(
    weights: Sequence[Tensor], weight_stride0: int, mode: int, hidden_size: int, proj_size: int, layers: int
) -> tuple[Tensor, list[Tensor]]:
    """``copy_weights_to_flat_buf_views`` for autocast: a new flat buffer, and the weights as copies that lie in it and
    know where they come from. ``layers`` counts both directions."""
    has_biases = weight_stride0 - (proj_size != 0) == 4
    flat = weights[0].new_zeros(_flat_size(mode, weights, has_biases, hidden_size, layers), dtype=torch.float16)
    copies = [view.detach() for view in _views(flat, weights)]
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
    return flat, copies


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


@named("aten._cudnn_rnn.default")
def _cudnn_rnn(call: Arguments) -> tuple[Tensor, ...]:
    """The size of the reserve is the rule's matter (``capture.kernels.rules.recurrent``)."""
    input, hx, cx, weight_buf = call.input, call.hx, call.cx, call.weight_buf
    batch_first = call.batch_first and not call.batch_sizes
    width = (call.proj_size or call.hidden_size) * (2 if call.bidirectional else 1)
    steps_first = (input.shape[1], input.shape[0]) if batch_first else input.shape[:-1]
    output = input.new_empty((*steps_first, width))
    if batch_first:
        output = output.transpose(0, 1)
    hy = torch.empty_like(hx, memory_format=torch.contiguous_format)
    cy = hx.new_empty(0) if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    if weight_buf is None:
        has_biases = call.weight_stride0 - (call.proj_size != 0) == 4
        size = _flat_size(call.mode, call.weight, has_biases, call.hidden_size, hx.shape[0])
        weight_buf = input.new_empty(size)
    return output, hy, cy, input.new_empty(0, dtype=torch.uint8), weight_buf


@named("aten._cudnn_rnn_backward.default")
def _cudnn_rnn_backward(call: Arguments) -> tuple[Tensor | list[Tensor] | None, ...]:
    """Gradients of the weights are views into one buffer, like the weights."""
    input, cx, weight = call.input, call.cx, call.weight
    batch_first = call.batch_first and not call.batch_sizes
    dx = torch.empty_like(input.transpose(0, 1) if batch_first else input, memory_format=torch.contiguous_format)
    if batch_first:
        dx = dx.transpose(0, 1)
    dhx = torch.empty_like(call.hx, memory_format=torch.contiguous_format)
    dcx = None if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format)
    if not call.output_mask[3]:
        return dx, dhx, dcx, [input.new_empty(0) for _ in weight]
    if call.weight_stride0 - (cx is not None and cx.shape[2] != call.hx.shape[2]) != 4:
        # Without biases the views would not line up with the weights: they are copied out of the buffer.
        return dx, dhx, dcx, [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weight]
    return dx, dhx, dcx, _views(torch.empty_like(call.weight_buf), weight)


#: By operator name: shapes of cuDNN's kernels, which a CPU build does not have.
CUDNN_SHAPES: dict[str, Shapes] = {
    "aten::_cudnn_rnn": _cudnn_rnn,
    "aten::_cudnn_rnn_backward": _cudnn_rnn_backward,
}


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
