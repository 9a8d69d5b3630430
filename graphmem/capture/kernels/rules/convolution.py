"""Buffers of convolutions, forward and backward, of every backend that CUDA has.

Order and lifetimes follow ``aten/src/ATen/native/Convolution.cpp`` (_convolution, convolution_backward) and the
backends: ``native/cudnn/ConvShared.cpp`` and ``Conv_v8.cpp``, ``native/cuda/ConvolutionMM2d.cu``,
``NaiveDilatedConvolution.cu``, ``NaiveConvolutionTranspose2d.cu`` and ``3d.cu``, ``DepthwiseConv2d.cu`` and ``3d.cu``.
The scripts give the event sequences of the real 2.13.0 CUDA build for 1,490 random convolutions of all backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from graphmem.capture.kernels.cudnn import first_workspace, largest_workspace, question_of
from graphmem.capture.kernels.parts.conv_backend import (
    Backend,
    ConvParams,
    View,
    cudnn_takes,
    runs_channels_last,
    select_backend,
)
from graphmem.capture.kernels.parts.layout import Layout
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Gradients, Script, recorded_rule
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import Workspace
from graphmem.labels import CUDNN, CUDNN_ESTIMATE, TIMING, TIMING_ESTIMATE


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution, as ``_convolution`` sees it after it has turned one dimension into two."""

    input: View
    weight: View
    output: View
    params: ConvParams
    backend: Backend
    channels_last: bool

    def group(self) -> _Convolution:
        """One group of it, as the backends without groups run it."""
        groups = self.params.groups
        return replace(
            self,
            input=_narrow(self.input.dense(False), 1, groups),
            weight=_narrow(self.weight.dense(False), 0, groups),
            output=_narrow(self.output, 1, groups),
            params=replace(self.params, groups=1),
        )


def _narrow(view: View, dim: int, parts: int) -> View:
    shape = list(view.shape)
    shape[dim] //= parts
    return View(tuple(shape), view.strides, view.dtype)


@recorded_rule("aten.convolution.default")
def convolution_rule(call: Call) -> Script:
    """Forward, by the backend that PyTorch chooses."""
    script, convolution = Script(), _convolution(call, call.outputs[0])
    row = _copy_of_row(script, call.input)
    _FORWARD[convolution.backend](script, convolution, call.bias is not None, call.card)
    return script.give(*row)


@recorded_rule("aten.convolution_backward.default")
def convolution_backward_rule(call: Call) -> Script:
    """Backward, by the same; a bias's gradient that the backend leaves is summed at the end."""
    script, convolution = Script(), _convolution(call, call.grad_output)
    row = _copy_of_row(script, call.input)
    gradients = Gradients(script, call.output_mask)
    _BACKWARD[convolution.backend](script, convolution, gradients, call.card)
    if gradients.emit(2):
        _sum_bias(script, convolution.output, call.card)
    return script.give(*row)


def _convolution(call: Call, output: torch.Tensor) -> _Convolution:
    tensor = call.input
    params = ConvParams.of(
        tensor.dim() - 2,
        call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups,
    )  # fmt: skip
    input, weight = View.of(tensor), View.of(call.weight)
    if tensor.dim() == 3 and not tensor.is_contiguous():
        input = input.dense(False)
    cudnn = torch.backends.cudnn.enabled and cudnn_takes(tensor.dtype, call.card.limits)
    backend = select_backend(input, weight, params, cudnn)
    channels_last = backend in (Backend.CUDNN, Backend.CUDNN_TRANSPOSE) and runs_channels_last(input, weight)
    return _Convolution(input, weight, View.of(output), params, backend, channels_last)


def _copy_of_row(script: Script, tensor: torch.Tensor) -> list[int]:
    """One-dimensional inputs are made contiguous before anything else."""
    return script.contiguous(tensor, "contiguous input") if tensor.dim() == 3 else []


def _copy(script: Script, view: View, channels_last: bool, label: str) -> list[int]:
    """The copy that ``contiguous(memory_format)`` makes if it must, as a list of none or one token."""
    return [] if view.is_dense(channels_last) else [script.take(view.bytes, f"{label} in the kernel's layout")]


def _sum_bias(script: Script, grad: View, card: Card, dims: Sequence[int] | None = None) -> None:
    """The sum of the output's gradient over everything but the channels."""
    reduced = dims if dims is not None else [0, *range(2, len(grad.shape))]
    write_sum(script, Layout(grad.shape, grad.strides), reduced, grad.dtype, card)


