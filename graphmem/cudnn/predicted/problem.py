"""A convolution as cuDNN sees it, and the matrix product it becomes."""

from __future__ import annotations

import math
from enum import Enum

from graphmem.base.records import dataclass
from graphmem.cudnn.plans import ITEM_BYTES, Convolution


class Direction(Enum):
    """The three computations of a convolution."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_WEIGHT = "backward weight"


@dataclass(frozen=True, slots=True)
class Problem:
    """A convolution as cuDNN sees it; a transposed one is the backward-data problem of the one it transposes."""

    batch: int
    channels: int
    filters: int
    input_pixels: int
    output_pixels: int
    kernel: tuple[int, ...]
    groups: int
    itemsize: int
    channels_last: bool
    #: fp32 values may be rounded to TF32 (``torch.backends.cudnn.allow_tf32``, on by default).
    tf32: bool = True
    bf16: bool = False
    dilated: bool = False
    #: Sides of input and output; none where they are not known, which is then taken for square.
    input_sides: tuple[int, ...] = ()
    output_sides: tuple[int, ...] = ()
    #: Along the last dimension.
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @staticmethod
    def of(question: Convolution) -> Problem:
        """The convolution of a question to cuDNN."""
        channels = question.input[1]
        return Problem(
            batch=question.input[0],
            channels=channels,
            filters=question.output[1],
            input_pixels=math.prod(question.input[2:]),
            output_pixels=math.prod(question.output[2:]),
            kernel=question.filter[2:],
            groups=max(1, channels // max(1, question.filter[1])),
            itemsize=ITEM_BYTES[question.dtype],
            channels_last=question.channels_last,
            tf32=question.tf32,
            bf16=question.dtype == "bfloat16",
            dilated=any(step > 1 for step in question.dilation),
            input_sides=question.input[2:],
            output_sides=question.output[2:],
            stride=question.stride[-1],
            padding=question.padding[-1],
            dilation=question.dilation[-1],
        )

    @property
    def strided(self) -> bool:
        """Whether the output is much smaller than the input."""
        return self.output_pixels * 2 < self.input_pixels

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def rows(self) -> int:
        """Output pixels of the batch, over which a filter's gradient is summed."""
        return self.batch * self.output_pixels

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return min(self.batch, self.input_pixels, self.output_pixels, self.channels, self.filters) <= 0


@dataclass(frozen=True, slots=True)
class Product:
    """The matrix product behind one direction: ``count`` products of ``m`` by ``n``, each summed over ``k``.

    Pixels of the batch are the rows of the forward and the input gradient's product. A filter's gradient is one product
    of filters and channels for every tap, summed over pixels.
    """

    m: int
    n: int
    count: int
    k: int

    @staticmethod
    def of(problem: Problem, direction: Direction) -> Product:
        if direction is Direction.FORWARD:
            return Product(problem.rows, problem.filters, 1, problem.channels * problem.taps)
        if direction is Direction.BACKWARD_DATA:
            pixels = problem.batch * problem.input_pixels
            return Product(pixels, problem.channels, 1, problem.filters * problem.taps)
        return Product(problem.filters, problem.channels, problem.taps, problem.rows)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of ``m`` by ``n`` that cover it."""
        return -(-self.m // m) * -(-self.n // n) * self.count
