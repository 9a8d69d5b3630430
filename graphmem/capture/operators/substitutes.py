"""Composite operators that a CUDA build resolves otherwise than the fake run would.

Each function here stands for one composite ``aten`` operator and calls the operators that CUDA's version of it calls;
their autograd formulas and meta kernels exist in every build. They are installed in the dispatcher (AutogradCUDA), so
they also act inside C++ composites, and given to the recorder for inference mode, where composites arrive whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from graphmem.capture.device.torch_versions import ExistingFakes
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.kernels.parts.sdp_choice import choose_sdp_backend
from graphmem.capture.operators.composites import FUSED_ON_CUDA, composite_substitutes
from graphmem.capture.operators.fused_inference import fast_paths
from graphmem.capture.operators.missing_fakes import missing_fakes
from graphmem.capture.operators.older_versions import (
    FUSED_RMS_NORM_SINCE,
    MATH_ATTENTION_IN_FP32_SINCE,
    composed_rms_norm,
    mask_by_filling,
    patch_indexing,
)
from graphmem.capture.operators.recurrent.operators import recurrent_fakes, recurrent_substitutes
from graphmem.capture.operators.views import views_of_cpp
from graphmem.capture.patches import Patches, quiet_registration

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def cuda_substitutes(card: Card) -> Iterator[dict[Any, Callable[..., Any]]]:
    """Install the substitutes for the duration; yields them by operator."""
    table = _table(card)
    library = torch.library.Library("aten", "IMPL")
    fakes, patches = ExistingFakes(library), Patches()
    try:
        patch_indexing(patches, card.torch_version)
        with quiet_registration():
            for op, function in table.items():
                library.impl(op, function, "AutogradCUDA")
            for op in FUSED_ON_CUDA:
                library.impl(op, _never_called, "CUDA")
            fakes.replace({**missing_fakes(), **recurrent_fakes()})
        with views_of_cpp():
            yield table
    finally:
        patches.undo()
        fakes.restore()
        library._destroy()


def _never_called(*_: Any, **__: Any) -> Any:
    """A CUDA kernel's place: its presence makes the dispatcher take the operator's own gradient formula. Fake tensors
    are intercepted before they would arrive here."""
    raise AssertionError("a kernel ran on a fake tensor")


def _table(card: Card) -> dict[Any, Callable[..., Any]]:
    return {
        **composite_substitutes(card),
        **recurrent_substitutes(),
        **fast_paths(_attention(card), _linear, _fuses_attention(card)),
        _aten.linear.default: _linear,
        _aten.dropout.default: _dropout,
        _aten.softmax.int: _softmax_like(_aten._softmax.default),
        _aten.log_softmax.int: _softmax_like(_aten._log_softmax.default),
        _aten.rms_norm.default: _rms_norm_of(card),
        _aten.batch_norm.default: _batch_norm,
        _aten.scaled_dot_product_attention.default: _attention(card),
    }


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``at::linear``, because C++ adds the bias out of place to anything that looks like a tensor subclass, and in
    place on a card (ATen/native/Linear.cpp)."""
    if bias is not None and input.dim() == 2:
        return torch.addmm(bias, input, weight.t())
    if bias is not None and (input.dim() == 1 or (input.dim() > 2 and input.is_contiguous())):
        flat = torch.addmm(bias, input.reshape(-1, input.shape[-1]), weight.t())
        return flat.view(*input.shape[:-1], flat.shape[-1])
    output = torch.matmul(input, weight.t())
    return output if bias is None else output.add_(bias)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """``at::dropout``: the fused kernel keeps a mask of one byte an element (ATen/native/Dropout.cpp)."""
    if train and 0 < p < 1 and input.numel() > 0:
        return _aten.native_dropout.default(input, p, train)[0]
    if p == 0 or not train or input.numel() == 0:
        return input
    return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))


def _softmax_like(kernel: Any) -> Callable[..., Tensor]:
    """``at::softmax(x, dim, dtype)``: half to float is fused into the kernel (ATen/native/SoftMax.cpp)."""

    def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if self.dtype is torch.float16 and dtype is torch.float32:
            return kernel(self, dim, True)
        converted = self if dtype is None or dtype is self.dtype else self.to(dtype)
        return kernel(converted, dim, False)

    return softmax


