"""Second derivatives of convolutions, as a card computes them: ``_convolution_double_backward`` of
``ATen/native/Convolution.cpp`` (PyTorch 2.13).

On CUDA tensors it makes operands contiguous that C++ leaves as they are for the device ``meta``, and it holds those
copies until it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.conv_backend import ConvParams
from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.torch_internals import OpOverload

_aten = torch.ops.aten


def _run(call: ConvParams, input: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = _aten.convolution.default(
        input, weight, None, call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups
    )
    return result


@named("aten._convolution_double_backward.default")
def _double_backward(given: Arguments) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the output's gradient, the input and the weight; ``gg``: the gradient of a gradient."""
    input_gg, weight_gg, weight, input, groups = given.ggI, given.ggW, given.weight, given.self, given.groups
    options = (given.stride, given.padding, given.dilation, given.output_padding)
    strides, paddings, dilations, extra = (_expand(values, weight.dim() - 2) for values in options)
    if not given.transposed and input.dim() > 4:
        groups = input.shape[1] // weight.shape[1] if weight.shape[1] else -1
    call = ConvParams(strides, paddings, dilations, given.transposed, extra, groups)
    output = weight_gradient = input_gradient = None
    if input.numel():
        if input_gg is not None:
            weight = weight.contiguous()
            output = _run(call, input_gg, weight)
        if weight_gg is not None:
            weight_gg = weight_gg.contiguous()
            term = _run(call, input, weight_gg)
            output = term if output is None else output + term
            del term
    if given.ggb is not None:
        expanded_bias = given.ggb.contiguous().view(1, -1, *(1 for _ in strides)).expand(given.gO.shape)
        output = expanded_bias if output is None else output + expanded_bias
        del expanded_bias
    if input.numel():
        if input_gg is not None:
            weight_gradient = _weight_gradient(call, input_gg, given.gO, weight)
        if weight_gg is not None:
            input_gradient = _input_gradient(call, weight_gg, given.gO, weight, input)
    return output, input_gradient, weight_gradient


def _expand(values: Sequence[int], dims: int) -> tuple[int, ...]:
    return tuple(values) * dims if len(values) == 1 else tuple(values)


def _weight_gradient(call: ConvParams, input_gg: Tensor, output_g: Tensor, weight: Tensor) -> Tensor:
    """A convolution over the batch, of one group after the other; strides and dilations change places."""
    one = replace(call, stride=call.dilation, dilation=call.stride, transposed=False, groups=1)
    over_batch, inputs = output_g.transpose(0, 1), input_gg.transpose(0, 1)
    if call.groups == 1:
        over_batch = over_batch.contiguous()
        found = _run(one, over_batch, inputs) if call.transposed else _run(one, inputs, over_batch)
    else:
        parts = [
            _of_group(one, call.transposed, ours, theirs)
            for ours, theirs in zip(over_batch.chunk(call.groups), inputs.chunk(call.groups), strict=True)
        ]
        found = torch.cat(parts, 1)
        del parts
    found = found.transpose(0, 1)
    for dim in range(2, found.dim()):
        if found.shape[dim] > weight.shape[dim]:
            found = found.narrow(dim, 0, weight.shape[dim])
    return found


def _of_group(one: ConvParams, transposed: bool, over_batch: Tensor, inputs: Tensor) -> Tensor:
    over_batch = over_batch.contiguous()
    return _run(one, over_batch, inputs) if transposed else _run(one, inputs, over_batch)


def _input_gradient(call: ConvParams, weight_gg: Tensor, output_g: Tensor, weight: Tensor, input: Tensor) -> Tensor:
    other = replace(call, transposed=not call.transposed)
    if call.transposed:
        found = _run(other, output_g.contiguous(), weight_gg)
        for dim in range(2, found.dim()):
            if found.shape[dim] > input.shape[dim]:
                found = found.narrow(dim, 0, input.shape[dim])
        return found
    every = zip(
        weight.shape[2:], input.shape[2:], output_g.shape[2:], call.stride, call.padding, call.dilation,
        call.output_padding, strict=True,
    )  # fmt: skip
    extra = [
        side - whole if side != (whole := (taps - 1) * dil - 2 * pad + step * (out - 1) + 1) else given
        for taps, side, out, step, pad, dil, given in every
    ]
    return _run(replace(other, output_padding=tuple(extra)), output_g.contiguous(), weight_gg)


#: The operator of double backward passes, by CUDA's rules.
CONVOLUTIONS: dict[OpOverload, Decomposition] = {_aten._convolution_double_backward.default: _double_backward}
