"""Scaled dot-product attention, which a CUDA build resolves to one of four backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphmem.base import versions
from graphmem.capture.kernels.parts.script import Card
from graphmem.capture.kernels.parts.sdp_choice import AttentionCall, can_use, choose_sdp_backend
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.operators_by_version import mask_by_filling
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.tensors import HALF_TYPES
from graphmem.torch_names import private

_aten = torch.ops.aten


def is_fused(card: Card, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if attention of these, without a mask or gradients, is not the math path."""
    return _backend(AttentionCall(query.shape, key.shape, value.shape, query.dtype, card)) != "math"


def nested_attention_backend(card: Card, shape: Sequence[int], dtype: torch.dtype) -> str:
    """The backend for queries, keys and values of one padded shape (batch, heads, length, head) that are nested.

    cuDNN is not asked (seen: 2.13 with cuDNN 9.20 on 9.0), and flash attention takes head sizes that are multiples of 8
    (``check_head_dim_size_flash_nested``, sdp_utils.cpp).
    """
    left_out = {"cudnn"} if shape[-1] % 8 == 0 else {"cudnn", "flash"}
    return _backend(AttentionCall(shape, shape, shape, dtype, card), left_out)


def patch_jagged_attention(patches: Patches, card: Card) -> None:
    """Nested tensors of jagged layout choose in Python (``torch/nested/_internal/sdpa.py``), and ask of each backend
    whether it can: by the tests that are neither for dense tensors alone nor for nested ones of strided layout."""

    def asked(backend: str) -> Callable[..., bool]:
        def can(params: Any, _: bool = False) -> bool:
            operands = params.query, params.key, params.value
            query, key, value = (t.shape for t in operands)
            needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
            call = AttentionCall(
                query, key, value, params.query.dtype, card, None if params.attn_mask is None else (), False,
                params.dropout, params.is_causal, params.enable_gqa, needs_grad,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
            return backend in _enabled_backends() and can_use(backend, call)

        return can

    for name, backend in (("flash", "flash"), ("mem_efficient", "efficient"), ("cudnn", "cudnn")):
        lost = "attention of nested tensors of jagged layout is refused"
        patches.replace(f"torch._C._can_use_{name}_attention", lost, asked(backend))


def _backend(call: AttentionCall, left_out: set[str] | None = None) -> str:
    call = replace(call, deterministic=torch.are_deterministic_algorithms_enabled())
    return choose_sdp_backend(call, _enabled_backends() - (left_out or set()))


def attention(
    card: Card, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``at::scaled_dot_product_attention`` (ATen/native/transformers/attention.cpp)."""
    operands = query, key, value
    if versions.ATTENTION_UNSQUEEZES.holds(card.torch_version) and all(t.dim() == 3 for t in operands):
        q, k, v = (t.unsqueeze(0) for t in operands)
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        return attention(card, q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa).squeeze(0)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    call = AttentionCall(
        query.shape, key.shape, value.shape, query.dtype, card, None, False, dropout_p, is_causal, enable_gqa,
        needs_grad, all(t.stride(-1) == 1 for t in operands),
    )  # fmt: skip
    if attn_mask is not None:
        call = replace(
            call,
            mask=attn_mask.shape,
            mask_requires_grad=attn_mask.requires_grad,
            mask_last_stride_one=attn_mask.stride(-1) == 1,
        )
    backend = _backend(call)
    mask = _float_mask(attn_mask, query, card)  # the math path keeps it until the end
    if backend == "math":
        return _math_attention(*operands, mask, dropout_p, is_causal, scale, enable_gqa, card)
    if backend == "flash":
        return _flash(*operands, dropout_p, is_causal, scale)
    if backend == "cudnn":
        cudnn = _aten._scaled_dot_product_cudnn_attention.default
        return _first(cudnn(*operands, mask, needs_grad, dropout_p, is_causal, False, scale=scale))
    mask = _aligned_mask(mask, query, key)  # one that was converted goes back before the kernel runs
    efficient = _aten._scaled_dot_product_efficient_attention.default
    return _first(efficient(*operands, mask, needs_grad, dropout_p, is_causal, scale=scale))


def _math_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, card: Card,
) -> Tensor:  # fmt: skip
    """``_scaled_dot_product_attention_math``. Spelled out because C++ adds the mask out of place to anything that looks
    like a tensor subclass, and in place on a card. ``mask`` is not boolean any longer; a half one stays half beside
    queries that are raised to fp32."""
    dtype = query.dtype
    is_newer = versions.MATH_ATTENTION_IN_FP32.holds(card.torch_version) and hasattr(_aten, "_safe_softmax")
    if is_newer and dtype in HALF_TYPES and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
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


def _first(results: tuple[Tensor, ...]) -> Tensor:
    """The first of several results; the others die from the first to the last, as members of a ``std::tuple`` do."""
    out, *others = results
    del results
    others.reverse()
    while others:
        others.pop()
    return out


_NOT_HEARD = "that a kernel of attention is switched off is not heard"


def _enabled_backends() -> frozenset[str]:
    """Those whose switch is on. The getters are looked up anew: a capture has its own in their place."""
    switches = {
        "flash": private("torch._C._get_flash_sdp_enabled", _NOT_HEARD, lambda: True),
        "efficient": private("torch._C._get_mem_efficient_sdp_enabled", _NOT_HEARD, lambda: True),
        "math": private("torch._C._get_math_sdp_enabled", _NOT_HEARD, lambda: True),
        "cudnn": private("torch._C._get_cudnn_sdp_enabled", _NOT_HEARD, lambda: True),
    }
    return frozenset(name for name, is_enabled in switches.items() if is_enabled())


def _float_mask(mask: Tensor | None, query: Tensor, card: Card) -> Tensor | None:
    """``convert_boolean_attn_mask``: a boolean mask becomes 0 and -inf in the query's dtype."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    if not versions.MATH_ATTENTION_IN_FP32.holds(card.torch_version):
        return mask_by_filling(mask, query.dtype)
    options = {"dtype": query.dtype, "device": query.device}
    return torch.where(mask, torch.scalar_tensor(0.0, **options), torch.scalar_tensor(-math.inf, **options))


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Head sizes are padded to a multiple of 8 and the output cut back (``pad_last_dim``)."""
    head = query.shape[-1]
    scale = scale if scale is not None else 1 / math.sqrt(head)
    if head % 8 != 0:
        query, key, value = (torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in (query, key, value))
    out = _first(
        _aten._scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, False, scale=scale)
    )
    return out if head % 8 == 0 else out[..., :head]


def _aligned_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """``preprocess_mask``: rows that start at multiples of 8 elements (``pad_bias``), then (B, H, L, S)."""
    if mask is None:
        return None
    if any(stride % 8 != 0 for stride in mask.stride()[:-1]):
        last = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - last % 8))[..., :last]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


#: The operator of attention -> its decomposition on a card.
ATTENTION: dict[OpOverload, Decomposition] = {_aten.scaled_dot_product_attention.default: attention}
