"""Buffers of reductions: sums, means, extrema, norms, variances.

A reduction over many values per output splits each output over several thread blocks. The blocks leave partial results
in a *staging* buffer, and count in a *semaphore* buffer who comes last and adds them up. How often an output is split
depends on the iterator's dimensions, the accumulator's size, and on how many threads the card holds.

Source: ``ATen/native/cuda/Reduce.cuh`` (setReduceConfig, gpu_reduce_kernel) of PyTorch 2.13, installed with torch; the
iterator from ``aten/src/ATen/TensorIterator.cpp``. Tensors of more than 2^31 elements or bytes are reduced in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

from graphmem.capture.kernels.script import Card, Script, rule

_MAX_INT32 = 2**31 - 1
_WARP = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256


@dataclass(frozen=True, slots=True)
class Kernel:
    """Template arguments of gpu_reduce_kernel: bytes of an input value, of an accumulator and of each output value.

    ``input_vector``: values a thread loads at once along the reduced dimension. ``accumulates_in_output``: pieces of a
    tensor beyond 32-bit indexing can be added up in the output itself.
    """

    value_bytes: int
    accumulator_bytes: int
    output_bytes: tuple[int, ...]
    input_vector: int = 4
    accumulates_in_output: bool = True
    max_threads: int = 512


@dataclass(frozen=True, slots=True)
class Buffers:
    """``accumulator``: bytes held for the whole operator (0: none). ``launches``: (staging, semaphores) one by one."""

    accumulator: int
    launches: tuple[tuple[int, int], ...]

    def write(self, script: Script) -> None:
        held = script.take(self.accumulator, "reduction accumulator") if self.accumulator else None
        for staging, semaphores in self.launches:
            first = script.take(staging, "reduction staging")
            second = script.take(semaphores, "reduction semaphores")
            script.give(second, first)
        if held is not None:
            script.give(held)


_NOTHING = Buffers(0, ())


# --- the iterator -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Iteration:
    """Dimensions in order of iteration, reduced ones first; strides in bytes of the outputs and, last, of the input."""

    shape: list[int]
    strides: list[list[int]]
    input_offset: int

    @property
    def output_stride(self) -> list[int]:
        return self.strides[0]

    @property
    def input_stride(self) -> list[int]:
        return self.strides[-1]

    def numel(self) -> int:
        return math.prod(self.shape)

    def reduce_dims(self) -> int:
        return sum(stride == 0 for stride in self.output_stride)

    def output_elements(self) -> int:
        return math.prod(
            size for size, stride in zip(self.shape, self.output_stride, strict=True) if stride or not size
        )

    def uses_32bit_indexing(self) -> bool:
        if self.numel() > _MAX_INT32:
            return False
        extents = (sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True)) for strides in self.strides)
        return all(1 + extent <= _MAX_INT32 for extent in extents)

    def pieces(self) -> Iterator[_Iteration]:
        """The parts that 32-bit indices reach, in the order they are launched: first halves first."""
        if self.uses_32bit_indexing():
            yield self
            return
        dim = self._dim_to_split()
        half = self.shape[dim] // 2
        for start, size in ((0, half), (half, self.shape[dim] - half)):
            shape = [*self.shape[:dim], size, *self.shape[dim + 1 :]]
            yield from _Iteration(shape, self.strides, self.input_offset + start * self.input_stride[dim]).pieces()

    def _dim_to_split(self) -> int:
        def extent(dim: int) -> int:
            return max((self.shape[dim] - 1) * abs(strides[dim]) for strides in self.strides)

        return max(reversed(range(len(self.shape))), key=extent)


def _iteration(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dims: frozenset[int], keepdim: bool, kernel: Kernel
) -> _Iteration:
    """TensorIterator::reduce_op: outputs are new and contiguous; sort dimensions by stride, then coalesce them."""
    kept = [1 if dim in dims else size for dim, size in enumerate(shape)]
    output = [0] * len(shape)
    stride = 1
    for dim in reversed(range(len(shape))):
        # A reduced dimension has stride 0; one of size 1 that keepdim keeps counts as an output dimension.
        if dim not in dims or (keepdim and shape[dim] == 1):
            output[dim] = stride
            stride *= max(kept[dim], 1)
    operands = [[size * s for s in output] for size in kernel.output_bytes]
    operands.append([kernel.value_bytes * s for s in strides])
    iteration = _Iteration(list(shape), operands, kernel.value_bytes * offset)
    _reorder(iteration, len(kernel.output_bytes))
    _coalesce(iteration)
    return iteration


def _reorder(iteration: _Iteration, outputs: int) -> None:
    shape, strides = iteration.shape, iteration.strides

    def order(a: int, b: int) -> int:
        """1 if dimension ``a`` comes after ``b``, -1 if before, 0 if nothing tells."""
        for operand, stride in enumerate(strides):
            if operand < outputs and (stride[a] == 0) != (stride[b] == 0):
                return 1 if stride[b] == 0 else -1
            if stride[a] == 0 or stride[b] == 0:
                continue
            if stride[a] != stride[b]:
                return -1 if stride[a] < stride[b] else 1
            if shape[a] > shape[b]:
                return 1
        return 0

    permutation = list(reversed(range(len(shape))))
    for i in range(1, len(permutation)):
        moving = i
        for other in reversed(range(i)):
            comparison = order(permutation[other], permutation[moving])
            if comparison < 0:
                break
            if comparison > 0:
                permutation[other], permutation[moving] = permutation[moving], permutation[other]
                moving = other
    iteration.shape = [shape[dim] for dim in permutation]
    iteration.strides = [[stride[dim] for dim in permutation] for stride in strides]


def _coalesce(iteration: _Iteration) -> None:
    if len(iteration.shape) <= 1:
        return
    shape, strides = [iteration.shape[0]], [[stride[0]] for stride in iteration.strides]
    for dim in range(1, len(iteration.shape)):
        size = iteration.shape[dim]
        joins = (
            shape[-1] == 1
            or size == 1
            or all(shape[-1] * out[-1] == src[dim] for out, src in zip(strides, iteration.strides, strict=True))
        )
        if joins:
            if shape[-1] == 1:
                for out, src in zip(strides, iteration.strides, strict=True):
                    out[-1] = src[dim]
            shape[-1] *= size
        else:
            shape.append(size)
            for out, src in zip(strides, iteration.strides, strict=True):
                out.append(src[dim])
    iteration.shape, iteration.strides = shape, strides


# --- the launch -------------------------------------------------------------------------------------------------------


def _last_pow2(n: int) -> int:
    return max(1, 1 << (n.bit_length() - 1)) if n > 0 else 1


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


def _launch(iteration: _Iteration, kernel: Kernel, sm_count: int, threads_per_sm: int) -> tuple[int, int] | None:
    """(staging bytes, semaphore bytes) of one launch, or None where every output stays within one thread block."""
    outputs = iteration.output_elements()
    inputs = iteration.numel() // outputs
    reduces_fastest, dim0, dim1, output_vector = _block_shape(iteration, kernel, outputs, inputs)
    width, height = _block(dim0, dim1, kernel.max_threads // output_vector)
    step_input, step_output = (width, 1) if reduces_fastest else (1, width)
    if _div_up(inputs, step_input) < min(height * 16, _MAX_VALUES_PER_THREAD):
        return None  # each warp keeps an output of its own
    step_input *= height
    values = _div_up(inputs, step_input)
    grid = _div_up(outputs // output_vector, step_output)
    target_grid = sm_count * (threads_per_sm // (width * height))
    if values < _MAX_VALUES_PER_THREAD or grid > target_grid:
        return None
    blocks = max(
        min(_div_up(target_grid, grid), _div_up(values, _MIN_VALUES_PER_THREAD)),
        _div_up(values, _MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return None
    staging = kernel.accumulator_bytes * outputs * blocks
    if not reduces_fastest:
        staging *= width * output_vector
    return staging, 4 * grid


def _block_shape(iteration: _Iteration, kernel: Kernel, outputs: int, inputs: int) -> tuple[bool, int, int, int]:
    """Whether the fastest dimension is reduced, the upper bounds of the block's two sides, and outputs per thread."""
    if not iteration.shape:
        # A scalar: its one value counts as a contiguous reduction of one element.
        return True, 1, 1, 1
    reduce_dims, stride = iteration.reduce_dims(), iteration.input_stride
    if reduce_dims == len(iteration.shape) or stride[0] < stride[reduce_dims]:
        vectorize = stride[0] == kernel.value_bytes and inputs >= 128 and reduce_dims == 1
        return True, inputs // kernel.input_vector if vectorize else inputs, outputs, 1
    vector = _output_vector(iteration, kernel) if stride[reduce_dims] == kernel.value_bytes else 1
    return False, outputs // vector, inputs, vector


