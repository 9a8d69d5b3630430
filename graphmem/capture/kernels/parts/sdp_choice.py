"""Which attention kernel CUDA's scaled_dot_product_attention would pick.

A CPU build answers for the CPU, so the choice is made here: the backends are tried in order of priority, each behind
the tests of its own. Source: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h`` of
PyTorch 2.13; dense tensors on NVIDIA cards only. Compared with the answers of the 2.13.0 CUDA build on 21,000 random
calls over compute capabilities 7.5 to 12.0: no difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import HALF_TYPES
from graphmem.capture.kernels.parts.script import Card
from graphmem.devices.capabilities import Capability

BACKENDS = frozenset({"flash", "efficient", "math", "cudnn"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of scaled_dot_product_attention, by shapes, and the machine it is made on.

    ``requires_grad``: one of query, key, value does and grad mode is on. ``last_stride_one``: the last stride of query,
    key and value is 1. ``deterministic``: ``use_deterministic_algorithms(True)``, not the warn-only kind.
    ``cudnn_version``: None for that of the wheel of the card's PyTorch.
    """

    query: Sequence[int]
    key: Sequence[int]
    value: Sequence[int]
    dtype: torch.dtype
    card: Card
    mask: Sequence[int] | None = None
    mask_requires_grad: bool = False
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False
    requires_grad: bool = False
    last_stride_one: bool = True
    mask_last_stride_one: bool = True
    deterministic: bool = False
    cudnn_version: int | None = None

    @property
    def limits(self) -> Capability:
        return self.card.limits

    @property
    def cudnn(self) -> int:
        return versions.wheel_cudnn(self.card.torch_version) if self.cudnn_version is None else self.cudnn_version

    @property
    def is_half(self) -> bool:
        return self.dtype in HALF_TYPES


