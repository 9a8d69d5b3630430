"""Buffers of the gradients of embeddings and bags of them (``aten/src/ATen/native/cuda/Embedding.cu``,
``EmbeddingBackwardKernel.cu``, ``EmbeddingBag.cu``).

Many indices are sorted, so that each row of the gradient is summed by one team: partial sums of ten indices first.
Order observed on the real 2.13.0 CUDA build.
"""

from __future__ import annotations

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts import cub
from graphmem.capture.kernels.parts.layout import bytes_of, has_flat_view
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule, scratch_of_deterministic_fill

#: Up to here one kernel walks all the indices (Embedding.cu).
_UNSORTED_INDICES = 3072
#: NROWS_PER_THREAD, MAX_BLOCK_SIZE and MAX_ATOMIC_ACCUM_BLOCKS_PER_SM of EmbeddingBackwardKernel.cu.
_ROWS_PER_PARTIAL = 10
_BLOCK_THREADS = 1024
_BLOCKS_PER_SM = 4
_WARP = 32


def take_sorted_indices(script: Script, count: int, index_bytes: int, bits: int, card: Card) -> tuple[int, int]:
    """Sorted indices and where they came from; the plain range that goes with them, and CUB's storage, go back."""
    size = count * index_bytes
    ordered = script.take(size, "sorted indices")
    origins = script.take(size, "origins of sorted indices")
    order = script.take(size, "range of indices")
    scratch_of_deterministic_fill(script, index_bytes)
    script.scratch(cub.radix_sort_bytes(count, index_bytes, index_bytes, bits, card), "radix sort").give(order)
    return ordered, origins


@recorded_rule("aten.embedding.default")
def embedding_rule(call: Call) -> Script | None:
    """``weight.index_select(0, indices.reshape(-1))`` (ATen/native/Embedding.cpp): indices that cannot be viewed so
    are copied."""
    script, indices = Script(), call.indices
    copies = [] if has_flat_view(indices) else [script.take(bytes_of(indices), "contiguous indices")]
    return scratch_of_deterministic_fill(script.output(0), call.weight.element_size()).give(*copies)


@recorded_rule("aten.embedding_dense_backward.default")
def embedding_backward_rule(call: Call) -> Script | None:
    grad, indices, by_frequency = call.grad_output, call.indices, call.scale_grad_by_freq
    script = Script()
    copies = script.contiguous(indices, "contiguous indices") + script.contiguous(grad, "contiguous gradient")
    count = indices.numel()
    if count == 0 or (count <= _UNSORTED_INDICES and not by_frequency):
        script.output(0)
    else:
        _sorted_gradient(script, grad, indices, call.num_weights, by_frequency, call.card)
    return script.give(*reversed(copies))


_MAX = 2


@recorded_rule("aten._embedding_bag_backward.default")
def embedding_bag_backward_rule(call: Call) -> Script | None:
    """Sums and means go the way of a large embedding, however few the indices are; maxima need no order."""
    if call.mode == _MAX or call.sparse or call.indices.numel() == 0:
        return None
    script = Script()
    _sorted_gradient(script, call.grad, call.indices, int(call.num_weights), call.scale_grad_by_freq, call.card)
    return script


def _sorted_gradient(
    script: Script, grad: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, card: Card
) -> None:
    """The buffers of summing the gradient's rows by sorted index; the gradient itself is output 0."""
    count, size, width = indices.numel(), indices.element_size(), grad.shape[-1]
    bits = int(rows).bit_length() if versions.INDEX_BITS_COUNT_ROWS.holds(card.torch_version) else 8 * size
    ordered, origins = take_sorted_indices(script, count, size, bits, card)
    counts = []
    if by_frequency:
        counts.append(script.take(count * size, "how often each index occurs"))
        for _ in range(2):
            script.scratch(cub.scan_by_key_bytes(count), "scan by key")
    script.output(0)
    segments = script.take(count * size, "segment offsets")
    segment_count = script.take(8, "number of segments")
    unique = script.take(count * size, "unique indices")
    script.scratch(cub.unique_by_key_bytes(count, size, card), "unique by key").give(unique)
    most_segments = min(count, rows)
    partials = script.take(most_segments * size, "partials per segment")
    offsets = script.take(most_segments * size, "partials per segment, summed")
    script.scratch(cub.scan_bytes(most_segments, size, card), "scan")
    partial_count = script.take(8, "number of partials")
    most_partials = count // _ROWS_PER_PARTIAL + most_segments
    starts = script.take(most_partials * size, "starts of partials")
    if _adds_atomically(most_segments, most_partials, width, card):
        sums = [script.take(most_partials * size, "segments of partials")]
        if grad.element_size() == 2:
            sums.append(script.take(rows * width * 4, "fp32 gradient"))
    else:
        sums = [script.take(most_partials * width * max(4, grad.element_size()), "partial gradients")]
    script.give(*reversed(sums), starts, partial_count, offsets, partials, segment_count, segments)
    script.give(*counts, origins, ordered)


def _adds_atomically(segments: int, partials: int, width: int, card: Card) -> bool:
    """Few rows of many indices: partial sums go straight to the gradient."""
    if not versions.EMBEDDING_ADDS_ATOMICALLY.holds(card.torch_version) or torch.are_deterministic_algorithms_enabled():
        return False
    threads = -(-width // _WARP) * _WARP
    blocks = -(-segments * threads // min(threads, _BLOCK_THREADS))
    return blocks < card.sm_count * _BLOCKS_PER_SM and partials > 4 * blocks
