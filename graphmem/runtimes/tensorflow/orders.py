"""Which of the orders in which TensorFlow may run a step is shown, and how far off the others are.

No two processes run the kernels of a step in one order (:mod:`graphmem.runtimes.tensorflow.edges`), and as chunks of up
to twice a request are used whole, their peaks differ. Processes are drawn, and the figures are those of one whose peak
nine of ten stay at or under: the same share for every model, whether its peaks differ by nothing or by a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random

from graphmem.allocators.tensorflow_bfc import BFCOptions, TensorFlowBFC
from graphmem.replay import replay
from graphmem.runtimes.tensorflow.card import with_eigen_scratch
from graphmem.runtimes.tensorflow.dataflow import trace_of
from graphmem.runtimes.tensorflow.kernels import Library
from graphmem.runtimes.tensorflow.step import Step
from graphmem.trace import Trace

#: How many processes are drawn; fewer where so many agree to a part in a thousand.
DRAWN, ALIKE, AGREEMENT = 10, 4, 1e-3
#: The share of processes that stay at or under the figure.
SHARE = 0.9
#: More than any card has.
_ENDLESS = 1 << 56


@dataclass(frozen=True)
class Drawn:
    """``shown``: the trace of the process that is shown; ``peaks``: of all that were drawn, bytes of chunks in use with
    memory growth, ascending; ``peak`` is the one that is shown. ``uncounted``: loops of which nobody knows how often
    they turn."""

    shown: Trace
    peak: int
    peaks: tuple[int, ...]
    uncounted: frozenset[str]


def draw(step: Step, name: str, iterations: int, library: Library) -> Drawn:
    """Processes that build the model and run its step ``iterations`` times. A step that runs eagerly has one order, and
    of one that XLA compiles, whose kernels are others, that of the graph is followed."""
    has_one_order = step.eager or step.jit
    uncounted: set[str] = set()
    found: list[tuple[int, int, Trace]] = []
    for seed in range(1 if has_one_order else DRAWN):
        order = None if has_one_order else Random(seed)
        trace = with_eigen_scratch(trace_of(step, name, iterations, library, uncounted, order))
        found.append((_peak(trace), seed, trace))
        if len(found) == ALIKE and max(found)[0] <= min(found)[0] * (1 + AGREEMENT):
            break
    found.sort(key=lambda one: one[:2])
    peak, _, shown = found[ceil(SHARE * len(found)) - 1]
    return Drawn(shown, peak, tuple(one[0] for one in found), frozenset(uncounted))


def _peak(trace: Trace) -> int:
    allocator = TensorFlowBFC(_ENDLESS, BFCOptions(allow_growth=True))
    return replay(trace, allocator).peak_allocated_bytes
