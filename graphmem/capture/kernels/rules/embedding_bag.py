"""Buffers of embedding bags (``aten/src/ATen/native/cuda/EmbeddingBag.cu``, PyTorch 2.13; order observed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphmem.capture.kernels.parts.script import Card, Script, rule
from graphmem.capture.kernels.rules.embedding import write_sorted_gradient

_MAX = 2


@rule("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """The sizes of the bags, the bag of every index, then the result."""
    return Script().output(2).output(1).output(0).output(3)


@rule("aten._embedding_bag_backward.default")
def embedding_bag_backward_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """Sums and means go the way of a large embedding, however few the indices are; maxima need no order."""
    grad, indices, rows, by_frequency, mode, sparse = args[0], args[1], *args[6:10]
    if mode == _MAX or sparse or indices.numel() == 0:
        return None
    script = Script()
    write_sorted_gradient(script, grad, indices, int(rows), by_frequency, card)
    return script
