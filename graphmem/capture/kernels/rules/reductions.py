"""Operators that reduce: which kernel each runs, and the copies around it.

Sources: ``ReduceOps.cpp`` and the ``Reduce*Kernel.cu`` named below (``aten/src/ATen/native``) of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphmem.capture.kernels.parts.layout import HALF_TYPES, Layout, bytes_of, has_flat_view
from graphmem.capture.kernels.parts.reduction import Kernel, reduction_buffers, sum_kernel, welford_kernel, write_sum
from graphmem.capture.kernels.parts.script import Call, Script, recorded_rule

# --- the kernels of each operator -------------------------------------------------------------------------------------


def _extremum(value: torch.dtype) -> Kernel:
    """amax, amin, and max, min of all (ReduceMaxValuesKernel.cu): accumulate in the values' own type."""
    coarse = value in HALF_TYPES
    return Kernel(value.itemsize, value.itemsize, (value.itemsize,), accumulates_in_output=not coarse)


def _own_extremum(call: Call) -> Kernel:
    return _extremum(call.self.dtype)


def _indexed_extremum(call: Call) -> Kernel:
    """max, min along a dimension: the accumulator is a pair of the value and its 8-byte index, so 16 bytes."""
    size = call.self.dtype.itemsize
    return Kernel(size, 16, (size, 8), accumulates_in_output=False)


def _arg_extremum(call: Call) -> Kernel:
    """argmax, argmin: the same pair, one output."""
    return Kernel(call.self.dtype.itemsize, 16, (8,), accumulates_in_output=False)


def _extrema(call: Call) -> Kernel:
    """aminmax (ReduceAMinMaxKernel.cu): the accumulator is a pair of values."""
    size = call.self.dtype.itemsize
    return Kernel(size, 2 * size, (size, size), accumulates_in_output=False)


def _logic(call: Call) -> Kernel:
    """any, all (ReduceLogicKernel.cu): the accumulator is one bool."""
    return Kernel(call.self.dtype.itemsize, 1, (call.dtype.itemsize,))


def _hash(call: Call) -> Kernel:
    """hash_tensor (ReduceHashKernel.cu, ReduceSumProdKernel.cu): every value's bits into one 64-bit number."""
    return Kernel(call.self.dtype.itemsize, 8, (8,))


def _norm(call: Call) -> Kernel:
    return sum_kernel(call.self.dtype, call.dtype)


def _welford(call: Call) -> Kernel:
    return welford_kernel(call.self.dtype, [output.dtype for output in call.outputs])


_KERNELS: dict[str, Callable[[Call], Kernel]] = {
    "aten._is_all_true.default": _logic,
    "aten._is_any_true.default": _logic,
    "aten.all.default": _logic,
    "aten.all.dim": _logic,
    "aten.all.dims": _logic,
    "aten.amax.default": _own_extremum,
    "aten.amin.default": _own_extremum,
    "aten.aminmax.default": _extrema,
    "aten.any.default": _logic,
    "aten.any.dim": _logic,
    "aten.any.dims": _logic,
    "aten.argmax.default": _arg_extremum,
    "aten.argmin.default": _arg_extremum,
    "aten.hash_tensor.default": _hash,
    "aten.linalg_vector_norm.default": _norm,
    "aten.max.default": _own_extremum,
    "aten.max.dim": _indexed_extremum,
    "aten.min.default": _own_extremum,
    "aten.min.dim": _indexed_extremum,
    "aten.norm.Scalar": _norm,  # ``at::norm`` ends in ``linalg_vector_norm``
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.std.correction": _welford,
    "aten.std_mean.correction": _welford,
    "aten.var.correction": _welford,
    "aten.var_mean.correction": _welford,
}
#: Operator -> whether the kernel that reduces all values reads a tensor as it lies; others are copied first.
_READS_WHOLE: dict[str, Callable[[torch.Tensor], bool]] = {
    "aten.aminmax.default": torch.Tensor.is_contiguous,
    "aten.argmax.default": has_flat_view,  # reshaped to one dimension, so that indices count all its elements
    "aten.argmin.default": has_flat_view,
    "aten.max.default": torch.Tensor.is_contiguous,
    "aten.min.default": torch.Tensor.is_contiguous,
}


# --- the operators ----------------------------------------------------------------------------------------------------


@recorded_rule(*_KERNELS)
def reduction_rule(call: Call) -> Script:
    """The outputs, then the buffers of the operator's kernel."""
    tensor, kernel = call.self, _KERNELS[call.operator](call)
    script, dims, keepdim = Script.of(call), call.get("dim"), call.get("keepdim", False)
    if _KERNELS[call.operator] is _logic and tensor.numel() == 1 and tensor.dtype != torch.bool:
        return script.scratch(1, "bool of a single value")  # copied, not reduced (ReduceOps.cpp)
    copies = []
    reads = _READS_WHOLE.get(call.operator)
    if dims is None and reads is not None:
        keepdim = False
        if not reads(tensor):
            copies = [script.take(bytes_of(tensor), "contiguous copy of the reduced tensor")]
            tensor = Layout([tensor.numel()])
    reduction_buffers(tensor, dims, keepdim, kernel, call.card).write(script)
    return script.give(*copies)


