"""Curves: a whole number as a function of the size of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

#: Sizes are padded to multiples of these, as attention's log-sum-exp is to 32.
PADDED_TO = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False)
class Curve:
    """A polynomial of the size, or of the size in multiples of ``unit``, rounded up. ``coefficients`` by powers."""

    coefficients: tuple[Fraction, ...]
    unit: int = 1

    @property
    def needs(self) -> int:
        """How many samples make it."""
        return len(self.coefficients) + (self.unit > 1)

    @property
    def is_constant(self) -> bool:
        """Whether no size changes it."""
        return len(self.coefficients) == 1

    def at(self, size: int) -> int:
        """Its value. Raises ValueError where that is no whole number."""
        x, value = -(-size // self.unit), 0
        numerators, denominator = self._whole
        for numerator in numerators:  # Horner's rule
            value = value * x + numerator
        if value % denominator:
            raise ValueError(f"no whole number at {size}")
        return value // denominator

    @cached_property
    def _whole(self) -> tuple[list[int], int]:
        """The coefficients as whole numbers over one denominator, by falling powers: fractions take ten times as
        long."""
        denominator = math.lcm(*(one.denominator for one in self.coefficients))
        return [int(one * denominator) for one in reversed(self.coefficients)], denominator


def curve_through(sizes: Sequence[int], values: Sequence[int]) -> Curve:
    """The curve of the lowest degree through all values. Sizes are distinct."""
    plain = _polynomial(sizes, values)
    if len(plain.coefficients) < len(sizes) or len(sizes) < 3:
        return plain
    for unit in PADDED_TO:
        multiples = [-(-size // unit) for size in sizes]
        if len(set(multiples)) == len(sizes):
            padded = _polynomial(multiples, values)
            if len(padded.coefficients) < len(plain.coefficients):
                return Curve(padded.coefficients, unit)
    return plain


def _polynomial(sizes: Sequence[int], values: Sequence[int]) -> Curve:
    """By Newton's divided differences."""
    differences = [Fraction(value) for value in values]
    leading = [differences[0]]
    for order in range(1, len(sizes)):
        differences = [
            (after - before) / (sizes[number + order] - sizes[number])
            for number, (before, after) in enumerate(itertools.pairwise(differences))
        ]
        leading.append(differences[0])
    coefficients: list[Fraction] = []
    for size, lead in zip(reversed(sizes), reversed(leading), strict=True):  # Horner: coefficients * (x - size) + lead
        shifted = [Fraction(0), *coefficients]
        for power, coefficient in enumerate(coefficients):
            shifted[power] -= size * coefficient
        shifted[0] += lead
        coefficients = shifted
    while len(coefficients) > 1 and not coefficients[-1]:
        coefficients.pop()
    return Curve(tuple(coefficients))


class Curves:
    """The curves through values at these sizes, each with a number. ``most_needed``: the samples that the most
    demanding one needs."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._numbers: dict[tuple[int, ...], int] = {}
        self._curves: list[Curve] = []
        self.most_needed = 0

    def __getitem__(self, number: int) -> Curve:
        return self._curves[number]

    def through(self, values: Sequence[int]) -> int:
        """The number of the curve through these values, one at each size."""
        key = tuple(values)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._curves)
            self._curves.append(curve_through(self._sizes, key))
            self.most_needed = max(self.most_needed, self._curves[number].needs)
        return number

    def values_at(self, size: int) -> list[int]:
        """The value of every curve, by their numbers."""
        return [curve.at(size) for curve in self._curves]
