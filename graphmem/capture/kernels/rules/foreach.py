"""Kernels of optimizers: many tensors at once, and powers of a number by a step counter on the device.

Source of the reductions: ``aten/src/ATen/native/cuda/ForeachReduceOp.cu``, PyTorch 2.4 to 2.15.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule

#: ``kChunkSize``: elements that one block reduces (``ATen/native/cuda/MultiTensorApply.cuh``).
CHUNK_ELEMENTS = 65536


@recorded_rule("aten._foreach_norm.Scalar", "aten._foreach_max.default")
def foreach_reduction(call: Call) -> Script | None:
    """One partial result a chunk and tensor, zero-filled, before the scalars are allocated; freed at the end."""
    tensors = call.self
    if not tensors:
        return None
    chunks = [-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in tensors]
    accumulate = 8 if tensors[0].dtype is torch.float64 else 4
    if versions.PARTIAL_NORMS_COMPACT.holds(call.card.torch_version):
        return _compact_reduction(call, sum(chunks) * accumulate)
    script = Script()
    partial = script.take(len(tensors) * max(chunks) * accumulate, "partial norms")
    script.outputs(*range(len(call.outputs)))
    return script.give(partial)


def _compact_reduction(call: Call, size: int) -> Script:
    script = Script()
    starts = script.take((len(call.self) + 1) * 8, "starts of partial norms")
    partial = script.take(size, "partial norms")
    script.outputs(*range(len(call.outputs)))
    return script.give(partial, starts)


@recorded_rule("aten.pow.Scalar")
def pow_of_number(call: Call) -> Script | None:
    """``beta ** step``: the number becomes a tensor of one element on the device, of its own type, after the output
    (``pow_Scalar_out``: ``wrapped_scalar_tensor(base, exp.device())``, ATen/native/Pow.cpp); a base of 1 does not."""
    base = call.self
    if base == 1:
        return None
    return Script().output(0).scratch(_number_bytes(base), "base of a power")


def _number_bytes(number: complex) -> int:
    """Bytes of ``scalar_to_tensor(number)``: double, int64, complex double or bool (ATen/ScalarOps.h)."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8


@recorded_rule("aten.isinf.default")
def is_infinite(call: Call) -> Script | None:
    """``self.abs() == inf`` (``at::native::isinf``, ATen/native/UnaryOps.cpp); whole numbers are filled with False."""
    value = call.self
    if not value.is_floating_point():
        return None
    script = Script()
    magnitude = script.take(bytes_of(value), "absolute values")
    script.output(0).give(magnitude)
    return script


#: Bytes that one thread block copies (ATen/native/cuda/TensorShape.cu).
BLOCK_BYTES = 2048


@recorded_rule("aten._chunk_cat.default", "aten._chunk_cat.out")
def chunk_cat_rule(call: Call) -> Script | None:
    """One kernel copies contiguous tensors, described by seven 64-bit lists; others are padded and concatenated.

    Source: ``get_chunk_cat_metadata`` and ``_chunk_cat_cuda`` (ATen/native/cuda/TensorShape.cu, 2.13).
    """
    tensors, chunks = call.tensors, call.num_chunks
    if not tensors or not call.outputs[0].numel():
        return None
    dim = call.dim % tensors[0].dim()
    if not all(tensor.is_contiguous() for tensor in tensors):
        return _padded_and_concatenated(tensors, dim, chunks)
    size = chunk_lists_bytes(tensors, dim, chunks, call.outputs[0].element_size())
    return Script().output(0).scratch(size, CHUNK_LISTS)


#: Label of the buffer that describes the work to the kernel.
CHUNK_LISTS = "lists of tensors, blocks and sizes"


def chunk_lists_bytes(tensors: Sequence[torch.Tensor], dim: int, chunks: int, element: int) -> int:
    """Bytes of the lists that ``chunk_cat`` takes for a moment; ``element``: bytes of an element of its output."""
    blocks = 0
    for tensor in tensors:
        trailing = math.prod(tensor.shape[dim + 1 :])
        blocks += -(-(-(-tensor.shape[dim] // chunks) * trailing * element) // BLOCK_BYTES)
    return (6 * len(tensors) + 2 + blocks) * 8


def _padded_and_concatenated(tensors: Sequence[torch.Tensor], dim: int, chunks: int) -> Script:
    script = Script()
    padded = []
    for tensor in tensors:
        size = tensor.shape[dim]
        longer = -(-size // chunks) * chunks
        if longer != size:
            padded.append(script.take(bytes_of(tensor) // size * longer, "padded tensor"))
    script.output(0)
    return script.give(*padded)
