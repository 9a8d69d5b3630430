"""The fused inference paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, spelled out.

Each is one operator with no meta kernel that does on a card what is written here, tensor by tensor
(ATen/native/transformers/cuda/attention.cu and ATen/native/transformers/transformer.cpp, dense tensors only). The
modules take them without gradients, in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def transformer_layers(
    attention: Callable[..., Tensor], linear: Callable[..., Tensor], is_fused: Callable[..., bool]
) -> dict[Any, Callable[..., Any]]:
    """``attention`` and ``linear``: CUDA's; ``is_fused(query, key, value)``: attention is not the math path."""

    def multi_head_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim: int,
        num_head: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        mask_type: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        del mask_type
        batch, tokens, _ = query.shape
        head = embed_dim // num_head
        if query is key and key is value and mask is None and not need_weights:
            heads = query.view(batch, -1, num_head, head).transpose(1, 2)
            if is_fused(heads, heads, heads):
                packed = linear(query, qkv_weight, qkv_bias)
                q, k, v = (part.view(batch, -1, num_head, head).transpose(1, 2) for part in packed.chunk(3, -1))
                attended = attention(q, k, v).transpose(1, 2).reshape(batch, -1, embed_dim)
                out = linear(attended, proj_weight, proj_bias)
                del attended
                return out, None
        packed = _projected(query, key, value, embed_dim, qkv_weight)
        split = packed.new_empty((3, batch, num_head, tokens, head))
        del packed
        scores = torch.bmm(split[0].view(-1, tokens, head), split[1].view(-1, tokens, head).transpose(1, 2))
        scores = scores.view(batch, num_head, tokens, tokens)
        if mask is not None:
            mask = mask.bool()
            scores = torch.empty_like(scores)
            del mask
        context = split[0]  # the attended values overwrite the query
        torch.bmm(scores.view(-1, tokens, tokens), split[2].view(-1, tokens, head), out=context.view(-1, tokens, head))
        if not need_weights:
            del scores
        flat = context.permute(0, 2, 1, 3).contiguous().view(batch * tokens, embed_dim)
        out = torch.addmm(proj_bias, flat, proj_weight.t()).view(batch, tokens, embed_dim)
        del flat
        if not need_weights:
            return out, None
        if average_attn_weights:
            scores = scores.sum(1)
            scores.div_(num_head)
        return out, scores

    def encoder_layer(
        src: Tensor,
        embed_dim: int,
        num_heads: int,
        qkv_weight: Tensor,
        qkv_bias: Tensor,
        proj_weight: Tensor,
        proj_bias: Tensor,
        use_gelu: bool,
        norm_first: bool,
        eps: float,
        norm_weight_1: Tensor,
        norm_bias_1: Tensor,
        norm_weight_2: Tensor,
        norm_bias_2: Tensor,
        ffn_weight_1: Tensor,
        ffn_bias_1: Tensor,
        ffn_weight_2: Tensor,
        ffn_bias_2: Tensor,
        mask: Tensor | None = None,
        mask_type: int | None = None,
    ) -> Tensor:
        del use_gelu

        def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.layer_norm(x, (embed_dim,), weight, bias, eps)

        x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
        x = multi_head_attention(
            x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )[0]
        x.add_(src)
        if not norm_first:
            x = norm(x, norm_weight_1, norm_bias_1)
        before = x
        if norm_first:
            x = norm(x, norm_weight_2, norm_bias_2)
        x = _feed_forward(x, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2)
        x.add_(before)
        return x if norm_first else norm(x, norm_weight_2, norm_bias_2)

    return {
        _aten._native_multi_head_attention.default: multi_head_attention,
        _aten._transformer_encoder_layer_fwd.default: encoder_layer,
    }


def _projected(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product if all three are the same, else two or three whose results are joined."""
    if query is key and key is value:
        return torch.matmul(query, weight.t())
    if key is value:
        first, rest = weight.split((embed_dim, 2 * embed_dim))
        return torch.cat((torch.matmul(query, first.t()), torch.matmul(key, rest.t())), 2)
    parts = zip((query, key, value), weight.chunk(3), strict=True)
    return torch.cat([torch.matmul(tensor, part.t()) for tensor, part in parts], 2)


def _feed_forward(x: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor) -> Tensor:
    """The activation is fused into the first product (``_addmm_activation``)."""
    flat = torch.addmm(bias_1, x.reshape(-1, x.shape[-1]), weight_1.t())
    return torch.addmm(bias_2, flat, weight_2.t()).view(*x.shape[:-1], weight_2.shape[0])
