"""Losses whose kernels reduce a full result of their own: margins and connectionist temporal classification.

Sources: ATen/native/cuda/MultiMarginLoss.cu, MultiLabelMarginCriterion.cu, LossCTC.cu of PyTorch 2.13; orders observed
on its CUDA build.
"""

from __future__ import annotations

import torch

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.reduction import reduction_buffers, sum_kernel
from graphmem.capture.kernels.parts.script import Call, Script, rule

_NONE = 0


def _row_losses(script: Script, tensor: torch.Tensor, label: str) -> tuple[int, torch.Tensor]:
    rows = torch.empty(tensor.shape[:-1], dtype=tensor.dtype, device="meta")
    return script.take(bytes_of(rows), label), rows


@rule("aten.multi_margin_loss.default")
def multi_margin_rule(call: Call) -> Script | None:
    if call.reduction == _NONE or call.self.dim() < 2:
        return None
    script = Script().output(0)
    held, rows = _row_losses(script, call.self, "loss of every row")
    reduction_buffers(rows, None, False, sum_kernel(rows.dtype, rows.dtype), call.card).write(script)
    script.give(held)
    return script


@rule("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_rule(call: Call) -> Script | None:
    """The mask of targets first, then the losses, then their sum."""
    if call.reduction == _NONE or call.self.dim() < 2:
        return None
    script = Script().output(1)
    held, rows = _row_losses(script, call.self, "loss of every row")
    script.output(0)
    reduction_buffers(rows, None, False, sum_kernel(rows.dtype, rows.dtype), call.card).write(script)
    script.give(held)
    return script


def _lengths(script: Script, batch: int) -> list[int]:
    return [script.take(8 * batch, label) for label in ("target lengths", "input lengths", "offsets of targets")]


@rule("aten._ctc_loss.default")
def ctc_rule(call: Call) -> Script | None:
    script = Script()
    held = _lengths(script, call.outputs[0].numel())
    script.output(1).output(0)
    script.give(*reversed(held))
    return script


@rule("aten._cudnn_ctc_loss.default", "aten._cudnn_ctc_loss.Tensor")
def cudnn_ctc_rule(call: Call) -> Script | None:
    """The gradient is computed with the loss (``native/cudnn/LossCTC.cpp``). cuDNN's workspace, which lives between
    the two, is not known: the library does not tell it without a device."""
    return Script().output(1).output(0)


@rule("aten._ctc_loss_backward.default")
def ctc_backward_rule(call: Call) -> Script | None:
    """Backward probabilities as large as the saved forward ones."""
    alpha = call.log_alpha
    script = Script()
    held = _lengths(script, alpha.shape[0])
    beta = script.take(bytes_of(alpha), "log beta")
    script.output(0)
    script.give(beta, *reversed(held))
    return script
