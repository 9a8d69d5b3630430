"""Kernels that pack and unpack shards: FSDP2's operators, which call ``aten``'s on tensors that exist.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ATen/native/cuda/TensorShape.cu, PyTorch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.capture.kernels.parts.layout import is_dense
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule
from graphmem.capture.kernels.rules.foreach import BLOCK_BYTES, CHUNK_LISTS, chunk_lists_bytes

#: Threads of a block (``BLOCK_SIZE``); the kernel asks for twice as many blocks as the card holds at a time.
_BLOCK_THREADS, _OVER_SUBSCRIBED = 128, 2
_LIBRARY = "torch.distributed.fsdp"


@recorded_rule("fsdp.all_gather_copy_in.default", library=_LIBRARY)
def all_gather_copy_in(_: Call) -> Script | None:
    """Views of the output, and one kernel that copies into them."""
    return None


@recorded_rule("fsdp.chunk_cat.default", library=_LIBRARY)
def chunk_cat(call: Call) -> Script | None:
    """Gradients into the input of a reduce-scatter, one type or from bfloat16 to float32 in one kernel."""
    tensors, out = call.tensors, call.out
    if not tensors or not out.numel() or not _in_one_kernel(tensors, out):
        return None
    script = Script()
    size = chunk_lists_bytes(tensors, call.dim % tensors[0].dim(), call.num_chunks, out.element_size())
    return script.scratch(size, CHUNK_LISTS)


def _in_one_kernel(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
    dtype = tensors[0].dtype
    converted = dtype is torch.bfloat16 and out.dtype is torch.float32
    return (dtype is out.dtype or converted) and all(is_dense(tensor) for tensor in tensors)


@recorded_rule("fsdp.split_with_sizes_copy.default", "aten.split_with_sizes_copy.out", library=_LIBRARY)
def split_with_sizes_copy(call: Call) -> Script | None:
    """The copy of gathered shards into the parameters: one kernel copies dense tensors of one type,
    described by five lists of 64-bit numbers (``split_with_sizes_copy_out_cuda_contiguous_no_cast``)."""
    source = call.get("all_gather_output", call.get("self"))
    sizes = call.get("all_gather_input_split_sizes", call.get("split_sizes"))
    if not source.numel() or not all(is_dense(tensor) and tensor.dtype is source.dtype for tensor in call.out):
        return None
    if not is_dense(source):
        return None
    dim = call.dim % source.dim()
    chunk_bytes = [size * source.stride(dim) * source.element_size() for size in sizes]
    chunks = math.prod(source.shape[:dim])
    blocks = sum(-(-size // BLOCK_BYTES) for size in chunk_bytes)
    most = call.card.sm_count * call.card.max_threads_per_sm // _BLOCK_THREADS * _OVER_SUBSCRIBED
    rounds = -(-blocks * chunks // most)
    turns = -(-rounds // min(math.ceil(math.sqrt(rounds)), chunks))
    launched = sum(-(-size // (BLOCK_BYTES * turns)) for size in chunk_bytes)
    return Script().scratch((4 * len(chunk_bytes) + 1 + launched) * 8, "lists of addresses, blocks and sizes")
