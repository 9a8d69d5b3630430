"""Whether a program has drawn random numbers on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy  # noqa: E402

from graphmem.capture.program import host_draws  # noqa: E402

_DRAWS: dict[str, Callable[[], object]] = {
    "random": random.random,
    "normal": lambda: random.gauss(0, 1),
    "numpy": numpy.random.rand,
    "numpy_normal": numpy.random.normal,
    "numpy_order": lambda: numpy.random.permutation(5),
}


@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
def test_a_draw_shows(draw: Callable[[], object]) -> None:
    before = host_draws.count()
    assert host_draws.count() == before
    draw()
    assert host_draws.count() != before


def test_a_draw_of_another_kind_of_generator_shows() -> None:
    generators: Any = numpy.random
    usual = generators.get_bit_generator()
    generators.set_bit_generator(generators.PCG64(1))
    try:
        test_a_draw_shows(generators.rand)
    finally:
        generators.set_bit_generator(usual)


_OWN: dict[str, Callable[[], Any]] = {
    "numpy": lambda: numpy.random.default_rng(3),
    "numpy_state": lambda: numpy.random.RandomState(3),
    "numpy_twister": lambda: numpy.random.Generator(numpy.random.MT19937(3)),
}


@pytest.mark.parametrize("make", _OWN.values(), ids=_OWN)
def test_a_draw_of_ones_own_generator_shows(make: Callable[[], Any]) -> None:
    held = {"deep": [make()]}
    (own,) = held["deep"]
    found = host_draws.own_generators()
    assert any(one is own for one in found)
    before = host_draws.count(found)
    assert host_draws.count(found) == before
    own.normal()
    assert host_draws.count(found) != before
