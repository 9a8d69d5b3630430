"""Loops over the arrays of a graph that numba compiles where it is installed (``pip install graphmem[fast]``), and that
Python runs itself where it is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import GIVE, TAKE

Numbers = npt.NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

#: Whether functions are compiled.
IS_COMPILED = importlib.util.find_spec("numba") is not None


def compiled(function: Function) -> Function:
    """The function, compiled when it is first called and kept on the disk; as it is without numba."""
    if not IS_COMPILED:
        return function
    from numba import njit

    made: Function = njit(cache=True)(function)
    return made


@compiled
def events_of(
    order: Numbers, makers: Numbers, stays: npt.NDArray[np.bool_], scratch: Numbers,
    make_starts: Numbers, makes: Numbers, use_starts: Numbers, uses: Numbers, left: Numbers,
    kinds: Numbers, subjects: Numbers,
) -> int:  # fmt: skip
    """Write the events of an order as :meth:`Graph.trace` has them; how many there are.

    ``left``: how many nodes use each buffer, counted down here. The subject of scratch is the number of buffers and the
    number of its node.
    """
    count = 0
    for buffer in range(len(makers)):
        if makers[buffer] < 0:
            kinds[count], subjects[count] = TAKE, buffer
            count += 1
    for node in order:
        for place in range(make_starts[node], make_starts[node + 1]):
            kinds[count], subjects[count] = TAKE, makes[place]
            count += 1
        if scratch[node] > 0:
            kinds[count], subjects[count] = TAKE, len(makers) + node
            kinds[count + 1], subjects[count + 1] = GIVE, len(makers) + node
            count += 2
        for place in range(use_starts[node], use_starts[node + 1]):
            buffer = uses[place]
            left[buffer] -= 1
            if left[buffer] == 0 and not stays[buffer]:
                kinds[count], subjects[count] = GIVE, buffer
                count += 1
        for place in range(make_starts[node], make_starts[node + 1]):
            buffer = makes[place]
            if left[buffer] == 0 and not stays[buffer]:
                kinds[count], subjects[count] = GIVE, buffer
                count += 1
    return count