@recorded_rule(
    "aten.sum.default", "aten.sum.dim_IntList", "aten.nansum.default", "aten.mean.default", "aten.mean.dim",
    "aten.prod.default", "aten.prod.dim_int",
)  # fmt: skip
def sum_rule(call: Call) -> Script:
    """The values are first copied to the output's type, except half types into fp32, which the kernel casts itself."""
    tensor, into = call.self, call.dtype
    script, dims, keepdim = Script.of(call), call.get("dim"), call.get("keepdim", False)
    if tensor.dtype == into or (tensor.dtype in HALF_TYPES and into == torch.float32):
        write_sum(script, tensor, dims, tensor.dtype, call.card, keepdim, into)
        return script
    copy = script.take(tensor.numel() * into.itemsize, "cast of the reduced tensor")
    write_sum(script, Layout.dense_like(tensor), dims, into, call.card, keepdim)
    return script.give(copy)


@recorded_rule("aten.logsumexp.default")
def logsumexp_rule(call: Call) -> Script | None:
    """ReduceOps.cpp: the maxima and a mask of the infinite ones, exp of the whole tensor, its sum into the result."""
    tensor, dims = call.self, call.dim
    if tensor.is_complex() or not tensor.numel():
        return None
    script = Script()
    converted = []
    if not tensor.is_floating_point():
        tensor = torch.empty(tensor.shape, dtype=call.dtype, device="meta")
        converted = [script.take(bytes_of(tensor), "converted to floating point")]
    size, rows = tensor.element_size(), call.outputs[0].numel()
    maxima = script.take(rows * size, "maxima")
    reduction_buffers(tensor, dims, True, _extremum(tensor.dtype), call.card).write(script)
    absolute = script.take(rows * size, "absolute maxima")
    script.scratch(rows, "infinite maxima").give(absolute)
    exponentials = script.take(tensor.numel() * size, "exponentials")
    script.output(0)
    write_sum(script, Layout.dense_like(tensor), dims, tensor.dtype, call.card, keepdim=True)
    return script.give(exponentials, maxima, *converted)


@recorded_rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero_rule(call: Call) -> Script:
    """A boolean of every value, which sum() then casts to 64-bit integers."""
    script = Script()
    mask = script.take(call.self.numel(), "nonzero mask")
    cast = script.output(0).take(8 * call.self.numel(), "cast of the reduced tensor")
    write_sum(script, Layout.dense_like(call.self), call.dim, torch.int64, call.card)
    return script.give(cast, mask)


@recorded_rule("aten.renorm.default")
def renorm_rule(call: Call) -> Script:
    """The norms of the slices, which become their factors; half types get factors of their own.
    Source: ``renorm_out`` of ATen/native/Normalization.cpp."""
    tensor, dim = call.self, call.dim % call.self.dim()
    norm = torch.float32 if tensor.dtype in HALF_TYPES else tensor.dtype
    script = Script().output(0)
    held = script.take(tensor.shape[dim] * norm.itemsize, "norms")
    write_sum(script, tensor, [d for d in range(tensor.dim()) if d != dim], tensor.dtype, call.card, True, norm)
    if norm is not tensor.dtype:
        script.scratch(tensor.shape[dim] * tensor.element_size(), "factors")
    return script.give(held)


# --- the most frequent values, and those that occur elsewhere ---------------------------------------------------------


@recorded_rule("aten.isin.Tensor_Tensor")
def isin_rule(call: Call) -> Script | None:
    """Few values are compared with every element at once; many are sorted together, which is not modelled
    (``isin_Tensor_Tensor_out`` and ``isin_default_kernel_gpu``, ATen/native/TensorCompare.cpp)."""
    elements, values = call.elements, call.test_elements
    if not elements.numel() or not values.numel() or values.numel() >= 10.0 * elements.numel() ** 0.145:
        return None
    shape = (*elements.shape, *[1] * values.dim())
    same = torch.empty(torch.broadcast_shapes(shape, values.shape), dtype=torch.bool, device="meta")
    script = Script().output(0)
    held = script.take(same.numel(), "every element beside every value")
    dims = list(range(elements.dim(), same.dim()))
    found = script.call("aten.any.dims", same, dims, False, card=call.card, outputs=[call.outputs[0]], births=["found"])
    return script.give(*found, held)


@recorded_rule("aten.mode.default")
def mode_rule(call: Call) -> Script | None:
    """Another dimension than the last is brought to the end. Slices of more than 1,024 elements are sorted one by one,
    which is not modelled (ATen/native/cuda/TensorModeKernel.cpp)."""
    if not call.self.dim() or call.self.shape[call.dim] <= 1:
        return None
    moved = call.self.transpose(call.dim, -1)
    script = Script.of(call)
    return script.give(*script.contiguous(moved, "contiguous copy with the dimension last"))
