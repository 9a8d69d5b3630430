"""Buffers of embedding bags (``aten/src/ATen/native/cuda/EmbeddingBag.cu``, PyTorch 2.13; order observed)."""

from __future__ import annotations

from graphmem.capture.kernels.parts.script import Call, Script, rule
from graphmem.capture.kernels.rules.embedding import write_sorted_gradient

_MAX = 2


@rule("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def embedding_bag_rule(call: Call) -> Script | None:
    """The sizes of the bags, the bag of every index, then the result."""
    return Script().output(2).output(1).output(0).output(3)


@rule("aten._embedding_bag_backward.default")
def embedding_bag_backward_rule(call: Call) -> Script | None:
    """Sums and means go the way of a large embedding, however few the indices are; maxima need no order."""
    if call.mode == _MAX or call.sparse or call.indices.numel() == 0:
        return None
    script = Script()
    write_sorted_gradient(script, call.grad, call.indices, int(call.num_weights), call.scale_grad_by_freq, call.card)
    return script
