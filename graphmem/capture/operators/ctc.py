"""Connectionist temporal classification as a CUDA build resolves it: PyTorch's own kernel, or cuDNN's.

Sources (PyTorch 2.13): ``aten/src/ATen/native/LossCTC.cpp`` (``ctc_loss_impl``) and ``native/cudnn/LossCTC.cpp``
(``_use_cudnn_ctc_loss``), whose gradient is computed together with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition, Shapes
from graphmem.capture.torch_internals import FakeTensor, OpOverload
from graphmem.capture.values.tensors import innermost

_aten = torch.ops.aten
#: Values of ``at::Reduction``.
_MEAN, _SUM = 1, 2
#: cuDNN takes targets shorter than this.
_CUDNN_LABELS = 256


def _cudnn_shapes(log_probs: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@named("aten.ctc_loss.IntList")
def _of_numbers(call: Arguments) -> Tensor:
    """cuDNN's kernel where targets are on the host, one after the other, and the input is used whole."""
    lengths = call.input_lengths, call.target_lengths
    whole = all(length == call.log_probs.shape[0] for length in call.input_lengths)
    beside = call.targets.device.type == "cpu" and _suits_cudnn(call)
    if beside and whole and _are_short(*lengths):
        return _reduced(_by_cudnn(_aten._cudnn_ctc_loss.default, call, call.targets), None, call.reduction)
    return _by_pytorch(call, *lengths)


@named("aten.ctc_loss.Tensor")
def _of_tensors(call: Arguments) -> Tensor:
    """cuDNN's kernel reads 32-bit lengths on the card; PyTorch's own has them read back."""
    lengths = call.input_lengths, call.target_lengths
    suits = _suits_cudnn(call) and all(length.dtype is torch.int32 for length in lengths)
    if suits and _are_short(*(length.tolist() for length in lengths)):
        losses = _by_cudnn(_aten._cudnn_ctc_loss.Tensor, call, call.targets.to(call.log_probs.device))
        return _reduced(losses, call.target_lengths, call.reduction)
    options = call.blank, call.reduction, call.zero_infinity
    return _of_numbers(call.log_probs, call.targets, *_numbers(call), *options)


#: The CTC operators -> their decompositions on CUDA.
CTC: dict[OpOverload, Decomposition] = {_aten.ctc_loss.IntList: _of_numbers, _aten.ctc_loss.Tensor: _of_tensors}
#: By operator name: shapes of cuDNN's kernel.
CTC_SHAPES: dict[str, Shapes] = {
    "aten::_cudnn_ctc_loss": _cudnn_shapes,
    "aten::_cudnn_ctc_loss.Tensor": _cudnn_shapes,
}


def _suits_cudnn(call: Arguments) -> bool:
    log_probs, targets = call.log_probs, call.targets
    kinds = log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    shapes = log_probs.dim() == 3 and targets.dim() == 1 and targets.is_contiguous()
    return torch.backends.cudnn.enabled and call.blank == 0 and kinds and shapes


def _are_short(input_lengths: Sequence[int], target_lengths: Sequence[int]) -> bool:
    return all(
        length < _CUDNN_LABELS and length <= steps for steps, length in zip(input_lengths, target_lengths, strict=True)
    )


def _by_cudnn(kernel: OpOverload, call: Arguments, targets: Tensor) -> Tensor:
    options = call.blank, torch.backends.cudnn.deterministic, call.zero_infinity
    losses: Tensor = kernel(call.log_probs, targets, call.input_lengths, call.target_lengths, *options)[0]
    return losses


def _by_pytorch(call: Arguments, *lengths: Sequence[int]) -> Tensor:
    targets = call.targets.to(call.log_probs.device, torch.int64)
    losses = _aten._ctc_loss.default(call.log_probs, targets, *lengths, call.blank, call.zero_infinity)[0]
    if call.zero_infinity:  # C++ evaluates arguments from right to left; cuDNN's gradient alone has no infinity
        zero = losses.new_zeros(())
        infinite = losses == float("inf")
        losses = torch.where(infinite, zero, losses)
        del infinite, zero
    return _reduced(losses, None, call.reduction)


def _numbers(call: Arguments) -> tuple[list[int], list[int]]:
    """Lengths as numbers. Those that are on the card are taken to be of the whole input, and of targets as long as the
    padded row, or, one after the other, of one length."""
    targets, input_lengths, target_lengths = map(innermost, (call.targets, call.input_lengths, call.target_lengths))
    count = target_lengths.numel()
    if not isinstance(target_lengths, FakeTensor):
        of_targets = target_lengths.tolist()
    elif targets.dim() == 2:
        of_targets = [int(targets.shape[1])] * count
    else:
        each, rest = divmod(targets.numel(), max(count, 1))
        of_targets = [each + (index < rest) for index in range(count)]
    if not isinstance(input_lengths, FakeTensor):
        return input_lengths.tolist(), of_targets
    return [int(call.log_probs.shape[0])] * input_lengths.numel(), of_targets


def _reduced(losses: Tensor, lengths: Tensor | None, reduction: int) -> Tensor:
    """The mean is of losses over the lengths of targets: numbers that are sent, or a tensor."""
    if reduction == _MEAN:
        if lengths is not None:
            return (losses / lengths.clamp_min(1)).mean()
        return (losses / losses.detach().new_empty(losses.shape).clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses
