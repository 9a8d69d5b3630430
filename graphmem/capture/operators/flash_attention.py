"""Decompositions of the FlashAttention kernels that serving engines bring, whose libraries give them no shapes.

Source: vllm-project/flash-attention, ``hopper/flash_api.cpp`` (version 3, the operators of ``_vllm_fa3_C`` and of
SGLang's ``sgl_kernel``) and ``csrc/flash_attn/flash_api.cpp`` (version 2, ``_vllm_fa2_C``). Both write into the output
that they are given. Where the number of parts that keys are split into is left to version 3 (``num_splits`` 0), one is
taken, as in recorded starts of vLLM.
"""

from __future__ import annotations

from torch import Tensor, dtype, float32, int32

from graphmem.capture.kernels.parts.script import Arguments, named
from graphmem.capture.operators import Decomposition
from graphmem.capture.values.assumed_values import Selection

#: Most sequences whose keys are split (``PREPARE_VARLEN_MAX_BATCHES_1CTA``, hopper/flash.h).
_MOST_SPLIT = 992
#: Sequences to which a schedule's vectors are rounded up.
_ROUNDED = 4


def _schedule(_: Selection, call: Arguments) -> Tensor:
    """A semaphore, and of every sequence its blocks of queries, its parts, and the heads that fit into the cache."""
    is_one_token = call.max_seqlen_q == 1
    left = -1 if call.window_size_left >= call.max_seqlen_k - 1 else call.window_size_left
    right = -1 if call.window_size_right >= call.max_seqlen_q - 1 else call.window_size_right
    is_causal = call.is_causal
    if is_one_token and left == right == -1 and (not 64 < call.headdim <= 128 or call.page_size is None):
        is_causal = False  # one token sees all keys; heads of 128 keep the tile of causal attention
    vectors = 1 + (call.batch_size <= _MOST_SPLIT and call.num_splits > 1) + (is_causal or left >= 0 or right >= 0)
    rounded = -(-call.batch_size // _ROUNDED) * _ROUNDED
    return call.seqused_k.new_empty(1 + rounded * vectors, dtype=int32)


def _attend_in_parts(_: Selection, call: Arguments) -> list[Tensor]:
    """The logarithms of the sums of exponentials, and the parts' results in single precision."""
    rows, heads = call.q.shape[0], call.q.shape[-2]
    sequences = call.cu_seqlens_q.shape[0] - 1
    out = call.q.new_empty((rows, heads, call.v.shape[-1])) if call.out is None else call.out
    sums = _single(call.q, heads, rows)
    if call.num_splits <= 1 or sequences > _MOST_SPLIT:
        return [out, sums, _single(call.q, 0), _single(call.q, 0)]
    parts = _single(call.q, call.num_splits, heads, rows, call.v.shape[-1])
    return [out, sums, parts, _single(call.q, call.num_splits, heads, rows)]


def _single(query: Tensor, *sizes: int, kind: dtype = float32) -> Tensor:
    return query.new_empty(sizes, dtype=kind)


@named("_vllm_fa2_C.varlen_fwd.default")
def _attend(_: Selection, call: Arguments) -> list[Tensor]:
    """The logarithms of the sums of exponentials."""
    out = call.q.new_empty(call.q.shape) if call.out is None else call.out
    return [out, _single(call.q, call.q.shape[-2], call.q.shape[0])]


#: Operator by full name -> its decomposition. The libraries are not loaded by this, so there are no objects to name.
DECOMPOSITIONS: dict[str, Decomposition] = {
    "_vllm_fa3_C.get_scheduler_metadata.default": named("_vllm_fa3_C.get_scheduler_metadata.default")(_schedule),
    "_vllm_fa3_C.fwd.default": named("_vllm_fa3_C.fwd.default")(_attend_in_parts),
    "_vllm_fa2_C.varlen_fwd.default": _attend,
    "sgl_kernel.get_scheduler_metadata.default": named("sgl_kernel.get_scheduler_metadata.default")(_schedule),
    "sgl_kernel.fwd.default": named("sgl_kernel.fwd.default")(_attend_in_parts),
}
