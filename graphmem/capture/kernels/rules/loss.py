"""Buffers of loss functions, and of the gradient and the masks of softmax.

Sources: ``ATen/native/cuda/SoftMax.cu``, ``MultiMarginLoss.cu``, ``MultiLabelMarginCriterion.cu``, ``LossCTC.cu``;
``ATen/native/BinaryOps.cpp``, ``Loss.cpp``, ``transformers/attention.cpp`` of PyTorch 2.13; orders observed on the real
2.13.0 CUDA build.
"""

from __future__ import annotations

import math

import torch

from graphmem.capture.kernels.parts.layout import Layout, bytes_of
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule

#: The value of ``reduction`` for none (ATen/core/Reduction.h).
_NONE = 0


# --- softmax ----------------------------------------------------------------------------------------------------------


@recorded_rule("aten._softmax_backward_data.default")
def softmax_backward_rule(call: Call) -> Script:
    """The product of gradient and output is a tensor of its own, laid out as the gradient unless that is expanded."""
    grad, output = call.grad_output, call.output
    script = Script().output(0)
    taken = [script.take(bytes_of(grad), "gradient times output")]
    expanded = any(stride == 0 and size > 1 for size, stride in zip(grad.shape, grad.stride(), strict=True))
    taken += script.contiguous(output if expanded else grad, "contiguous product")
    taken += script.contiguous(output, "contiguous output")
    return script.give(*reversed(taken))


@recorded_rule("aten._safe_softmax.default")
def safe_softmax_rule(call: Call) -> Script:
    """The softmax, a boolean tensor of -inf positions, its row-wise ``all``, and the zero that such rows are filled
    with."""
    scores, dim = call.self, call.dim
    script = Script().output(0)
    script.give(*script.contiguous(scores, "contiguous scores"))
    masked = script.take(scores.numel(), "-inf positions")
    shape = list(scores.shape)
    shape[dim] = 1
    mask = torch.empty(scores.shape, dtype=torch.bool, device="meta")
    outputs = [mask.new_empty(shape)]
    (rows,) = script.call("aten.all.dim", mask, dim, True, card=call.card, outputs=outputs, births=["rows of -inf"])
    zero = script.take(call.outputs[0].element_size(), "zero")
    return script.give(zero, rows, masked)


# --- the loss of every element, and its sum or mean -------------------------------------------------------------------


def _elements(call: Call) -> Layout:
    return Layout(torch.broadcast_shapes(call.self.shape, call.target.shape))


def _bytes(losses: Layout, call: Call) -> int:
    return losses.numel() * int(call.dtype.itemsize)


@recorded_rule("aten.mse_loss.default", "aten.smooth_l1_loss.default")
def mse_loss_rule(call: Call) -> Script | None:
    """The scalar keeps the storage of a full-size tensor: it is allocated before its shape is reduced."""
    if call.reduction == _NONE:
        return None
    losses = _elements(call)
    script = Script().output(0, _bytes(losses, call))
    held = script.take(_bytes(losses, call), "loss of every element")
    write_sum(script, losses, None, call.dtype, call.card)
    return script.give(held)


@recorded_rule("aten.binary_cross_entropy.default", "aten.soft_margin_loss.default")
def binary_cross_entropy_rule(call: Call) -> Script | None:
    """Losses go straight to the output's storage, full-size; their mean, a temporary, is copied into it."""
    if call.reduction == _NONE:
        return None
    losses = _elements(call)
    script = Script().output(0, _bytes(losses, call))
    mean = script.take(call.dtype.itemsize, "reduced loss")
    write_sum(script, losses, None, call.dtype, call.card)
    return script.give(mean)


@recorded_rule("aten.huber_loss.default")
def huber_loss_rule(call: Call) -> Script | None:
    """The losses are a tensor of their own, made before the scalar."""
    if call.reduction == _NONE:
        return None
    losses, script = _elements(call), Script()
    held = script.take(_bytes(losses, call), "loss of every element")
    write_sum(script.output(0), losses, None, call.dtype, call.card)
    return script.give(held)


@recorded_rule("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits_rule(call: Call) -> Script:
    """log(sigmoid(input)), with positive weights another full-size factor for a while, then the losses (Loss.cpp)."""
    losses, pos_weight, script = _elements(call), call.pos_weight, Script()
    held = [script.take(_bytes(losses, call), "log sigmoid")]
    if pos_weight is not None:
        shifted = script.take(bytes_of(pos_weight), "positive weight less one")
        size = math.prod(torch.broadcast_shapes(pos_weight.shape, call.target.shape)) * call.dtype.itemsize
        factor = script.take(size, "weight of every element")
        script.give(shifted, factor)
    if call.reduction == _NONE:
        script.output(0)
    else:
        held.append(script.take(_bytes(losses, call), "loss of every element"))
        write_sum(script.output(0), losses, None, call.dtype, call.card)
    return script.give(*reversed(held))


@recorded_rule("aten.soft_margin_loss_backward.default")
def soft_margin_backward_rule(call: Call) -> Script:
    """exp(-target * input) from two full-size tensors, then its sum with one (Loss.cpp)."""
    size = bytes_of(call.self)
    script = Script().output(0)
    product = script.take(size, "target times input")
    exponential = script.take(size, "exponential")
    return script.give(product, exponential).scratch(size, "gradient of the sum")


# --- the loss of every row --------------------------------------------------------------------------------------------


@recorded_rule("aten.multi_margin_loss.default", "aten.multilabel_margin_loss_forward.default")
def margin_loss_rule(call: Call) -> Script | None:
    """The mask of targets first, where the operator returns one, then the losses, then their sum, which of one label
    is made before them."""
    if call.reduction == _NONE or call.self.dim() < 2:
        return None
    rows = Layout(call.self.shape[:-1])
    script = Script().outputs(len(call.outputs) - 1)
    held = script.take(rows.numel() * call.self.element_size(), "loss of every row")
    if len(call.outputs) > 1:
        script.output(0)
    write_sum(script, rows, None, call.self.dtype, call.card)
    return script.give(held)


# --- connectionist temporal classification ----------------------------------------------------------------------------


def _lengths(script: Script, batch: int) -> list[int]:
    return [script.take(8 * batch, label) for label in ("target lengths", "input lengths", "offsets of targets")]


@recorded_rule("aten._ctc_loss.default")
def ctc_rule(call: Call) -> Script:
    """The lengths stay on the device until the operator ends."""
    script = Script()
    held = _lengths(script, call.outputs[0].numel())
    return script.outputs(1, 0).give(*reversed(held))


@recorded_rule("aten._ctc_loss_backward.default")
def ctc_backward_rule(call: Call) -> Script:
    """Backward probabilities as large as the saved forward ones."""
    alpha, script = call.log_alpha, Script()
    held = _lengths(script, alpha.shape[0])
    beta = script.take(bytes_of(alpha), "log beta")
    return script.output(0).give(beta, *reversed(held))
