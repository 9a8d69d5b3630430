"""Shares of long tests: property tests try an eighth of their examples in every run and all in ``.ci/slow``; of long
lists of recorded cases, every run takes one of some parts and ``.ci/slow`` the others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

#: The environment variable by which all are tried: ``all``.
VARIABLE = "GRAPHMEM_EXAMPLES"
#: What hypothesis tries where a test says nothing.
USUAL = 100
_LEAST = 3


def examples(number: int) -> int:
    """The share of ``number`` examples to try in this run."""
    if os.environ.get(VARIABLE) == "all":
        return number
    return min(number, max(_LEAST, number // 8))


def parts(count: int) -> list[Any]:
    """The numbers of ``count`` parts as parameters of a test that takes ``cases[part::count]``: all but the first are
    slow."""
    return [pytest.param(number, marks=() if number == 0 else pytest.mark.slow) for number in range(count)]


def first_quick(cases: list[Any], quick: int) -> list[Any]:
    """Cases as parameters of a test: all but the first ``quick`` are slow."""
    return [pytest.param(case, marks=() if number < quick else pytest.mark.slow) for number, case in enumerate(cases)]


def but_slow(cases: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Cases as parameters of a test: those of ``slow`` are slow."""
    return [pytest.param(case, marks=pytest.mark.slow if case in slow else ()) for case in cases]
