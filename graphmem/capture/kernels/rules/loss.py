"""Buffers of softmax gradients and loss functions.

Sources: ``ATen/native/cuda/SoftMax.cu``, ``Loss.cu``, ``NLLLoss2d.cu``; ``ATen/native/BinaryOps.cpp``, ``Loss.cpp`` of
PyTorch 2.13; orders observed on the real 2.13.0 CUDA build.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.capture.kernels.parts.layout import Layout, bytes_of
from graphmem.capture.kernels.parts.reduction import reduction_buffers, sum_kernel
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule

#: The values of ``reduction`` (ATen/core/Reduction.h).
_NONE = 0


# --- softmax ----------------------------------------------------------------------------------------------------------


@rule("aten._softmax.default", "aten._log_softmax.default")
def softmax_rule(call: Call) -> Script | None:
    if call.self.is_contiguous():
        return None
    script = Script().output(0)
    script.give(*script.contiguous(call.self, "contiguous input"))
    return script


@rule("aten._softmax_backward_data.default")
def softmax_backward_rule(call: Call) -> Script | None:
    """The product of gradient and output is a tensor of its own, laid out as the gradient unless that is expanded."""
    grad, output = call.grad_output, call.output
    script = Script().output(0)
    taken = [script.take(bytes_of(grad), "gradient times output")]
    expanded = any(stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True))
    if not (output if expanded else grad).is_contiguous():
        taken.append(script.take(bytes_of(grad), "contiguous product"))
    taken += script.contiguous(output, "contiguous output")
    script.give(*reversed(taken))
    return script


@rule("aten._log_softmax_backward_data.default")
def log_softmax_backward_rule(call: Call) -> Script | None:
    grad, output = call.grad_output, call.output
    script = Script().output(0)
    taken = script.contiguous(grad, "contiguous gradient") + script.contiguous(output, "contiguous output")
    script.give(*reversed(taken))
    return script


# --- negative log likelihood ------------------------------------------------------------------------------------------


@rule("aten.nll_loss_forward.default")
def nll_loss_rule(call: Call) -> Script | None:
    script = Script().output(0).output(1)
    script.give(*script.contiguous(call.self, "contiguous input"))
    return script


@rule("aten.nll_loss2d_forward.default")
def nll_loss_2d_rule(call: Call) -> Script | None:
    if call.reduction == _NONE:
        return Script().output(1).output(0)
    script = Script().output(0).output(1)
    script.give(*script.contiguous(call.self, "contiguous input"))
    return script


# --- elementwise losses -----------------------------------------------------------------------------------------------


def _elementwise(tensors: Sequence[torch.Tensor]) -> Layout:
    """The loss of every element, before it is reduced."""
    return Layout(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))


def _size(losses: Layout, output: torch.Tensor) -> int:
    return losses.numel() * int(output.element_size())


def _reduce(script: Script, losses: Layout, output: torch.Tensor, card: Card) -> None:
    reduction_buffers(losses, None, False, sum_kernel(output.dtype, output.dtype), card).write(script)


@rule("aten.mse_loss.default", "aten.smooth_l1_loss.default")
def mse_loss_rule(call: Call) -> Script | None:
    """The scalar keeps the storage of a full-size tensor: it is allocated before its shape is reduced."""
    if call.reduction == _NONE:
        return None
    losses = _elementwise([call.self, call.target])
    script = Script().output(0, _size(losses, call.outputs[0]))
    held = script.take(_size(losses, call.outputs[0]), "loss of every element")
    _reduce(script, losses, call.outputs[0], call.card)
    script.give(held)
    return script


@rule("aten.binary_cross_entropy.default", "aten.soft_margin_loss.default")
def binary_cross_entropy_rule(call: Call) -> Script | None:
    """Losses go straight to the output's storage, full-size; their mean, a temporary, is copied into it."""
    if call.reduction == _NONE:
        return None
    losses = _elementwise([call.self, call.target])
    script = Script().output(0, _size(losses, call.outputs[0]))
    mean = script.take(call.outputs[0].element_size(), "reduced loss")
    _reduce(script, losses, call.outputs[0], call.card)
    script.give(mean)
    return script


@rule("aten.huber_loss.default")
def huber_loss_rule(call: Call) -> Script | None:
    if call.reduction == _NONE:
        return None
    losses = _elementwise([call.self, call.target])
    script = Script()
    held = script.take(_size(losses, call.outputs[0]), "loss of every element")
    script.output(0)
    _reduce(script, losses, call.outputs[0], call.card)
    script.give(held)
    return script


@rule("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits_rule(call: Call) -> Script | None:
    """log(sigmoid(input)), with positive weights another full-size factor for a while, then the losses (Loss.cpp)."""
    losses = _elementwise([call.self, call.target])
    pos_weight = call.pos_weight
    script = Script()
    held = [script.take(_size(losses, call.outputs[0]), "log sigmoid")]
    if pos_weight is not None:
        shifted = script.take(bytes_of(pos_weight), "positive weight less one")
        size = math.prod(torch.broadcast_shapes(pos_weight.shape, call.target.shape)) * call.outputs[0].element_size()
        factor = script.take(size, "weight of every element")
        script.give(shifted, factor)
    if call.reduction == _NONE:
        script.output(0)
    else:
        held.append(script.take(_size(losses, call.outputs[0]), "loss of every element"))
        script.output(0)
        _reduce(script, losses, call.outputs[0], call.card)
    script.give(*reversed(held))
    return script
