"""Meta kernels (shapes of outputs) of operators that PyTorch gives none, or only one that wants values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NONE = 0


def meta_kernels() -> dict[str, Callable[..., Any]]:
    """By operator name: a function of fake tensors that returns fake outputs."""
    since_2_8 = {"aten::_grouped_mm": _grouped_mm} if hasattr(torch.ops.aten, "_grouped_mm") else {}
    return {
        **since_2_8,
        "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
        "aten::_ctc_loss": _ctc_loss,
        "aten::_ctc_loss_backward": _like_first_input,
        "aten::multi_margin_loss": _margin_loss,
        "aten::multi_margin_loss_backward": _like_first_input,
        "aten::multilabel_margin_loss_forward": _multilabel_margin_loss,
        "aten::multilabel_margin_loss_backward": _like_first_input,
        "aten::_sample_dirichlet": _like_argument,
        "aten::_dirichlet_grad": _like_argument,
        "aten::_standard_gamma_grad": _like_argument,
        "aten::binomial": _like_argument,
        "aten::batch_norm_stats": _statistics,
        "aten::batch_norm_gather_stats": _statistics,
        "aten::batch_norm_gather_stats_with_counts": _statistics,
        "aten::batch_norm_elemt": _normalized,
        "aten::batch_norm_backward_reduce": _batch_norm_sums,
        "aten::batch_norm_backward_elemt": _like_second_input,
        "aten::fractional_max_pool3d": _fractional_max_pool3d,
        "aten::fractional_max_pool3d_backward": _like_first_input,
    }


def _grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Of any precision, and with rows padded to 16 bytes, as CUDA builds do (``create_grouped_gemm_output_tensor``)."""
    del bias
    if (self.dim() == 3 or mat2.dim() == 3) and self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    dtype = out_dtype or self.dtype
    alignment = 16 // dtype.itemsize
    rows, columns = self.shape[-2], mat2.shape[-1]
    row_stride = -(-columns // alignment) * alignment
    if self.dim() != mat2.dim():
        return self.new_empty_strided((rows, columns), (row_stride, 1), dtype=dtype)
    groups = self.shape[0] if offs is None else offs.shape[0]
    return self.new_empty_strided((groups, rows, columns), (rows * row_stride, row_stride, 1), dtype=dtype)


def _efficient_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients have the heads of what they are of; meta kernels before 2.15 know no fewer key than query heads."""
    del grad_out, out, logsumexp, philox_seed, philox_offset, dropout_p, is_causal, scale
    gradients = [
        torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)
        for tensor in (query, key, value)
    ]
    bias = None
    if attn_bias is not None and grad_input_mask[3]:
        columns = attn_bias.shape[-1]
        bias = attn_bias.new_empty((*attn_bias.shape[:-1], -(-columns // 16) * 16))[..., :columns]
    return gradients[0], gradients[1], gradients[2], bias


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    del targets, input_lengths, blank, zero_infinity
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = max(target_lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))


def _like_argument(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(self, memory_format=torch.contiguous_format)


def _like_first_input(grad: Tensor, self: Tensor, *_: Any, **__: Any) -> Tensor:
    del grad
    return torch.empty_like(self, memory_format=torch.contiguous_format)


def _statistics(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of every channel, of ``SyncBatchNorm``; of half types in fp32."""
    dtype = torch.float64 if input.dtype is torch.float64 else torch.float32
    return input.new_empty(input.shape[1], dtype=dtype), input.new_empty(input.shape[1], dtype=dtype)


def _normalized(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _like_second_input(grad_out: Tensor, input: Tensor, *_: Any) -> Tensor:
    del grad_out
    return torch.empty_like(input)


def _batch_norm_sums(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """Two sums of every channel, and the gradients of weight and bias, as far as they are asked for."""
    del grad_out, invstd
    channels = input.shape[1]
    sums = [mean.new_empty(channels) if input_g else None for _ in range(2)]
    own = mean if weight is None else weight
    return (*sums, *(own.new_empty(channels) if wanted else None for wanted in (weight_g, bias_g)))


def _margin_loss(
    self: Tensor, target: Tensor, p: Any = 1, margin: Any = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    del p, margin, weight
    return self.new_empty(target.shape if reduction == _NONE else ())


def _multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    rows = self.shape[:-1] if reduction == _NONE else ()
    return self.new_empty(rows), self.new_empty(target.shape)


def _fractional_max_pool3d(
    self: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor
) -> tuple[Tensor, Tensor]:
    del kernel_size, random_samples
    shape = (*self.shape[:-3], *output_size)
    return self.new_empty(shape), self.new_empty(shape, dtype=torch.int64)
