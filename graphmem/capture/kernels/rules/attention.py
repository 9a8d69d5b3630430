"""Buffers of the fused attention kernels: flash, memory-efficient and cuDNN, forward and backward.

Sources: ``ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``attention.cu``, ``attention_backward.cu`` and the
installed ``mem_eff_attention/kernel_backward.h`` and ``kernels/cutlassB.h`` of PyTorch 2.13. The memory of cuDNN is
observed (cuDNN 9.20), since its source is closed. The math path is made of ordinary operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from graphmem.base import versions
from graphmem.base.numbers import last_pow2, round_up
from graphmem.capture.kernels.parts.layout import Layout, bytes_of
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule

_FP32 = 4
#: Philox seed and offset of flash attention: uint64[2] and a uint64 that is never used.
_FLASH_SEED, _FLASH_UNUSED = 16, 8


# --- flash ------------------------------------------------------------------------------------------------------------


@recorded_rule("aten._scaled_dot_product_flash_attention.default")
def flash_rule(call: Call) -> Script | None:
    query, key = call.query, call.key
    dropout = call.dropout_p
    batch, heads, queries, head_dim = query.shape
    keys, key_heads = key.shape[2], key.shape[1]
    if queries == 1 and heads > key_heads and dropout == 0.0:
        # One query token: its groups of heads take the place of the tokens (seqlenq_ngroups_swapped).
        queries, heads = heads // key_heads, key_heads
    script = Script().outputs(0, 1)
    splits = 1 if dropout else flash_splits(batch * heads * -(-queries // 64), keys, head_dim, call.card.sm_count)
    partial = []
    if splits > 1:
        rows = splits * batch * heads * queries
        partial.append(script.take(rows * _FP32, "split log-sum-exp"))
        partial.append(script.take(rows * _rounded_head(head_dim) * _FP32, "split output"))
    seed, offset, mask = range(len(call.outputs) - 3, len(call.outputs))
    if versions.FLASH_SEEDS_ON_DEVICE.holds(call.card.torch_version):
        _flash_seeds(script, seed, offset, dropout)
    else:
        script.output(seed, 0).output(offset, 0)
    script.output(mask, 0)
    return script.give(*partial)


def _flash_seeds(script: Script, seed: int, offset: int, dropout: float) -> None:
    if not dropout:
        script.output(seed, _FLASH_SEED).output(offset, _FLASH_UNUSED)
        return
    # The generator's state replaces a first tensor of the same size, which goes back.
    first = script.take(_FLASH_SEED, "unused seed")
    script.output(offset, _FLASH_UNUSED).output(seed, _FLASH_SEED)
    script.give(first)


def _rounded_head(head_dim: int) -> int:
    return round_up(head_dim, 32 if head_dim <= 128 else 64)


@lru_cache(maxsize=1024)
def flash_splits(row_blocks: int, keys: int, head_dim: int, sm_count: int) -> int:
    """Blocks that share the keys of one output: num_splits_heuristic. ``row_blocks``: batch x heads x row tiles."""
    key_block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    key_blocks = -(-keys // key_block)
    slots = 2 * sm_count  # two blocks of 128 threads fit on an SM
    if row_blocks >= 0.8 * slots:
        return 1
    efficiency = {}
    for splits in range(1, min(128, slots, key_blocks) + 1):
        if splits == 1 or -(-key_blocks // splits) != -(-key_blocks // (splits - 1)):
            waves = row_blocks * splits / slots
            efficiency[splits] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


@recorded_rule("aten._scaled_dot_product_flash_attention_backward.default")
def flash_backward_rule(call: Call) -> Script | None:
    grad, query, key, _, out = call.grad_out, call.query, call.key, call.value, call.out
    batch, heads, queries, head_dim = query.shape
    keys, key_heads = key.shape[2], key.shape[1]
    script = Script()
    copies = [
        token
        for tensor, name in ((grad, "gradient"), (out, "output"))
        for token in script.contiguous(tensor.transpose(1, 2), f"contiguous {name}")
    ]
    script.outputs(0, 1, 2)
    rows = batch * heads * round_up(queries, 128)
    softmax = script.take(rows * _FP32, "softmax gradient sums")
    accumulator = rows * _rounded_head(head_dim) * _FP32
    if torch.are_deterministic_algorithms_enabled():
        accumulator *= -(-call.card.sm_count // (batch * heads))
    taken = [script.take(accumulator, "query gradient accumulator")]
    if key_heads != heads:
        size = batch * keys * heads * head_dim * query.element_size()
        taken += [script.take(size, f"{name} gradient of every head") for name in ("key", "value")]
        _sum_over_groups(script, key, heads, call.card)
    script.give(*reversed(taken))
    script.give(softmax)
    return script.give(*reversed(copies))


@recorded_rule("aten._flash_attention_backward.default")
def flash_packed_backward_rule(call: Call) -> Script | None:
    """``mha_varlen_bwd``: sequences one after the other, each padded to whole blocks in the accumulators. Of sequences
    of one length (no offsets) it is not known here."""
    query, key, offsets = call.query, call.key, call.cum_seq_q
    if offsets is None or key.shape[-2] != query.shape[-2]:
        return None
    rows, heads, head_dim = query.shape
    batch = offsets.shape[0] - 1
    script = Script()
    copies = [
        token
        for tensor, name in ((call.grad_out, "gradient"), (call.out, "output"))
        for token in script.contiguous(tensor, f"contiguous {name}")
    ]
    script.outputs(0, 1, 2)
    padded = heads * (rows + 128 * batch)
    softmax = script.take(padded * _FP32, "softmax gradient sums")
    accumulator = padded * _rounded_head(head_dim) * _FP32
    if torch.are_deterministic_algorithms_enabled():
        accumulator *= -(-call.card.sm_count // (batch * heads))
    return script.scratch(accumulator, "query gradient accumulator").give(softmax, *reversed(copies))


def _sum_over_groups(script: Script, key: torch.Tensor, heads: int, card: Card) -> None:
    batch, key_heads, keys, head_dim = key.shape
    grouped = Layout((batch, keys, key_heads, heads // key_heads, head_dim))
    for _ in ("key", "value"):
        write_sum(script, grouped, [3], key.dtype, card)


# --- memory-efficient -------------------------------------------------------------------------------------------------


@recorded_rule("aten._scaled_dot_product_efficient_attention.default")
def efficient_rule(call: Call) -> Script | None:
    query, _, value = call.query, call.key, call.value
    batch, heads, queries = query.shape[:3]
    rows = round_up(queries, 32) if call.compute_log_sumexp else 0
    # Seed and offset are host tensors, unless a CUDA graph is being captured: its replays change them.
    unused = versions.EFFICIENT_SEEDS_ON_DEVICE.holds(call.card.torch_version) and call.dropout_p == 0.0
    seed_bytes = 8 if call.card.in_graph_capture or unused else 0
    script = Script().output(2, seed_bytes).output(3, seed_bytes)
    script.output(0).output(1, batch * heads * rows * _FP32)
    if query.element_size() == 2 and max(query.shape[3], value.shape[3]) > 128:
        # No kernel holds a wider output tile in registers (kernels/cutlassF.h).
        size = batch * heads * queries * value.shape[3] * _FP32
        script.scratch(size, "output accumulator")
    return script


@recorded_rule("aten._efficient_attention_forward.default")
def efficient_packed_rule(call: Call) -> Script:
    """The kernel asked for by itself, as nested tensors do: seed and offset are the host's."""
    seed_bytes = 8 if call.card.in_graph_capture else 0
    return Script().output(2, seed_bytes).output(3, seed_bytes).output(0).output(1)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Block of queries by keys of a backward kernel; whether key and value gradients stay in registers."""

    queries: int
    keys: int
    gradients_in_registers: bool


def _backward_tile(head_dim: int, half: bool, dropout: bool, card: Card) -> _Tile:
    """The first kernel of kernels/cutlassB.h that takes the head and fits in shared memory."""
    if head_dim <= 64:
        return _Tile(64, 64, half)
    limits = card.limits
    small_shared_memory = limits.small_shared_memory
    if not half:
        return _Tile(64 if small_shared_memory else 128, 64, False)
    if head_dim > 128:
        return _Tile(128, 64, False)
    if limits.efficient_attention < 80:
        return _Tile(128, 64, True)
    if not small_shared_memory:
        return _Tile(128, 128, True)
    if limits.efficient_86_89 and head_dim <= 96 and not dropout:
        return _Tile(128, 64, True)
    return _Tile(64, 64, False)


@recorded_rule("aten._scaled_dot_product_efficient_attention_backward.default")
def efficient_backward_rule(call: Call) -> Script | None:
    grad, query, key, value, bias = call.grad_out_, call.query, call.key, call.value, call.attn_bias
    dropout, mask = call.dropout_p, call.grad_input_mask
    script = Script()
    copies = script.contiguous(grad.transpose(1, 2), "contiguous gradient")  # the kernels see (B, S, H, D)
    script.outputs(0, 1, 2)
    if mask[3] and len(call.outputs) > 3:
        script.output(3, bytes_of(bias) // bias.shape[-1] * round_up(bias.shape[-1], 16))
    heads = query.shape[1]
    grouped = []
    if key.shape[1] != heads:
        for tensor, name in ((key, "key"), (value, "value")):
            size = bytes_of(tensor) // tensor.shape[1] * heads
            grouped.append(script.take(size, f"{name} gradient of every head"))
    half = query.element_size() == 2
    tile = _backward_tile(max(query.shape[3], value.shape[3]), half, dropout > 0, call.card)
    delta = _take_delta(script, grad, half, call.card)
    size = _efficient_workspace(query.shape, key.shape[2], value.shape[3], half, tile)
    workspace = script.take(size, "efficient attention workspace")
    script.give(delta, workspace, *reversed(grouped))
    return script.give(*copies)


@recorded_rule("aten._efficient_attention_backward.default")
def efficient_packed_backward_rule(call: Call) -> Script | None:
    """The same of sequences one after the other: rows by heads, as long as the longest in the workspace."""
    grad, query, key, value, offsets = call.grad_out_, call.query, call.key, call.value, call.cu_seqlens_q
    if offsets is None or call.bias is not None or key.shape[2] != query.shape[2]:
        return None
    script = Script()
    copies = script.contiguous(grad, "contiguous gradient")
    script.outputs(0, 1, 2).output(3, 0)
    half, (heads, head_dim) = query.element_size() == 2, query.shape[2:]
    tile = _backward_tile(max(head_dim, value.shape[3]), half, call.dropout_p > 0, call.card)
    delta = _take_delta(script, grad.transpose(1, 2), half, call.card)
    longest = (offsets.shape[0] - 1, heads, int(call.max_seqlen_q), head_dim)
    size = _efficient_workspace(longest, int(call.max_seqlen_k), value.shape[3], half, tile)
    workspace = script.take(size, "efficient attention workspace")
    return script.give(delta, workspace, *copies)


def _take_delta(script: Script, grad: torch.Tensor, half: bool, card: Card) -> int:
    """Row sums of gradient times output. Half kernels compute them; for fp32 they are spelled out in operators."""
    batch, heads, queries, head_dim = grad.shape
    rows = batch * heads * queries * _FP32
    if half:
        return script.take(rows, "delta")
    product = script.take(rows * head_dim, "gradient times output")
    sums = script.take(rows, "delta")
    full = Layout((batch, queries, heads, head_dim))
    write_sum(script, full, [-1], torch.float32, card)
    if heads > 1 and queries > 1:  # transposed, then made contiguous
        transposed = script.take(rows, "delta")
        script.give(sums)
        sums = transposed
    script.give(product)
    return sums


def _efficient_workspace(query: Sequence[int], keys: int, value_dim: int, half: bool, tile: _Tile) -> int:
    """Params::workspace_size of kernel_backward.h: fp32 accumulators of query, and maybe key and value, gradients.
    ``query``: batch, heads, length, head."""
    batch, heads, queries, head_dim = query
    # One tile of query gradients with a lock and a counter, padded to 16 bytes.
    per_tile = tile.queries * tile.keys + 4
    elements = -(-queries // tile.queries) * -(-head_dim // tile.keys) * per_tile
    if half and not tile.gradients_in_registers:
        splits = _key_splits(batch * heads, keys, tile)
        elements += sum(splits * tile.keys * round_up(size, tile.queries) for size in (head_dim, value_dim))
    return int(batch * heads * round_up(elements, 4) * _FP32)


def _key_splits(blocks: int, keys: int, tile: _Tile) -> int:
    splits = -(-keys // tile.keys)
    if torch.are_deterministic_algorithms_enabled() or (blocks >= 256 and keys <= 2 * tile.keys):
        return 1
    return max(1, min(splits, 200 // blocks))


# --- cuDNN ------------------------------------------------------------------------------------------------------------


@recorded_rule("aten._scaled_dot_product_cudnn_attention.default")
def cudnn_rule(call: Call) -> Script | None:
    query = call.query
    batch, heads, queries = query.shape[:3]
    seed, offset, masks = 2, 3, range(4, len(call.outputs))
    script = Script().output(seed, 8).output(offset, 8).output(0)
    script.output(1, batch * heads * queries * _FP32 if call.compute_log_sumexp else 0)
    for mask in masks:
        script.output(mask, 0)
    size = cudnn_forward_workspace(query, call.key, call.card)
    if size:
        script.scratch(size, "cuDNN attention workspace")
    return script


def cudnn_forward_workspace(query: torch.Tensor, key: torch.Tensor, card: Card) -> int:
    """Observed, cuDNN 9.20: 256 bytes on 9.0; for one query token, results of as many blocks as share the keys."""
    batch, heads, queries, head_dim = query.shape
    if not card.cudnn_workspaces:
        return 0
    if queries > 1:
        return 256 if card.limits.cudnn_attention == "hopper" else 0
    key_heads, keys = key.shape[1], key.shape[2]
    if keys <= 512:
        return 0
    splits = min(last_pow2((keys + 1) // 128), last_pow2(2 * card.sm_count // (batch * key_heads)), 64)
    if splits <= 1:
        return 0
    rows = splits * batch * heads * _FP32
    return int(round_up(rows * head_dim, 128) + 2 * round_up(rows, 128) + 128)


@recorded_rule("aten._scaled_dot_product_cudnn_attention_backward.default")
def cudnn_backward_rule(call: Call) -> Script | None:
    grad, query, key, value = call.grad_out, call.query, call.key, call.value
    script = Script.of(call)
    copies = [] if grad.stride(-1) == 1 else [script.take(bytes_of(grad), "gradient in the output's layout")]
    script.scratch(cudnn_backward_workspace(query, key, value, call.card), "cuDNN attention workspace")
    return script.give(*copies)


def cudnn_backward_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, card: Card) -> int:
    """Observed, cuDNN 9.20, on 8.0, 8.6, 9.0, 10.0, 10.3 and 12.0: fp32 query gradients and softmax gradient sums.

    The kernels of 9.0, and of 10.x for long sequences, hold the query gradients once, the others twice. Grouped keys
    and values get gradients for every head first. One fp32 query gradient and the sums are cudnn-frontend's own, which
    is compiled into PyTorch; a cuDNN whose plans claim nothing leaves those.
    """
    batch, heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    blocks, kernels = batch * heads, card.limits.cudnn_attention
    if not card.cudnn_workspaces:
        return int(blocks * queries * (head_dim + 1) * _FP32)
    grouped = 0
    if key_heads != heads:
        grouped = blocks * keys * (head_dim + value.shape[3]) * query.element_size()
    if kernels == "hopper":
        return int(blocks * queries * (head_dim + 1) * _FP32 + 256 + grouped)
    if kernels == "blackwell" and min(queries, keys) > 128:
        return int(blocks * queries * (head_dim + 1) * _FP32 + (128 + grouped if grouped else 0))
    rows = queries + round_up(queries, 8)
    return int(blocks * (rows * head_dim + queries) * _FP32 + 128 + grouped)
