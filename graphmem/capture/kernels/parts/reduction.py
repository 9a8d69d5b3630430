"""Buffers that a reduction kernel takes beside its output.

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

import torch

from graphmem.base.numbers import div_up, last_pow2
from graphmem.capture.kernels.parts.layout import Strided, iteration_order
from graphmem.capture.kernels.parts.script import Card, Script

_MAX_INT32 = 2**31 - 1
#: Bytes that no card holds.
_NO_CARDS = 2**39
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

    def extent(self) -> int:
        """The number of the last byte that an operand reaches, or of the elements."""
        spans = (sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True)) for strides in self.strides)
        return max(self.numel(), 1 + max(spans))

    def uses_32bit_indexing(self) -> bool:
        return self.extent() <= _MAX_INT32

    def pieces(self) -> Iterator[_Iteration]:
        """The parts that 32-bit indices reach, in the order they are launched: first halves first. Of a tensor that
        no card holds only the larger halves: all are alike, and each gives back what it takes."""
        if self.uses_32bit_indexing():
            yield self
            return
        dim = self._dim_to_split()
        half = self.shape[dim] // 2
        halves = ((0, half), (half, self.shape[dim] - half))
        for start, size in halves[1:] if self.extent() > _NO_CARDS else halves:
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
    order = iteration_order(shape, operands, len(kernel.output_bytes))
    sizes, in_order = [shape[dim] for dim in order], [[stride[dim] for dim in order] for stride in operands]
    iteration = _Iteration(sizes, in_order, kernel.value_bytes * offset)
    _coalesce(iteration)
    return iteration


def _coalesce(iteration: _Iteration) -> None:
    """Join neighbouring dimensions that every operand steps through as one, in place."""
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


def _launch(iteration: _Iteration, kernel: Kernel, sm_count: int, threads_per_sm: int) -> tuple[int, int] | None:
    """(staging bytes, semaphore bytes) of one launch, or None where every output stays within one thread block."""
    outputs = iteration.output_elements()
    inputs = iteration.numel() // outputs
    reduces_fastest, dim0, dim1, output_vector = _block_shape(iteration, kernel, outputs, inputs)
    width, height = _block(dim0, dim1, kernel.max_threads // output_vector)
    step_input, step_output = (width, 1) if reduces_fastest else (1, width)
    if div_up(inputs, step_input) < min(height * 16, _MAX_VALUES_PER_THREAD):
        return None  # each warp keeps an output of its own
    step_input *= height
    values = div_up(inputs, step_input)
    grid = div_up(outputs // output_vector, step_output)
    target_grid = sm_count * (threads_per_sm // (width * height))
    if values < _MAX_VALUES_PER_THREAD or grid > target_grid:
        return None
    blocks = max(
        min(div_up(target_grid, grid), div_up(values, _MIN_VALUES_PER_THREAD)),
        div_up(values, _MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return None
    staging = kernel.accumulator_bytes * outputs * blocks
    if not reduces_fastest:
        staging *= width * output_vector
    return staging, 4 * grid


def _block_shape(iteration: _Iteration, kernel: Kernel, outputs: int, inputs: int) -> tuple[bool, int, int, int]:
    """The block's shape: is the fastest dimension reduced, upper bounds of its two sides, and outputs per thread."""
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
    """The number of neighbouring outputs of one thread: 4, 2 or 1, so that every load is aligned."""
    output_dim = iteration.reduce_dims()
    must_divide = [iteration.input_offset // kernel.value_bytes, iteration.shape[output_dim]]
    for dim, stride in enumerate(iteration.input_stride):
        if dim != output_dim:
            must_divide.append(stride // kernel.value_bytes)
    return next(vector for vector in (4, 2, 1) if all(n % vector == 0 for n in must_divide))


def _block(dim0: int, dim1: int, max_threads: int) -> tuple[int, int]:
    side0 = last_pow2(dim0) if dim0 < max_threads else max_threads
    side1 = last_pow2(dim1) if dim1 < max_threads else max_threads
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
    """The buffers of a reduction over ``dims`` of a tensor: an accumulator where indices need 64 bits, and those of
    each launch."""
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


def reduction_buffers(
    tensor: Strided, dims: Sequence[int] | int | None, keepdim: bool, kernel: Kernel, card: Card
) -> Buffers:
    """Buffers of one reduction of ``tensor`` over ``dims`` (None or empty: all) with ``kernel``."""
    if tensor.numel() == 0:
        return _NOTHING
    ndim = tensor.dim()
    dims = [dims] if isinstance(dims, int) else dims
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


# --- kernels that several operators use -------------------------------------------------------------------------------


def sum_kernel(value: torch.dtype, output: torch.dtype) -> Kernel:
    """The kernel that sums ``value`` into ``output``; half types accumulate in fp32.

    Of sum and mean, and of norms (ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu).
    """
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


def write_sum(
    script: Script, values: Strided, dims: Sequence[int] | int | None, dtype: torch.dtype, card: Card,
    keepdim: bool = False, into: torch.dtype | None = None,
) -> None:  # fmt: skip
    """The buffers of the sum of ``values`` of ``dtype`` over ``dims`` (None: all), ``into`` another type if given."""
    reduction_buffers(values, dims, keepdim, sum_kernel(dtype, into or dtype), card).write(script)


def welford_kernel(value: torch.dtype, outputs: Sequence[torch.dtype]) -> Kernel:
    """var, std, perhaps with the mean as a second output (ReduceMomentKernel.cu).

    Mean, squares, a 32-bit count and the count again in the accumulate type.
    """
    accumulator = 32 if value == torch.float64 else 16
    sizes = tuple(output.itemsize for output in outputs)
    return Kernel(value.itemsize, accumulator, sizes, input_vector=2, accumulates_in_output=False)
