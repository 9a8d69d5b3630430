"""The fused inference paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, spelled out.

Each is one operator with no meta kernel whose memory on a card is written here, tensor by tensor
(ATen/native/transformers/cuda/attention.cu and ATen/native/transformers/transformer.cpp, dense tensors only). The
modules take them without gradients, in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphmem.capture.kernels.parts.script import Arguments, Card, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.operators.attention import attention, is_fused
from graphmem.capture.operators.layers_and_losses import linear
from graphmem.capture.torch_internals import OpOverload

_aten = torch.ops.aten


@named("aten._native_multi_head_attention.default")
def _multi_head_attention(card: Card, call: Arguments) -> tuple[Tensor, Tensor | None]:
    """By the fused kernel where nothing but the result of self-attention is wanted, else by products."""
    query = call.query
    plain = query is call.key is call.value and call.mask is None and not call.need_weights
    if plain:
        shape = (query.shape[0], -1, call.num_head, call.embed_dim // call.num_head)
        heads = query.view(shape).transpose(1, 2)
        if is_fused(card, heads, heads, heads):
            packed = linear(query, call.qkv_weight, call.qkv_bias)
            q, k, v = (part.view(shape).transpose(1, 2) for part in packed.chunk(3, -1))
            attended = attention(card, q, k, v).transpose(1, 2).reshape(query.shape[0], -1, call.embed_dim)
            out = linear(attended, call.proj_weight, call.proj_bias)
            del attended
            return out, None
    return _by_products(call)


def _by_products(call: Arguments) -> tuple[Tensor, Tensor | None]:
    """``native_multi_head_attention_cuda``: heads split, two batched products, a softmax over the scores in place."""
    batch, tokens, _ = call.query.shape
    heads, head = call.num_head, call.embed_dim // call.num_head
    packed = _projected(call.query, call.key, call.value, call.embed_dim, call.qkv_weight)
    split = packed.new_empty((3, batch, heads, tokens, head))
    del packed
    scores = torch.bmm(split[0].view(-1, tokens, head), split[1].view(-1, tokens, head).transpose(1, 2))
    scores = scores.view(batch, heads, tokens, tokens)
    if call.mask is not None:
        mask = call.mask.bool()
        scores = torch.empty_like(scores)
        del mask
    context = split[0]  # the attended values overwrite the query
    torch.bmm(scores.view(-1, tokens, tokens), split[2].view(-1, tokens, head), out=context.view(-1, tokens, head))
    weights = scores if call.need_weights else None
    del scores
    flat = context.permute(0, 2, 1, 3).contiguous().view(batch * tokens, call.embed_dim)
    out = torch.addmm(call.proj_bias, flat, call.proj_weight.t()).view(batch, tokens, call.embed_dim)
    del flat
    if weights is not None and call.average_attn_weights:
        weights = weights.sum(1)
        weights.div_(heads)
    return out, weights


def _projected(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product if all three are the same, else two or three whose results are joined."""
    if query is key and key is value:
        return torch.matmul(query, weight.t())
    if key is value:
        first, rest = weight.split((embed_dim, 2 * embed_dim))
        return torch.cat((torch.matmul(query, first.t()), torch.matmul(key, rest.t())), 2)
    parts = zip((query, key, value), weight.chunk(3), strict=True)
    return torch.cat([torch.matmul(tensor, part.t()) for tensor, part in parts], 2)


@named("aten._transformer_encoder_layer_fwd.default")
def _encoder_layer(card: Card, call: Arguments) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        projections = call.qkv_weight, call.qkv_bias, call.proj_weight, call.proj_bias
        sizes, options = (call.embed_dim, call.num_heads), (False, True, call.mask_type)
        return _multi_head_attention(card, x, x, x, *sizes, *projections, call.mask, *options)[0]

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(x, (call.embed_dim,), weight, bias, call.eps)

    return encoder_layer(call, call.src, attend, norm)


def encoder_layer(
    call: Arguments, src: Tensor, attend: Callable[[Tensor], Tensor], norm: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """``transformer_encoder_layer_forward`` of values that are attended and normalized by the functions given."""
    weights_1, weights_2 = (call.norm_weight_1, call.norm_bias_1), (call.norm_weight_2, call.norm_bias_2)
    x = norm(src, *weights_1) if call.norm_first else src
    x = attend(x)
    x.add_(src)
    if not call.norm_first:
        x = norm(x, *weights_1)
    before = x
    if call.norm_first:
        x = norm(x, *weights_2)
    x = _feed_forward(x, call)
    x.add_(before)
    return x if call.norm_first else norm(x, *weights_2)


def _feed_forward(x: Tensor, call: Arguments) -> Tensor:
    """The activation is fused into the first product (``_addmm_activation``)."""
    flat = torch.addmm(call.ffn_bias_1, x.reshape(-1, x.shape[-1]), call.ffn_weight_1.t())
    return torch.addmm(call.ffn_bias_2, flat, call.ffn_weight_2.t()).view(*x.shape[:-1], call.ffn_weight_2.shape[0])


#: The two operators -> their decompositions on a card.
TRANSFORMER_LAYERS: dict[OpOverload, Decomposition] = {
    _aten._native_multi_head_attention.default: _multi_head_attention,
    _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