def _rms_norm_of(card: Card) -> Callable[..., Tensor]:
    if card.torch_version < FUSED_RMS_NORM_SINCE or not hasattr(_aten, "_fused_rms_norm"):
        return composed_rms_norm(card.torch_version)
    return _rms_norm


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``at::rms_norm`` is one fused kernel on CUDA (ATen/native/layer_norm.cpp, 2.9 and later)."""
    return _aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


#: ``CUDNN_BN_MIN_EPSILON``, and the largest batches cuDNN takes (ATen/native/Normalization.cpp).
_CUDNN_MIN_EPSILON = 1e-5
_CUDNN_MAX_BATCH = {True: 880801, False: 65535}


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """``at::_batch_norm_impl_index``: cuDNN where its conditions hold, the native kernel elsewhere."""
    if cudnn_enabled and _cudnn_takes(input, weight, bias, running_mean, running_var, training, eps):
        input = input.contiguous(memory_format=_suggested_format(input))
        return _aten.cudnn_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)[
            0
        ]
    return _aten.native_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _cudnn_takes(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, eps: float) -> bool:
    return (
        torch.backends.cudnn.enabled
        and x.dtype is not torch.bfloat16
        and weight is not None
        and bias is not None
        and weight.dtype is not torch.bfloat16
        and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
        and ((mean is not None and var is not None) or (mean is None and var is None and training))
        and x.dim() >= 3
        and x.shape[0] <= _CUDNN_MAX_BATCH[training]
        and eps >= _CUDNN_MIN_EPSILON
        and x.numel() < 2**31
    )


def _suggested_format(tensor: Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _fuses_attention(card: Card) -> Callable[..., bool]:
    def fuses(query: Tensor, key: Tensor, value: Tensor) -> bool:
        backend = choose_sdp_backend(
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            query.dtype,
            card,
            enabled=_enabled_backends(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return backend != "math"

    return fuses


def _attention(card: Card) -> Callable[..., Tensor]:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``at::scaled_dot_product_attention`` (ATen/native/transformers/attention.cpp)."""
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        backend = choose_sdp_backend(
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            query.dtype,
            card,
            mask_shape=None if attn_mask is None else tuple(attn_mask.shape),
            mask_requires_grad=attn_mask is not None and attn_mask.requires_grad,
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            requires_grad=needs_grad,
            enabled=_enabled_backends(),
            last_stride_one=all(t.stride(-1) == 1 for t in (query, key, value)),
            mask_last_stride_one=attn_mask is None or attn_mask.stride(-1) == 1,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if backend == "math":
            return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, card)
        mask = _float_mask(attn_mask, query, card)
        if backend == "cudnn":
            return _aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        mask = _aligned_mask(mask, query, key)  # one that was converted goes back before the kernel runs
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]

    return attention


def _math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    card: Card,
) -> Tensor:
    """``_scaled_dot_product_attention_math``. Spelled out because C++ adds the mask out of place to anything that looks
    like a tensor subclass, and in place on a card."""
    dtype = query.dtype
    is_newer = card.torch_version >= MATH_ATTENTION_IN_FP32_SINCE and hasattr(_aten, "_safe_softmax")
    if is_newer and dtype in _HALF and not torch._C._get_math_sdp_allow_fp16_bf16_reduction():
        query, key, value = query.float(), key.float(), value.float()
    mask = _float_mask(mask, query, card)
    root = math.sqrt(abs(scale if scale is not None else 1 / math.sqrt(query.shape[-1])))
    scaled = query * (-root if scale is not None and scale < 0 else root)
    if is_causal:
        causal = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
        mask = _float_mask(causal, query, card)
        del causal
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    attention = torch.matmul(scaled, key.transpose(-2, -1) * root)
    if mask is not None:
        attention.add_(mask)
    attention = _aten._safe_softmax.default(attention, -1) if is_newer else torch.softmax(attention, -1)
    if dropout_p > 0:
        attention = torch.dropout(attention, dropout_p, True)
    weights = attention.to(dtype)  # the second result, computed first (arguments are evaluated from right to left)
    out = torch.matmul(attention, value).to(dtype)
    del attention, scaled, mask, query, key, value  # locals die from the last to the first, then the result tuple
    del weights
    return out


def _enabled_backends() -> frozenset[str]:
    flags = {
        "flash": torch._C._get_flash_sdp_enabled(),
        "efficient": torch._C._get_mem_efficient_sdp_enabled(),
        "math": torch._C._get_math_sdp_enabled(),
        "cudnn": torch._C._get_cudnn_sdp_enabled(),
    }
    return frozenset(name for name, enabled in flags.items() if enabled)


def _float_mask(mask: Tensor | None, query: Tensor, card: Card) -> Tensor | None:
    """``convert_boolean_attn_mask``: a boolean mask becomes 0 and -inf in the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    if card.torch_version < MATH_ATTENTION_IN_FP32_SINCE:
        return mask_by_filling(mask, query.dtype)
    options = {"dtype": query.dtype, "device": query.device}
    return torch.where(mask, torch.scalar_tensor(0.0, **options), torch.scalar_tensor(-math.inf, **options))


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: Any) -> Tensor:
    """Head sizes are padded to a multiple of 8 and the output cut back (``pad_last_dim``)."""
    head = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(head)
    if head % 8 != 0:
        query, key, value = (torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out if head % 8 == 0 else out[..., :head]


def _aligned_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """``preprocess_mask``: rows that start at multiples of 8 elements (``pad_bias``), then (B, H, L, S)."""
    if mask is None:
        return None
    if any(stride % 8 != 0 for stride in mask.stride()[:-1]):
        last = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - last % 8))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
