"""Connectionist temporal classification as a CUDA build resolves it: PyTorch's own kernel, or cuDNN's.

Sources (PyTorch 2.13): ``aten/src/ATen/native/LossCTC.cpp`` (``ctc_loss_impl``) and ``native/cudnn/LossCTC.cpp``
(``_use_cudnn_ctc_loss``), whose gradient is computed together with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.torch_internals import FakeTensor

_aten = torch.ops.aten
#: Values of ``at::Reduction``.
_MEAN, _SUM = 1, 2
#: cuDNN takes targets shorter than this.
_CUDNN_LABELS = 256


def ctc_composites() -> dict[Any, Callable[..., Any]]:
    """The CTC operators -> their decompositions on CUDA."""
    return {_aten.ctc_loss.IntList: _of_numbers, _aten.ctc_loss.Tensor: _of_tensors}


def ctc_shapes() -> dict[str, Callable[..., Any]]:
    """By operator name: shapes of cuDNN's kernel."""
    return {"aten::_cudnn_ctc_loss": _cudnn_shapes, "aten::_cudnn_ctc_loss.Tensor": _cudnn_shapes}


def _cudnn_shapes(log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _of_numbers(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """cuDNN's kernel where targets are on the host, one after the other, and the input is used whole."""
    lengths = input_lengths, target_lengths
    whole = all(length == log_probs.shape[0] for length in input_lengths)
    beside = targets.device.type == "cpu" and _suits_cudnn(log_probs, targets, blank)
    if beside and whole and _are_short(*lengths):
        losses = _by_cudnn(_aten._cudnn_ctc_loss.default, log_probs, targets, *lengths, blank, zero_infinity)
        return _reduced(losses, None, reduction)
    targets = targets.to(log_probs.device, torch.int64)
    losses = _aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:  # C++ evaluates arguments from right to left; cuDNN's gradient alone has no infinity
        zero = losses.new_zeros(())
        infinite = losses == float("inf")
        losses = torch.where(infinite, zero, losses)
        del infinite, zero
    return _reduced(losses, None, reduction)


def _of_tensors(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """cuDNN's kernel reads 32-bit lengths on the card; PyTorch's own has them read back."""
    lengths = input_lengths, target_lengths
    suits = _suits_cudnn(log_probs, targets, blank) and all(length.dtype is torch.int32 for length in lengths)
    if suits and _are_short(*(length.tolist() for length in lengths)):
        targets = targets.to(log_probs.device)
        losses = _by_cudnn(_aten._cudnn_ctc_loss.Tensor, log_probs, targets, *lengths, blank, zero_infinity)
        return _reduced(losses, target_lengths, reduction)
    of_inputs, of_targets = _numbers(log_probs, targets, *lengths)
    return _of_numbers(log_probs, targets, of_inputs, of_targets, blank, reduction, zero_infinity)


def _suits_cudnn(log_probs: Tensor, targets: Tensor, blank: int) -> bool:
    kinds = log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    shapes = log_probs.dim() == 3 and targets.dim() == 1 and targets.is_contiguous()
    return torch.backends.cudnn.enabled and blank == 0 and kinds and shapes


def _are_short(input_lengths: Sequence[int], target_lengths: Sequence[int]) -> bool:
    return all(
        length < _CUDNN_LABELS and length <= steps for steps, length in zip(input_lengths, target_lengths, strict=True)
    )


def _by_cudnn(kernel: Any, log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    *lengths, blank, zero_infinity = rest
    deterministic = torch.backends.cudnn.deterministic
    losses: Tensor = kernel(log_probs, targets, *lengths, blank, deterministic, zero_infinity)[0]
    return losses


def _numbers(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> tuple[list[int], list[int]]:
    """Lengths as numbers. Those that are on the card are taken to be of the whole input, and of targets as long as the
    padded row, or, one after the other, of one length."""
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
    return [int(log_probs.shape[0])] * input_lengths.numel(), of_targets


def _reduced(losses: Tensor, lengths: Tensor | None, reduction: int) -> Tensor:
    """The mean is of losses over the lengths of targets: numbers that are sent, or a tensor."""
    if reduction == _MEAN:
        if lengths is not None:
            return (losses / lengths.clamp_min(1)).mean()
        return (losses / losses.detach().new_empty(losses.shape).clamp_min(1)).mean()
    return losses.sum() if reduction == _SUM else losses