def choose_sdp_backend(call: AttentionCall, enabled: frozenset[str] = BACKENDS) -> str:
    """The backend: ``flash``, ``efficient``, ``cudnn`` or ``math``. Raises RuntimeError as PyTorch does where none that
    is ``enabled`` can."""
    if not versions.ATTENTION_IN_ONE_KERNEL.holds(call.card.torch_version):
        return "math"
    for backend in _priority_order(call):
        if backend in enabled and can_use(backend, call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def can_use(backend: str, call: AttentionCall) -> bool:
    """Whether a backend takes the call."""
    return _CAN_USE[backend](call)


def _priority_order(call: AttentionCall) -> tuple[str, ...]:
    """``check_prefer_cudnn_attention`` of sdp_utils.cpp, and the order of ATen/Context.h."""
    last = versions.CUDNN_ATTENTION_DEPRIORITIZED.holds(call.card.torch_version) and versions.flag(
        os.environ, "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    )
    if call.cudnn > 91500 and call.limits.cudnn_attention_first and not last:
        return ("cudnn", "flash", "efficient", "math")
    return ("flash", "efficient", "math", "cudnn")


def _can_use_flash(call: AttentionCall) -> bool:
    head_dim = call.query[-1]
    return (
        _is_4d(call)
        and call.mask is None
        and head_dim == call.key[-1] == call.value[-1] <= 256
        and call.limits.flash_attention
        and _flash_can_train(call)
        and not (call.is_causal and call.query[-2] != call.key[-2])
        and call.is_half
        and _batch_and_heads(call, supports_gqa=True)
        and _has_sequences(call)
        and (_last_strides(call) or head_dim == 1)
    )


def _flash_can_train(call: AttentionCall) -> bool:
    """The backward kernel of large heads asks more shared memory than the consumer cards have."""
    if not call.requires_grad or call.limits.flash_trains_wide_heads:
        return True
    head_dim = call.query[-1]
    return head_dim <= 192 or (call.dropout_p == 0.0 and head_dim > 224)


def _can_use_efficient(call: AttentionCall) -> bool:
    alignment = _minimum_gemm_alignment(call)
    d_qk, d_v = call.query[-1], call.value[-1]
    dtypes = {torch.float16, torch.float32} | ({torch.bfloat16} if call.limits.bfloat16 else set())
    return (
        _is_4d(call)
        and d_qk == call.key[-1]
        and d_qk > 0
        and d_qk % alignment == 0
        and d_v > 0
        and d_v % alignment == 0
        and _has_sequences(call)
        and _last_strides(call)
        and _batch_and_heads(call, supports_gqa=_groups_efficiently(call))
        and call.dtype in dtypes
    )


def _minimum_gemm_alignment(call: AttentionCall) -> int:
    kernels = call.limits.efficient_attention
    uses_tensor_cores = kernels >= 80 or (kernels >= 70 and call.is_half)
    alignment = 4 if kernels >= 80 else 1
    return max(alignment, 128 // (16 if call.is_half else 32)) if uses_tensor_cores else alignment


def _can_use_cudnn(call: AttentionCall) -> bool:
    if call.dropout_p > 0.0 and 91100 < call.cudnn < 91400:
        return False
    return (
        _is_4d(call)
        and not call.deterministic
        and call.is_half
        and _cudnn_mask(call)
        and call.limits.flash_attention
        and _cudnn_dropout(call)
        and _has_sequences(call)
        and (_last_strides(call) or call.query[-1] == 1)
        and _batch_and_heads(call, supports_gqa=True, same_kv_heads=False)
        and _cudnn_shapes(call)
    )


def _cudnn_dropout(call: AttentionCall) -> bool:
    # cuDNN resolves the probability to 1/16 only.
    in_sixteenths = versions.CUDNN_DROPOUT_IN_SIXTEENTHS.holds(call.card.torch_version)
    return not in_sixteenths or (call.dropout_p * 16).is_integer()


def _cudnn_mask(call: AttentionCall) -> bool:
    """Whether cuDNN takes the mask: none, or one that broadcasts to (batch, heads, queries, keys)."""
    mask = call.mask
    if mask is None:
        return True
    if call.mask_requires_grad or len(mask) not in (2, 4):
        return False
    wanted = (*call.query[:3], call.key[2])[-len(mask) :]
    return all(size in (1, target) for size, target in zip(mask, wanted, strict=True))


def _cudnn_shapes(call: AttentionCall) -> bool:
    batch, heads, query_length, d_qk = call.query
    key_length, d_v = call.key[2], call.value[3]
    if versions.CUDNN_ATTENTION_LIMITS_BATCH.holds(call.card.torch_version) and max(batch, heads) > 65535:
        return False
    return (
        max(d_qk, d_v) <= _cudnn_head_dim_limit(call, d_qk, d_v)
        and d_qk % 8 == 0
        and d_v % 8 == 0
        and key_length != 1
        and not (query_length == 1 and call.dropout_p != 0.0)
    )


def _cudnn_head_dim_limit(call: AttentionCall, d_qk: int, d_v: int) -> int:
    if call.cudnn >= 91100 and call.limits.cudnn_attention_192_128 and (d_qk, d_v) == (192, 128):
        return 192
    return call.limits.cudnn_attention_head if call.cudnn >= 91000 else 128


def _is_4d(call: AttentionCall) -> bool:
    return len(call.query) == len(call.key) == len(call.value) == 4


def _has_sequences(call: AttentionCall) -> bool:
    return call.query[-2] != 0 and call.key[-2] != 0


def _last_strides(call: AttentionCall) -> bool:
    return call.last_stride_one and (call.mask is None or call.mask_last_stride_one)


def _batch_and_heads(call: AttentionCall, *, supports_gqa: bool, same_kv_heads: bool = True) -> bool:
    if not call.query[0] == call.key[0] == call.value[0]:
        return False
    heads, key_heads, value_heads = call.query[-3], call.key[-3], call.value[-3]
    one_head = _groups_efficiently(call) and key_heads == value_heads == 1
    if (call.enable_gqa or one_head) and supports_gqa:
        if same_kv_heads and key_heads != value_heads:
            return False
        return heads % key_heads == 0 and (same_kv_heads or heads % value_heads == 0)
    return heads == key_heads == value_heads


def _groups_efficiently(call: AttentionCall) -> bool:
    return versions.EFFICIENT_ATTENTION_GROUPED.holds(call.card.torch_version)


_CAN_USE: dict[str, Callable[[AttentionCall], bool]] = {
    "flash": _can_use_flash,
    "efficient": _can_use_efficient,
    "cudnn": _can_use_cudnn,
    "math": lambda call: True,
}
