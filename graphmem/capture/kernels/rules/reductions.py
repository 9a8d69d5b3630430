"""Operators that reduce: which kernel each runs, and the copies around it.

Sources: ``ReduceOps.cpp`` and the ``Reduce*Kernel.cu`` named below (``aten/src/ATen/native``) of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.layout import HALF_TYPES, Layout, bytes_of, has_flat_view
from graphmem.capture.kernels.parts.reduction import Kernel, reduction_buffers, sum_kernel, welford_kernel
from graphmem.capture.kernels.parts.script import Call, Card, Script, rule

# --- the kernels of each operator -------------------------------------------------------------------------------------


def _extremum(value: torch.dtype, output: torch.dtype) -> Kernel:
    """amax, amin, and max, min of all (ReduceMaxValuesKernel.cu): accumulate in the values' own type."""
    coarse = value.itemsize == 2 and value.is_floating_point
    return Kernel(value.itemsize, value.itemsize, (value.itemsize,), accumulates_in_output=not coarse)


def _indexed_extremum(value: torch.dtype, output: torch.dtype) -> Kernel:
    """max, min along a dimension: the accumulator is a pair of the value and its 8-byte index, so 16 bytes."""
    return Kernel(value.itemsize, 16, (value.itemsize, 8), accumulates_in_output=False)


def _arg_extremum(value: torch.dtype, output: torch.dtype) -> Kernel:
    """argmax, argmin: the same pair, one output."""
    return Kernel(value.itemsize, 16, (8,), accumulates_in_output=False)


def _logic(value: torch.dtype, output: torch.dtype) -> Kernel:
    """any, all (ReduceLogicKernel.cu): the accumulator is one bool."""
    return Kernel(value.itemsize, 1, (output.itemsize,))


def _hash(value: torch.dtype) -> Kernel:
    """hash_tensor (ReduceHashKernel.cu, ReduceSumProdKernel.cu): every value's bits into one 64-bit number."""
    return Kernel(value.itemsize, 8, (8,))


# --- the operators ----------------------------------------------------------------------------------------------------


def _as_dims(dims: Any) -> list[int] | None:
    return [dims] if isinstance(dims, int) else dims


def _fused_cast(value: torch.dtype, output: torch.dtype) -> bool:
    return value in HALF_TYPES and output == torch.float32


def _reduction(
    tensor: torch.Tensor, outputs: Sequence[torch.Tensor], dims: Any, keepdim: bool, kernel: Kernel, card: Card
) -> Script | None:
    buffers = reduction_buffers(tensor, _as_dims(dims), keepdim, kernel, card)
    if not buffers.launches and not buffers.accumulator:
        return None
    script = Script()
    for index in range(len(outputs)):
        script.output(index)
    buffers.write(script)
    return script


@rule(
    "aten.sum.default", "aten.sum.dim_IntList", "aten.nansum.default", "aten.mean.default", "aten.mean.dim",
    "aten.prod.default", "aten.prod.dim_int",
)  # fmt: skip
def sum_rule(call: Call) -> Script | None:
    """The values are first copied to the output's type, except half types into fp32, which the kernel casts itself."""
    tensor, output = call.self, call.outputs[0]
    dims = call.get("dim")
    keepdim = call.get("keepdim", False)
    cast = tensor.dtype != output.dtype and not _fused_cast(tensor.dtype, output.dtype)
    kernel = sum_kernel(output.dtype if cast else tensor.dtype, output.dtype)
    if not cast:
        return _reduction(tensor, call.outputs, dims, keepdim, kernel, call.card)
    script = Script().output(0)
    copy = script.take(tensor.numel() * output.element_size(), "cast of the reduced tensor")
    reduction_buffers(Layout.dense_like(tensor), _as_dims(dims), keepdim, kernel, call.card).write(script)
    script.give(copy)
    return script


@rule("aten.amax.default", "aten.amin.default")
def extremum_rule(call: Call) -> Script | None:
    kernel = _extremum(call.self.dtype, call.dtype)
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


@rule("aten.max.default", "aten.min.default")
def extremum_of_all_rule(call: Call) -> Script | None:
    # ReduceAllOps.cpp makes its input contiguous.
    needs_copy = not call.self.is_contiguous()
    kernel = _extremum(call.self.dtype, call.dtype)
    return _flat_reduction(call.self, call.outputs, needs_copy, kernel, call.card)


@rule("aten.max.dim", "aten.min.dim")
def indexed_extremum_rule(call: Call) -> Script | None:
    kernel = _indexed_extremum(call.self.dtype, call.self.dtype)
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


@rule("aten.argmax.default", "aten.argmin.default")
def arg_extremum_rule(call: Call) -> Script | None:
    kernel = _arg_extremum(call.self.dtype, torch.int64)
    if call.dim is None:  # the tensor is reshaped to one dimension, so that indices count all its elements
        return _flat_reduction(call.self, call.outputs, not has_flat_view(call.self), kernel, call.card)
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


