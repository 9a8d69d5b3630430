"""Attention."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.recorded.cases.functions.common import MODEL
from tests.recorded.cases.functions.registry import BF16, BOOL, add, group, index, module, t

group("attention")
LAYER = lambda **k: nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, **k)  # noqa: E731
module("mha", lambda: nn.MultiheadAttention(512, 8, batch_first=True), MODEL, run=lambda m, x: m(x, x, x)[0])
module(
    "mha_no_weights",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
)
module(
    "mha_bf16",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True, dtype=BF16),
    t(8, 128, 512, dtype=BF16),
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
)
module(
    "mha_dropout", lambda: nn.MultiheadAttention(512, 8, dropout=0.1), t(128, 8, 512), run=lambda m, x: m(x, x, x)[0]
)
module(
    "mha_cross",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    t(8, 64, 512),
    run=lambda m, x, y: m(x, y, y, need_weights=False)[0],
)
module(
    "mha_kdim",
    lambda: nn.MultiheadAttention(512, 8, kdim=256, vdim=256, batch_first=True),
    MODEL,
    t(8, 64, 256),
    run=lambda m, x, y: m(x, y, y)[0],
)
module(
    "mha_padding_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, key_padding_mask=k)[0],
)
module(
    "mha_attn_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True),
    MODEL,
    index(128, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, attn_mask=k, need_weights=False)[0],
)
module(
    "mha_bias_kv",
    lambda: nn.MultiheadAttention(512, 8, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    MODEL,
    run=lambda m, x: m(x, x, x)[0],
)
module(
    "mha_fast_path",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
    grad=False,
)
module(
    "mha_fast_path_weights",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    run=lambda m, x: m(x, x, x)[0],
    grad=False,
)
module(
    "mha_fast_path_mask",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True).eval(),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, x, x, key_padding_mask=k, need_weights=False)[0],
    grad=False,
)
module(
    "encoder_layer_fast_path_mask",
    lambda: LAYER().eval(),
    MODEL,
    index(8, 128, dtype=BOOL),
    run=lambda m, x, k: m(x, src_key_padding_mask=k),
    grad=False,
)
module(
    "mha_fast_path_bf16",
    lambda: nn.MultiheadAttention(512, 8, batch_first=True, dtype=BF16).eval(),
    t(8, 128, 512, dtype=BF16),
    run=lambda m, x: m(x, x, x, need_weights=False)[0],
    grad=False,
)
module("encoder_layer", LAYER, MODEL)
module("encoder_layer_norm_first_gelu", lambda: LAYER(norm_first=True, activation="gelu"), MODEL)
module("encoder_layer_bf16", lambda: LAYER(dtype=BF16), t(8, 128, 512, dtype=BF16))
module("encoder_layer_no_dropout", lambda: LAYER(dropout=0.0), MODEL)
module("encoder_layer_mask", LAYER, MODEL, index(128, 128, dtype=BOOL), run=lambda m, x, k: m(x, src_mask=k))
module(
    "encoder_layer_padding", LAYER, MODEL, index(8, 128, dtype=BOOL), run=lambda m, x, k: m(x, src_key_padding_mask=k)
)
module("encoder_layer_eval_grad", lambda: LAYER().eval(), MODEL)
module("encoder_layer_fast_path", lambda: LAYER().eval(), MODEL, grad=False)
module("encoder_layer_fast_path_gelu", lambda: LAYER(activation="gelu", norm_first=True).eval(), MODEL, grad=False)
module("encoder_layer_fast_path_bf16", lambda: LAYER(dtype=BF16).eval(), t(8, 128, 512, dtype=BF16), grad=False)
module(
    "encoder_layer_fast_path_inference",
    lambda: LAYER().eval(),
    MODEL,
    run=lambda m, x: torch.inference_mode()(m)(x),
    grad=False,
)
module("encoder_layer_slow_path_no_grad", LAYER, MODEL, grad=False)
module("encoder_stack", lambda: nn.TransformerEncoder(LAYER(), 2), MODEL)
module("encoder_stack_fast_path", lambda: nn.TransformerEncoder(LAYER().eval(), 2).eval(), MODEL, grad=False)
module("decoder_layer", lambda: nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True), MODEL, t(8, 64, 512))
HEADS, HEADS_HALF = t(4, 8, 128, 64), t(4, 8, 128, 64, dtype=BF16)
add("sdpa", F.scaled_dot_product_attention, HEADS, HEADS, HEADS)
add("sdpa_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS)
add("sdpa_bf16", F.scaled_dot_product_attention, HEADS_HALF, HEADS_HALF, HEADS_HALF)
add("sdpa_mask", F.scaled_dot_product_attention, HEADS, HEADS, HEADS, index(4, 1, 128, 128, dtype=BOOL))
add("sdpa_3d", F.scaled_dot_product_attention, t(8, 128, 64), t(8, 128, 64), t(8, 128, 64))
add("sdpa_odd_head", F.scaled_dot_product_attention, t(4, 8, 128, 50), t(4, 8, 128, 50), t(4, 8, 128, 50))
add("attention_by_hand", lambda q, k, v: F.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v, HEADS, HEADS, HEADS)
_UNALIGNED = t(4, 12, 125, 64)
add("sdpa_mask_unaligned", F.scaled_dot_product_attention, *[_UNALIGNED] * 3, index(4, 1, 125, 125, dtype=BOOL))
# A boolean mask takes the query's type before the math path raises anything to fp32, and lives until the end.
_MATH_HALF = t(4, 8, 128, 50, dtype=BF16)
_MASKS = {"": index(4, 1, 128, 128, dtype=BOOL), "_of_heads": index(4, 8, 128, 128, dtype=BOOL)}
for _suffix, _mask in _MASKS.items():
    add(f"sdpa_math_bf16_mask{_suffix}", F.scaled_dot_product_attention, *[_MATH_HALF] * 3, _mask)
    add(f"sdpa_math_mask{_suffix}", F.scaled_dot_product_attention, *[t(4, 8, 128, 50)] * 3, _mask)
    add(f"sdpa_math_bf16_mask{_suffix}_no_grad", F.scaled_dot_product_attention, *[_MATH_HALF] * 3, _mask, grad=False)
add(
    "sdpa_math_bf16_float_mask",
    F.scaled_dot_product_attention,
    *[_MATH_HALF] * 3,
    t(4, 1, 128, 128, dtype=BF16, grad=False),
)
add(
    "sdpa_math_bf16_causal_dropout",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True),
    *[_MATH_HALF] * 3,
)
_GROUPED = t(4, 2, 128, 64)
add(
    "sdpa_grouped_mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    HEADS,
    _GROUPED,
    _GROUPED,
    _MASKS[""],
)
add(
    "sdpa_grouped_bf16_mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    HEADS_HALF,
    *[t(4, 2, 128, 64, dtype=BF16)] * 2,
    _MASKS[""],
)
module("decoder", lambda: nn.TransformerDecoder(DECODER(), 2), MODEL, t(8, 64, 512))
module(
    "transformer",
    lambda: nn.Transformer(256, 4, 2, 2, 512, batch_first=True),
    t(4, 64, 256),
    t(4, 32, 256),
)


def DECODER() -> nn.Module:
    return nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True)


def _flex(query: torch.Tensor, bias: bool = False, causal: bool = False) -> torch.Tensor:
    """Outside of ``torch.compile``."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, device=query.device)
    score = (lambda s, b, h, i, j: s + (i - j)) if bias else None
    out: torch.Tensor = flex_attention(query, query, query, score_mod=score, block_mask=mask)
    return out


for name, options in (("plain", {}), ("biased", {"bias": True}), ("causal", {"causal": True})):
    add(f"flex_attention_{name}", functools.partial(_flex, **options), t(2, 4, 512, 64))