# --- cuDNN ------------------------------------------------------------------------------------------------------------


def _cudnn_forward(script: Script, call: _Convolution, bias: bool, card: Card) -> None:
    copies = _copy(script, call.input, call.channels_last, "input")
    script.output(0)
    weight = _copy(script, call.weight, call.channels_last, "weight")
    transposed = call.backend is Backend.CUDNN_TRANSPOSE
    _workspace(script, call, Direction.BACKWARD_DATA if transposed else Direction.FORWARD, card)
    script.give(*weight, *copies)


def _cudnn_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    copies, tensor = [], call.input
    if 1 in gradients:
        copies = _copy(script, tensor, call.channels_last, "input")
        tensor = tensor.dense(call.channels_last) if copies else tensor
    grad, format_of_input = [], tensor.suggests_channels_last()
    if call.backend is Backend.CUDNN_TRANSPOSE:
        # grad_output.contiguous(input.suggest_memory_format()), likewise held
        grad = _copy(script, call.output, format_of_input, "gradient")
        call = replace(call, output=call.output.dense(format_of_input))
    elif call.output.suggests_channels_last() != format_of_input:
        # grad_output.to(input.suggest_memory_format()), held for both gradients
        grad = [script.take(call.output.bytes, "gradient in the input's layout")]
        call = replace(call, output=call.output.dense(format_of_input))
    _cudnn_input_gradient(script, call, gradients, card)
    if 1 in gradients:
        dense = _copy(script, call.output, call.channels_last, "gradient")
        gradients.emit(1)
        _workspace(script, call, Direction.BACKWARD_WEIGHT, card)
        script.give(*dense)
    script.give(*grad, *copies)