def _output_vector(iteration: _Iteration, kernel: Kernel) -> int:
    """How many neighbouring outputs one thread takes: 4, 2 or 1, so that every load is aligned."""
    output_dim = iteration.reduce_dims()
    must_divide = [iteration.input_offset // kernel.value_bytes, iteration.shape[output_dim]]
    for dim, stride in enumerate(iteration.input_stride):
        if dim != output_dim:
            must_divide.append(stride // kernel.value_bytes)
    return next(vector for vector in (4, 2, 1) if all(n % vector == 0 for n in must_divide))


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    side0 = _last_pow2(dim0) if dim0 < max_threads else max_threads
    side1 = _last_pow2(dim1) if dim1 < max_threads else max_threads
    height = min(side1, max_threads // min(side0, _WARP))
    return min(side0, max_threads // height), height


@lru_cache(maxsize=8192)
def _buffers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    dims: frozenset[int],
    keepdim: bool,
    kernel: Kernel,
    sm_count: int,
    threads_per_sm: int,
) -> Buffers:
    iteration = _iteration(shape, strides, offset, dims, keepdim, kernel)
    accumulator = 0
    if not kernel.accumulates_in_output and not iteration.uses_32bit_indexing():
        accumulator = _accumulator_bytes(iteration, kernel)
    launches = (_launch(piece, kernel, sm_count, threads_per_sm) for piece in iteration.pieces())
    return Buffers(accumulator, tuple(launch for launch in launches if launch is not None))


def _accumulator_bytes(iteration: _Iteration, kernel: Kernel) -> int:
    """Partial results of the pieces, where the output's own type is too coarse to hold them."""
    if kernel.output_bytes[0] >= kernel.accumulator_bytes:
        return 0
    spans = (size * stride for size, stride in zip(iteration.shape, iteration.output_stride, strict=True))
    return max(kernel.output_bytes[0], *spans) // kernel.output_bytes[0] * kernel.accumulator_bytes


class Strided(Protocol):
    """What the rules ask of a tensor that is to be reduced."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def dim(self) -> int: ...
    def numel(self) -> int: ...
    def storage_offset(self) -> int: ...


class Layout:
    """Shape and strides of a buffer that no fake tensor stands for. Contiguous unless ``strides`` say otherwise."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int] | None = None) -> None:
        self.shape = tuple(shape)
        self._strides = tuple(strides) if strides is not None else _contiguous_strides(self.shape, range(len(shape)))

    @classmethod
    def dense_like(cls, tensor: Strided) -> Layout:
        """The layout of a copy: dense, dimensions in the same order of strides (``torch.preserve_format``)."""
        strides = tuple(tensor.stride())
        if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
            return cls(tensor.shape)  # expanded tensors are copied contiguously
        order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
        return cls(tensor.shape, _contiguous_strides(tuple(tensor.shape), order))

    def stride(self) -> Sequence[int]:
        return self._strides

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def storage_offset(self) -> int:
        return 0


def _contiguous_strides(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions, slowest first, are ``order``."""
    strides, expected = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = expected
        expected *= max(shape[dim], 1)
    return tuple(strides)


def reduction_buffers(
    tensor: Strided, dims: Sequence[int] | None, keepdim: bool, kernel: Kernel, card: Card
) -> Buffers:
    """Buffers of one reduction of ``tensor`` over ``dims`` (None or empty: all) with ``kernel``."""
    if tensor.numel() == 0:
        return _NOTHING
    ndim = tensor.dim()
    reduced = frozenset(d % ndim for d in dims) if dims and ndim else frozenset(range(ndim))
    return _buffers(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        reduced,
        keepdim,
        kernel,
        card.sm_count,
        card.max_threads_per_sm,
    )


# --- the kernels of each operator -------------------------------------------------------------------------------------


def _accumulating(value: torch.dtype, output: torch.dtype) -> Kernel:
    """sum, mean, norm (ReduceSumProdKernel.cu, ReduceMomentKernel.cu): half types accumulate in fp32."""
    half = value.itemsize == 2 and value.is_floating_point
    coarse = half and value == output
    accumulator = 4 if half else output.itemsize
    return Kernel(
        value.itemsize,
        accumulator,
        (output.itemsize,),
        input_vector=8 if half else 4,
        accumulates_in_output=not coarse,
        max_threads=256 if value == torch.complex128 else 512,
    )


def sum_kernel(value: torch.dtype, output: torch.dtype) -> Kernel:
    """The kernel that sums ``value`` into ``output``."""
    return _accumulating(value, output)


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


def _welford(value: torch.dtype, output: torch.dtype) -> Kernel:
    """var, std (ReduceMomentKernel.cu): mean, squares, 32-bit count and count again in the accumulate type."""
    return welford_kernel(value, (output,))


def welford_kernel(value: torch.dtype, outputs: Sequence[torch.dtype]) -> Kernel:
    """One output, or two: variance and mean."""
    accumulator = 32 if value == torch.float64 else 16
    sizes = tuple(output.itemsize for output in outputs)
    return Kernel(value.itemsize, accumulator, sizes, input_vector=2, accumulates_in_output=False)


def _logic(value: torch.dtype, output: torch.dtype) -> Kernel:
    """any, all (ReduceLogicKernel.cu): the accumulator is one bool."""
    return Kernel(value.itemsize, 1, (output.itemsize,))


# --- the operators ----------------------------------------------------------------------------------------------------


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _as_dims(dims: Any) -> list[int] | None:
    return [dims] if isinstance(dims, int) else dims


def _fused_cast(value: torch.dtype, output: torch.dtype) -> bool:
    return value in (torch.float16, torch.bfloat16) and output == torch.float32


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


@rule("aten.sum.default", "aten.sum.dim_IntList", "aten.nansum.default", "aten.mean.default", "aten.mean.dim")
def sum_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    return _cast_then_reduce(args, kwargs, outputs, card)


def _cast_then_reduce(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """The values are first copied to the output's type, except half types into fp32, which the kernel casts itself."""
    tensor, output = args[0], outputs[0]
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    cast = tensor.dtype != output.dtype and not _fused_cast(tensor.dtype, output.dtype)
    kernel = _accumulating(output.dtype if cast else tensor.dtype, output.dtype)
    if not cast:
        return _reduction(tensor, outputs, dims, keepdim, kernel, card)
    script = Script().output(0)
    copy = script.take(tensor.numel() * output.element_size(), "cast of the reduced tensor")
    reduction_buffers(Layout.dense_like(tensor), _as_dims(dims), keepdim, kernel, card).write(script)
    script.give(copy)
    return script


@rule("aten.prod.default", "aten.prod.dim_int")
def prod_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    return _cast_then_reduce(args, kwargs, outputs, card)


@rule("aten.amax.default", "aten.amin.default")
def extremum_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    return _reduction(args[0], outputs, dims, keepdim, _extremum(args[0].dtype, outputs[0].dtype), card)


@rule("aten.max.default", "aten.min.default")
def extremum_of_all_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    # ReduceAllOps.cpp makes its input contiguous.
    needs_copy = not args[0].is_contiguous()
    return _flat_reduction(args[0], outputs, needs_copy, _extremum(args[0].dtype, outputs[0].dtype), card)


@rule("aten.max.dim", "aten.min.dim")
def indexed_extremum_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    return _reduction(args[0], outputs, args[1], keepdim, _indexed_extremum(args[0].dtype, args[0].dtype), card)


@rule("aten.argmax.default", "aten.argmin.default")
def arg_extremum_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    kernel = _arg_extremum(args[0].dtype, torch.int64)
    if dims is None:  # the tensor is reshaped to one dimension, so that indices count all its elements
        return _flat_reduction(args[0], outputs, not _has_flat_view(args[0]), kernel, card)
    return _reduction(args[0], outputs, dims, keepdim, kernel, card)


def _flat_reduction(
    tensor: torch.Tensor, outputs: Sequence[torch.Tensor], needs_copy: bool, kernel: Kernel, card: Card
) -> Script | None:
    """A reduction of all values, of a contiguous copy if needed."""
    if not needs_copy:
        return _reduction(tensor, outputs, None, False, kernel, card)
    flat = Layout([tensor.numel()])
    script = Script().output(0)
    copy = script.take(tensor.numel() * tensor.element_size(), "contiguous copy of the reduced tensor")
    reduction_buffers(flat, None, False, kernel, card).write(script)
    script.give(copy)
    return script


def _has_flat_view(tensor: torch.Tensor) -> bool:
    expected = None
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


@rule("aten.var.correction", "aten.std.correction")
def welford_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = kwargs.get("keepdim", False)
    return _reduction(args[0], outputs, dims, keepdim, _welford(args[0].dtype, outputs[0].dtype), card)


@rule("aten.var_mean.correction", "aten.std_mean.correction")
def welford_pair_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = kwargs.get("keepdim", False)
    kernel = welford_kernel(args[0].dtype, [output.dtype for output in outputs])
    return _reduction(args[0], outputs, dims, keepdim, kernel, card)


def _extrema(value: torch.dtype) -> Kernel:
    # ReduceAMinMaxKernel.cu: the accumulator is a pair of values.
    size = value.itemsize
    return Kernel(size, 2 * size, (size, size), accumulates_in_output=False)


def extrema_buffers(tensor: torch.Tensor, card: Card) -> Buffers:
    """Buffers of the smallest and the largest of all values."""
    return reduction_buffers(tensor, None, False, _extrema(tensor.dtype), card)


@rule("aten.aminmax.default")
def extrema_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    kernel = _extrema(args[0].dtype)
    return _reduction(args[0], outputs, kwargs.get("dim"), kwargs.get("keepdim", False), kernel, card)


@rule("aten.logsumexp.default")
def logsumexp_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """ReduceOps.cpp: the maxima and a mask of the infinite ones, exp of the whole tensor, its sum into the result."""
    tensor, dims = args[0], _as_dims(args[1])
    size, rows = tensor.element_size(), outputs[0].numel()
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    script = Script()
    maxima = script.take(rows * size, "maxima")
    reduction_buffers(tensor, dims, True, _extremum(tensor.dtype, tensor.dtype), card).write(script)
    absolute = script.take(rows * size, "absolute maxima")
    infinite = script.take(rows, "infinite maxima")
    script.give(infinite, absolute)
    exponentials = script.take(tensor.numel() * size, "exponentials")
    script.output(0)
    reduction_buffers(Layout.dense_like(tensor), dims, True, sum_kernel(tensor.dtype, tensor.dtype), card).write(script)
    script.give(exponentials, maxima)
    return script


@rule("aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")
def count_nonzero_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """A boolean of every value, which sum() then casts to 64-bit integers."""
    script = Script()
    mask = script.take(args[0].numel(), "nonzero mask")
    script.output(0)
    cast = script.take(8 * args[0].numel(), "cast of the reduced tensor")
    dims = _as_dims(_argument(args, kwargs, 1, "dim", None))
    kernel = sum_kernel(torch.int64, torch.int64)
    reduction_buffers(Layout.dense_like(args[0]), dims, False, kernel, card).write(script)
    script.give(cast, mask)
    return script


@rule("aten.linalg_vector_norm.default")
def vector_norm_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    dims = _argument(args, kwargs, 2, "dim", None)
    keepdim = _argument(args, kwargs, 3, "keepdim", False)
    return _reduction(args[0], outputs, dims, keepdim, _accumulating(args[0].dtype, outputs[0].dtype), card)


@rule("aten.renorm.default")
def renorm_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """The norms of the slices, which become their factors; half types get factors of their own.
    Source: ``renorm_out`` of ATen/native/Normalization.cpp."""
    tensor, dim = args[0], args[2] % args[0].dim()
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    norm = torch.float32 if half else tensor.dtype
    script = Script().output(0)
    held = script.take(tensor.shape[dim] * norm.itemsize, "norms")
    dims = [d for d in range(tensor.dim()) if d != dim]
    reduction_buffers(tensor, dims, True, _accumulating(tensor.dtype, norm), card).write(script)
    if half:
        script.give(script.take(tensor.shape[dim] * tensor.element_size(), "factors"))
    script.give(held)
    return script


@rule("aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default", "aten.all.dim", "aten.all.dims")
def logic_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    if args[0].numel() == 1 and args[0].dtype != torch.bool:
        # ReduceOps.cpp copies the one value, cast to bool, instead of launching a reduction.
        script = Script().output(0)
        script.give(script.take(1, "bool of a single value"))
        return script
    dims = _argument(args, kwargs, 1, "dim", None)
    keepdim = _argument(args, kwargs, 2, "keepdim", False)
    return _reduction(args[0], outputs, dims, keepdim, _logic(args[0].dtype, outputs[0].dtype), card)
