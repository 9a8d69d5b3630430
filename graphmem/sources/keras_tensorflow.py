"""A Keras model on its TensorFlow backend: TensorFlow, in a process of its own, prepares the step for a card; its
executor and its kernels are followed here. Nothing is computed, and no card is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec

from graphmem.base.figures import MEASURED, TRACE_LEVELS, Cause, seen, unknown
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.errors import SourceError
from graphmem.runtimes.base import Taken
from graphmem.runtimes.tensorflow.library import CudnnSpaces
from graphmem.runtimes.tensorflow.orders import Drawn, draw
from graphmem.runtimes.tensorflow.step import read_step
from graphmem.sources.base import Sizes
from graphmem.sources.own_process import answer_of

TRAINING_ITERATIONS = 3
_PROGRAM = "graphmem.sources.tensorflow_program"
_ESTIMATED = "without a cuDNN to ask (pip install 'graphmem[cudnn]'), workspaces are estimated: copies of all tensors"
_XLA = (
    "XLA compiles this step (jit_compile is on, Keras's default on a GPU), and its plan of buffers is not modelled: "
    "the figures are those of the same step operator by operator (jit_compile=False); "
)
_NO_XLA = "the step runs operator by operator: jit_compile is off, or Keras's default found a layer that XLA has not"
_EAGER = "the step runs eagerly (run_eagerly): operators follow in Python's order, gradients are held to its end"
_FUNCTIONS = "operators that run graphs of their own are not followed: what those take is missing"
_LOOPS = "data decide how often a loop turns: one turn is counted, what it keeps of each further one is missing"
#: How many per cent recorded processes lay outside the peaks that were drawn for their step, of training steps of
#: TensorFlow 2.21 on an H200; and how many per cent more steps took that XLA compiled (docs/modeling/tensorflow.md; a
#: test holds them to the goldens).
MORE_PERCENT = (
    -8.5, -0.3, -0.3, -0.3, -0.1, -0.1, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
    0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.5,
    0.7, 2.2, 2.3,
)  # fmt: skip
MORE_PERCENT_WITH_XLA = (
    -37.1, -6.0, -0.9, 8.7, 21.4, 24.8, 25.3, 48.5, 103.3,
)  # fmt: skip
#: Names, sources and spreads of the causes of doubt: a step operator by operator, and one that XLA compiles.
_ORDERS = "TensorFlow's order of kernels"
_DRAWN = (
    "kernels run in another order in every process, and chunks are larger than requests: of drawn processes, nine in "
    "ten stay at or under this peak"
)
_OPERATOR_BY_OPERATOR = (
    "TensorFlow's kernels",
    f"{len(MORE_PERCENT)} recorded processes, as far as they lay outside the drawn ones of their step",
    MORE_PERCENT,
)
_UNDER_XLA = (
    "XLA",
    f"{_XLA}on {len(MORE_PERCENT_WITH_XLA)} recorded models XLA took {-min(MORE_PERCENT_WITH_XLA):.1f} % less to "
    f"{max(MORE_PERCENT_WITH_XLA):.1f} % more",
    MORE_PERCENT_WITH_XLA,
)


def is_installed() -> bool:
    """Whether this Python has TensorFlow, of any build."""
    return find_spec("tensorflow") is not None


def plan_keras(text: str, sizes: Sizes, card: Device, cudnn: Cudnn | None) -> Taken | None:
    """The step of ``FILE.py:FACTORY`` on the card, as TensorFlow runs it; None for a model that is to be trained and is
    not compiled, and where TensorFlow is a build without a card's kernels. Raises :class:`SourceError`."""
    document = _prepared(text, sizes, card)
    if "unprepared" in document:
        return None
    step = read_step(document)
    if sizes.training and not step.training:
        return None
    library = CudnnSpaces(card, cudnn)
    drawn = draw(step, f"keras:{text}", sizes.iterations or TRAINING_ITERATIONS, library)
    versions = " and ".join(f"{name} {version}" for name, version in step.versions.items())
    notes = [f"the graph is that of {versions}, rewritten by TensorFlow's own optimizer (Grappler) for {card.name}"]
    doubts = (
        [_spread_of(drawn, *_UNDER_XLA)] if step.jit else [_orders(drawn), _spread_of(drawn, *_OPERATOR_BY_OPERATOR)]
    )
    if library.estimated:
        notes.append(_ESTIMATED)
        doubts.append(unknown("cuDNN's workspaces", _ESTIMATED, below=True))
    missing = _missing(step.unfollowed, drawn.uncounted)
    doubts += missing
    notes += [cause.source for cause in missing]
    notes.append(_EAGER if step.eager else _UNDER_XLA[1] if step.jit else _NO_XLA)
    return Taken(drawn.shown, tuple(notes), doubts=tuple(doubts), proven="tests/golden/tensorflow")


def _missing(unfollowed: Iterable[str], uncounted: Iterable[str]) -> list[Cause]:
    """The memory that the figures lack, so that they are lower bounds."""
    found = (("functions", _FUNCTIONS, sorted(unfollowed)), ("loops", _LOOPS, sorted(uncounted)))
    return [unknown(name, f"{text}: {', '.join(which)}", below=True) for name, text, which in found if which]


def _orders(drawn: Drawn) -> Cause:
    """The peaks of the processes that were drawn."""
    return _measured(_ORDERS, _DRAWN, (peak - drawn.peak for peak in drawn.peaks), len(drawn.peaks))


def _spread_of(drawn: Drawn, name: str, source: str, percent: Sequence[float]) -> Cause:
    """As far off as recorded peaks were, in per cent of this step's peak."""
    return _measured(name, source, (int(drawn.peak * more / 100) for more in percent), len(percent))


def _measured(name: str, source: str, offsets: Iterable[int], count: int) -> Cause:
    inside = round((count - 1) / (count + 1), 4)
    return Cause(name, MEASURED, source, dict.fromkeys(TRACE_LEVELS, seen(offsets)), inside, count)


def _prepared(text: str, sizes: Sizes, card: Device) -> dict[str, object]:
    capability = card.compute_capability
    if capability is None:
        raise SourceError(f"keras:{text} is analysed for CUDA cards; {card.name} is none")
    asked = {**asdict(sizes), "generate": None, "text": text, "architecture": ".".join(map(str, capability))}
    return answer_of(_PROGRAM, asked, f"keras:{text}: TensorFlow could not prepare the step")
