"""PyTorch's own transformer modules in evaluation: padded sequences are packed, layers are one operator each.

Recorded with ``--true-values``: whether a padding mask has gaps, and how long sequences are, is read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.recorded.cases.loops.registry import BF16, FP16, ITERATIONS, Loop, add, case, group

group("evaluation", true_values=True)

_LENGTHS = (30, 25, 16, 16, 8, 4, 22, 2)


def _padding(lengths: Sequence[int], longest: int = 32) -> Tensor:
    """True where a sequence is padded, as a collate function makes it."""
    return (torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]).cuda()


def encoder(
    lengths: Sequence[int] = _LENGTHS,
    width: int = 128,
    dtype: torch.dtype = torch.float32,
    mode: Callable[[], Any] = torch.no_grad,
    heads: int = 4,
    gaps: bool = False,
    norm: bool = False,
    **options: Any,
) -> Loop:
    layer = nn.TransformerEncoderLayer(width, heads, 512, batch_first=True, dtype=dtype, **options)
    last = nn.LayerNorm(width, dtype=dtype) if norm else None
    model = nn.TransformerEncoder(layer, 2, norm=last).cuda().eval()
    x, mask = torch.zeros(len(lengths), 32, width, device="cuda", dtype=dtype), _padding(lengths)
    if gaps:
        mask = mask.flip(1)
    for _ in range(ITERATIONS):
        with mode():
            out = model(x, src_key_padding_mask=mask)
            pooled = out.masked_fill(mask[..., None], 0).sum(1)
    yield pooled


add("encoder_packs", encoder)
add("encoder_packs_in_inference_mode", partial(encoder, mode=torch.inference_mode))
add("encoder_packs_norm_first", partial(encoder, norm_first=True, activation="gelu", norm=True))
add("encoder_packs_half", partial(encoder, dtype=FP16))
add("encoder_packs_bf16", partial(encoder, dtype=BF16))
add("encoder_packs_nothing_padded", partial(encoder, (32,) * 8))
add("encoder_packs_a_single_token", partial(encoder, (30, 25, 1, 16)))
add("encoder_packs_other_heads", partial(encoder, width=100))
add("encoder_packs_other_heads_half", partial(encoder, width=100, dtype=FP16))
add("encoder_packs_other_heads_bf16", partial(encoder, (27, 25, 16, 3), width=100, dtype=BF16))
add("encoder_packs_nothing_padded_bf16", partial(encoder, (32,) * 3, dtype=BF16))
add("encoder_packs_wide_heads", partial(encoder, width=1152))
add("encoder_padded_on_the_left", partial(encoder, gaps=True))
add("encoder_autocast", partial(encoder, mode=partial(torch.autocast, "cuda", BF16)))
add("encoder_without_fast_path_odd_heads", partial(encoder, heads=1))


@case("encoder_between_iterations")
def encoder_between_iterations() -> Loop:
    """A classifier that is trained on padded batches and evaluated on others."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(500, 128), "encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(128, 10)}
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def classify(ids: Tensor, mask: Tensor) -> Tensor:
        hidden = model["encoder"](model["tokens"](ids), src_key_padding_mask=mask)
        return model["head"](hidden.masked_fill(mask[..., None], 0).sum(1) / (~mask).sum(1, keepdim=True))

    correct = 0
    for lengths in (_LENGTHS, _LENGTHS[::-1]):
        ids, mask = torch.ones(8, 32, dtype=torch.int64, device="cuda"), _padding(lengths)
        targets = torch.zeros(8, dtype=torch.int64, device="cuda")
        model.train()
        nn.functional.cross_entropy(classify(ids, mask), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            correct = correct + (classify(ids, mask).argmax(-1) == targets).sum()
    yield correct


@case("decoder_in_evaluation")
def decoder_in_evaluation() -> Loop:
    """A whole ``nn.Transformer``: the encoder packs, the decoder attends to what it was given back."""
    model = nn.Transformer(128, 4, 2, 2, 256, batch_first=True).cuda().eval()
    source, target = torch.zeros(8, 32, 128, device="cuda"), torch.zeros(8, 16, 128, device="cuda")
    mask = _padding(_LENGTHS)
    causal = nn.Transformer.generate_square_subsequent_mask(16, device="cuda")
    with torch.no_grad():
        out = model(source, target, tgt_mask=causal, src_key_padding_mask=mask, memory_key_padding_mask=mask)
    yield out