def _flat_reduction(
    tensor: torch.Tensor, outputs: Sequence[torch.Tensor], needs_copy: bool, kernel: Kernel, card: Card
) -> Script | None:
    """A reduction of all values, of a contiguous copy if needed."""
    if not needs_copy:
        return _reduction(tensor, outputs, None, False, kernel, card)
    flat = Layout([tensor.numel()])
    script = Script()
    for index in range(len(outputs)):
        script.output(index)
    copy = script.take(bytes_of(tensor), "contiguous copy of the reduced tensor")
    reduction_buffers(flat, None, False, kernel, card).write(script)
    script.give(copy)
    return script


@rule("aten.var.correction", "aten.std.correction")
def welford_rule(call: Call) -> Script | None:
    kernel = welford_kernel(call.self.dtype, [call.dtype])
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


@rule("aten.var_mean.correction", "aten.std_mean.correction")
def welford_pair_rule(call: Call) -> Script | None:
    kernel = welford_kernel(call.self.dtype, [output.dtype for output in call.outputs])
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


def _extrema(value: torch.dtype) -> Kernel:
    # ReduceAMinMaxKernel.cu: the accumulator is a pair of values.
    size = value.itemsize
    return Kernel(size, 2 * size, (size, size), accumulates_in_output=False)


@rule("aten.aminmax.default")
def extrema_rule(call: Call) -> Script | None:
    """The smallest and the largest; of all values, a contiguous copy is reduced (``aminmax_out``, ReduceOps.cpp)."""
    kernel = _extrema(call.self.dtype)
    if call.dim is None:
        return _flat_reduction(call.self, call.outputs, not call.self.is_contiguous(), kernel, call.card)
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


@rule("aten.logsumexp.default")
def logsumexp_rule(call: Call) -> Script | None:
    """ReduceOps.cpp: the maxima and a mask of the infinite ones, exp of the whole tensor, its sum into the result."""
    tensor, dims = call.self, _as_dims(call.dim)
    if tensor.is_complex() or not tensor.numel():
        return None
    script = Script()
    converted = []
    if not tensor.is_floating_point():
        tensor = torch.empty(tensor.shape, dtype=call.outputs[0].dtype, device="meta")
        converted = [script.take(bytes_of(tensor), "converted to floating point")]
    size, rows = tensor.element_size(), call.outputs[0].numel()
    maxima = script.take(rows * size, "maxima")
    reduction_buffers(tensor, dims, True, _extremum(tensor.dtype, tensor.dtype), call.card).write(script)
    absolute = script.take(rows * size, "absolute maxima")
    infinite = script.take(rows, "infinite maxima")
    script.give(infinite, absolute)
    exponentials = script.take(tensor.numel() * size, "exponentials")
    script.output(0)
    kernel = sum_kernel(tensor.dtype, tensor.dtype)
    reduction_buffers(Layout.dense_like(tensor), dims, True, kernel, call.card).write(script)
    script.give(exponentials, maxima, *converted)
    return script


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero_rule(call: Call) -> Script | None:
    """A boolean of every value, which sum() then casts to 64-bit integers."""
    script = Script()
    mask = script.take(call.self.numel(), "nonzero mask")
    script.output(0)
    cast = script.take(8 * call.self.numel(), "cast of the reduced tensor")
    dims = _as_dims(call.dim)
    kernel = sum_kernel(torch.int64, torch.int64)
    reduction_buffers(Layout.dense_like(call.self), dims, False, kernel, call.card).write(script)
    script.give(cast, mask)
    return script


@rule("aten.hash_tensor.default")
def hash_rule(call: Call) -> Script | None:
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, _hash(call.self.dtype), call.card)


@rule("aten.linalg_vector_norm.default")
def vector_norm_rule(call: Call) -> Script | None:
    kernel = sum_kernel(call.self.dtype, call.dtype)
    return _reduction(call.self, call.outputs, call.dim, call.keepdim, kernel, call.card)


@rule("aten.renorm.default")
def renorm_rule(call: Call) -> Script | None:
    """The norms of the slices, which become their factors; half types get factors of their own.
    Source: ``renorm_out`` of ATen/native/Normalization.cpp."""
    tensor, dim = call.self, call.dim % call.self.dim()
    half = tensor.dtype in HALF_TYPES
    norm = torch.float32 if half else tensor.dtype
    script = Script().output(0)
    held = script.take(tensor.shape[dim] * norm.itemsize, "norms")
    dims = [d for d in range(tensor.dim()) if d != dim]
    reduction_buffers(tensor, dims, True, sum_kernel(tensor.dtype, norm), call.card).write(script)
    if half:
        script.give(script.take(tensor.shape[dim] * tensor.element_size(), "factors"))
    script.give(held)
    return script


@rule(
    "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims",
    "aten._is_all_true.default", "aten._is_any_true.default",
)  # fmt: skip
def logic_rule(call: Call) -> Script | None:
    if call.self.numel() == 1 and call.self.dtype != torch.bool:
        # ReduceOps.cpp copies the one value, cast to bool, instead of launching a reduction.
        script = Script().output(0)
        script.give(script.take(1, "bool of a single value"))
        return script
    kernel = _logic(call.self.dtype, call.dtype)
    return _reduction(call.self, call.outputs, call.get("dim"), call.get("keepdim", False), kernel, call.card)