def _cudnn_input_gradient(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    if not gradients.emit(0):
        return
    weight = _copy(script, call.weight, call.channels_last, "weight")
    grad = _copy(script, call.output, call.channels_last, "gradient")
    transposed = call.backend is Backend.CUDNN_TRANSPOSE
    _workspace(script, call, Direction.FORWARD if transposed else Direction.BACKWARD_DATA, card)
    script.give(*grad, *weight)


def _workspace(script: Script, call: _Convolution, direction: Direction, card: Card) -> None:
    """Taken right before the kernel and given back right after its launch (run_conv_plan).

    Under ``torch.backends.cudnn.benchmark`` the fastest of all plans runs, known to a card only: an estimate.
    """
    if not card.cudnn_workspaces:
        return
    question = question_of(*_sides(call), call.weight, call.params, call.channels_last, direction)
    benchmark = torch.backends.cudnn.benchmark
    if benchmark and question not in card.timed and not Problem.of(question).is_empty:
        card.timed.add(question)
        _time_all_plans(script, largest_workspace(question, card))
    workspace = first_workspace(question, card)
    if workspace.size:
        label = CUDNN if workspace.certain and not benchmark else CUDNN_ESTIMATE
        script.give(script.take_for_plan((workspace.size, *workspace.later), label, question))


def _time_all_plans(script: Script, largest: Workspace) -> None:
    """The first call of a shape times every plan in one workspace as large as the largest asks for, or half of that,
    and so on, where it is refused (generate_and_filter_plans), gives it back, and empties the allocator's cache
    (get_plans_from_find and run_single_conv)."""
    if largest.size:
        label = TIMING if largest.certain else TIMING_ESTIMATE
        halves = tuple(largest.size >> times for times in range(largest.size.bit_length() + 1))
        script.give(script.take_for_plan(halves, label, object()))
    script.empty_cache()


def _sides(call: _Convolution) -> tuple[View, View]:
    """A transposed convolution is the backward pass of the convolution from its output to its input."""
    return (call.output, call.input) if call.backend is Backend.CUDNN_TRANSPOSE else (call.input, call.output)


# --- depthwise kernels ------------------------------------------------------------------------------------------------


def _depthwise_forward(script: Script, call: _Convolution, bias: bool, card: Card) -> None:
    copies = _copy(script, call.input, False, "input")
    weight = _copy(script, call.weight, False, "weight") if call.backend is Backend.DEPTHWISE_3D else []
    script.output(0)
    if call.backend is Backend.DEPTHWISE_2D:
        weight = _copy(script, call.weight, False, "weight")
    script.give(*weight, *copies)


def _depthwise_2d_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    grad = _copy(script, call.output, False, "gradient")
    if 1 in gradients:
        copies = _copy(script, call.input, False, "input")
        gradients.emit(1)
        script.give(*copies)
    if 0 in gradients:
        weight = _copy(script, call.weight, False, "weight")
        gradients.emit(0)
        script.give(*weight)
    script.give(*grad)


def _depthwise_3d_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    gradients.emit(0, 1)
    grad = _copy(script, call.output, False, "gradient")
    if 0 in gradients:
        script.give(*_copy(script, call.weight, False, "weight"))
    if 1 in gradients:
        script.give(*_copy(script, call.input, False, "input"))
    if gradients.emit(2):
        _sum_bias(script, call.output, card)
    script.give(*grad)


# --- matrix products over unfolded columns ----------------------------------------------------------------------------


def _slow_forward(script: Script, call: _Convolution, bias: bool, card: Card) -> None:
    """Backends without groups: input and weight made contiguous, then every group on its own, then joined."""
    copies = _copy(script, call.input, False, "input") + _copy(script, call.weight, False, "weight")
    if call.params.groups == 1:
        _nogroup_forward(script, call, bias, lambda size: script.output(0, size))
    else:
        one = call.group()
        parts: list[int] = []

        def take(size: int | None) -> None:
            parts.append(script.take(size or one.output.bytes, "part of output"))

        for _ in range(call.params.groups):
            part, _view = _copy_of_part(script, one.input, False, "input")
            _nogroup_forward(script, one, bias, take)
            script.give(*part)
        script.output(0).give(*parts)
    script.give(*reversed(copies))


def _copy_of_part(script: Script, part: View, channels_last: bool, label: str) -> tuple[list[int], View]:
    """``subtensor``: a group's channels, contiguous in the format of the whole; the copy if any, and the result."""
    if part.is_dense(channels_last):
        return [], part
    return [script.take(part.bytes, f"one group of {label}")], part.dense(channels_last)


def _nogroup_forward(script: Script, call: _Convolution, bias: bool, output: Callable[[int | None], object]) -> None:
    if call.backend is Backend.SLOW_TRANSPOSE_3D:
        _output_from_input_size(script, call, output)
    else:
        output(None)
    columns = _columns(script, call, always=call.params.transposed)
    script.product()
    if bias and call.params.transposed:
        script.scratch(math.prod(call.output.shape[2:]) * call.output.dtype.itemsize, "ones for the bias")
    script.give(*columns)


def _output_from_input_size(script: Script, call: _Convolution, output: Callable[[int | None], object]) -> None:
    """slow_conv_transpose3d makes its output with the input's size and resizes it, which never shrinks it."""
    if call.input.bytes >= call.output.bytes:
        output(call.input.bytes)
        return
    first = script.take(call.input.bytes, "output before it is resized")
    output(None)
    script.give(first)


def _columns_bytes(call: _Convolution) -> int:
    """Unfolded patches of one image: channels and taps of the smaller side, over the pixels of the other."""
    inner, outer = (call.output, call.input) if call.params.transposed else (call.input, call.output)
    taps = math.prod(call.weight.shape[2:])
    return inner.shape[1] * taps * math.prod(outer.shape[2:]) * int(inner.dtype.itemsize)


def _needs_columns(call: _Convolution) -> bool:
    """One tap, stride 1 and no padding need no unfolding; dilated kernels unfold all the same."""
    if call.backend in (Backend.SLOW_DILATED_2D, Backend.SLOW_DILATED_3D):
        return True
    plain = (
        math.prod(call.weight.shape[2:]) == 1
        and all(s == 1 for s in call.params.stride)
        and not any(call.params.padding)
        and not call.params.is_dilated
    )
    return not plain


def _columns(script: Script, call: _Convolution, always: bool = False) -> list[int]:
    return [script.take(_columns_bytes(call), "columns")] if always or _needs_columns(call) else []


class _Parts(Gradients):
    """The gradients of one group after the other: parts, which are joined at the end."""

    def __init__(self, script: Script, mask: Sequence[bool], one: _Convolution) -> None:
        super().__init__(script, mask)
        self._sizes = (one.input.bytes, one.weight.bytes, one.output.shape[1] * one.weight.dtype.itemsize)
        self.taken: tuple[list[int], ...] = ([], [], [])

    def emit(self, *indices: int) -> bool:
        """Take one group's part of each wanted gradient; False if none is wanted."""
        wanted = [index for index in indices if index in self]
        for index in wanted:
            label = f"part of {('input', 'weight', 'bias')[index]} gradient"
            self.taken[index].append(self._script.take(self._sizes[index], label))
        return bool(wanted)


def _slow_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    copies = _copy(script, call.input, False, "input") + _copy(script, call.weight, False, "weight")
    backward = _SLOW_BACKWARD[call.backend]
    if call.params.groups == 1:
        backward(script, call, gradients, card)
    else:
        one = call.group()
        parts = _Parts(script, [index in gradients for index in range(3)], one)
        for _ in range(call.params.groups):
            grad, view = _copy_of_part(script, one.output, call.output.suggests_channels_last(), "gradient")
            part, _view = _copy_of_part(script, one.input, False, "input")
            backward(script, replace(one, output=view), parts, card)
            script.give(*part, *grad)
        gradients.emit(0, 1, 2)
        for tokens in reversed(parts.taken):
            script.give(*tokens)
    script.give(*reversed(copies))


def _slow_2d_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    grad = _copy(script, call.output, False, "gradient")
    columns: list[int] = []
    if gradients.emit(0):
        columns = _columns(script, call, always=True)
        script.product()
    if gradients.emit(2):
        _sum_bias(script, call.output.dense(False), card)
    if gradients.emit(1):
        columns = columns or _columns(script, call, always=True)
        script.product()
    script.give(*columns, *grad)


def _slow_dilated_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    grad = _copy(script, call.output, False, "gradient")
    gradients.emit(0, 1, 2)
    columns = []
    if 0 in gradients or 1 in gradients:
        columns = _columns(script, call)
        script.product()
    if 2 in gradients:
        shape = call.output.shape[1:]
        image = View(shape, shape, call.output.dtype).dense(False)
        for _ in range(call.output.shape[0]):
            total = script.take(shape[0] * call.output.dtype.itemsize, "one image's bias gradient")
            _sum_bias(script, image, card, range(1, len(shape)))
            script.give(total)
    script.give(*columns, *grad)


def _slow_transpose_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    if 0 in gradients:
        grad = _copy(script, call.output, False, "gradient")
        gradients.emit(0)
        columns = _columns(script, call)
        script.product().give(*columns, *grad)
    if gradients.emit(1, 2):
        grad = _copy(script, call.output, False, "gradient")
        columns = _columns(script, call)
        if 1 in gradients:
            script.product()
        if 2 in gradients:
            _sum_bias(script, call.output.dense(False), card)
        script.give(*columns, *grad)


_SLOW_BACKWARD: dict[Backend, Callable[[Script, _Convolution, Gradients, Card], None]] = {
    Backend.SLOW_2D: _slow_2d_backward,
    Backend.SLOW_DILATED_2D: _slow_dilated_backward,
    Backend.SLOW_DILATED_3D: _slow_dilated_backward,
    Backend.SLOW_TRANSPOSE_2D: _slow_transpose_backward,
    Backend.SLOW_TRANSPOSE_3D: _slow_transpose_backward,
}


def _empty_forward(script: Script, call: _Convolution, bias: bool, card: Card) -> None:
    script.output(0)


def _empty_backward(script: Script, call: _Convolution, gradients: Gradients, card: Card) -> None:
    gradients.emit(0, 1, 2)


_FORWARD: dict[Backend, Callable[[Script, _Convolution, bool, Card], None]] = {
    Backend.CUDNN: _cudnn_forward,
    Backend.CUDNN_TRANSPOSE: _cudnn_forward,
    Backend.DEPTHWISE_2D: _depthwise_forward,
    Backend.DEPTHWISE_3D: _depthwise_forward,
    Backend.EMPTY: _empty_forward,
    **dict.fromkeys(_SLOW_BACKWARD, _slow_forward),
}
_BACKWARD: dict[Backend, Callable[[Script, _Convolution, Gradients, Card], None]] = {
    Backend.CUDNN: _cudnn_backward,
    Backend.CUDNN_TRANSPOSE: _cudnn_backward,
    Backend.DEPTHWISE_2D: _depthwise_2d_backward,
    Backend.DEPTHWISE_3D: _depthwise_3d_backward,
    Backend.EMPTY: _empty_backward,
    **dict.fromkeys(_SLOW_BACKWARD, _slow_backward),
}
