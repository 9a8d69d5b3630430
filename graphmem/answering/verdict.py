"""The verdict: whether a run fits a card, and how likely that is, given figures that are known to intervals."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from graphmem.answering.summarize import fits_card
from graphmem.base.figures import Doubts, Loads
from graphmem.devices import nccl
from graphmem.estimate import Refusals
from graphmem.run import Run
from graphmem.runtimes.base import Runs, Setting
from graphmem.trace import Trace

#: Operators of PyTorch, of ONNX and of Keras for which cuDNN loads its engines. Attention loads none of those that
#: were measured.
_ASKS_CUDNN = re.compile(
    r"convolution|_conv_|(?<![A-Za-z])conv[123]d|Conv(Transpose|2D|3D)?$|cudnn_(rnn|conv)|_rnn|LSTM|GRU"
)
#: Times that the share of runs that fit is halved in: it is known to 1 / 256.
_HALVINGS = 8
#: Parts of the runs that are tried where more room does not always help.
_PARTS = 16
#: The smallest part of a peak that is a change.
_SMALLEST = 1e-9


@cache
def _asks_cudnn(operator: str) -> bool:
    return _ASKS_CUDNN.search(operator) is not None


def loads_of(run: Run, setting: Setting) -> Loads:
    """The libraries and communicators that a process loads for a run, under this environment. A recording's own
    environment is not known: it was another machine's."""
    uses_cudnn = any(map(_asks_cudnn, run.trace.operator_names))
    eager = run.recorded is None and os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    loads = Loads(uses_cudnn, run.communicators, eager, setting.device.cuda_version)
    if not run.communicators:
        return loads
    version, variables = nccl.nccl_of(setting.torch_version), nccl.variables(os.environ)
    return replace(loads, nccl_version=version, nccl_variables=variables)


def holding(setting: Setting, context_bytes: int) -> Setting:
    """The setting with a context of this size."""
    return replace(setting, device=replace(setting.device, context_bytes=context_bytes))


def probability(
    trace: Trace,
    runs: Runs,
    doubts: Doubts,
    run: Callable[[int], Runs],
    setting: Setting,
    refusals: Refusals | None = None,
) -> float | None:
    """The share of runs that fit, or None where something that nothing bounds may decide. ``run`` runs the trace beside
    a context of so many bytes, with which every doubt is counted, as if the card had so much less room. An unbounded
    cause does not decide where the card holds :attr:`Doubts.times` times the reserved peak.

    It runs again only where the sizes leave it open. A program that was refused memory is judged as it ran: with
    another limit it would have asked for something else.
    """
    if trace.refused:
        return float(fits_card(runs, setting.device, refusals))

    def fits(share: float) -> bool:
        return _fits(trace, runs, max(0, setting.device.context_bytes + doubts.at("device", share)), run, setting)

    return _with_unbounded(
        _bounded_share(fits, undisturbed=fits_card(runs, setting.device)), doubts, _peaks_of_room(runs, doubts, setting)
    )


def _bounded_share(fits: Callable[[float], bool], *, undisturbed: bool) -> float:
    """The share of runs that fit by the causes with bounds; ``fits`` with so much of each, ``undisturbed``: with none.

    Near the limit a card with more room may be too small where one with less is not: segments are given back at other
    moments, and leave other holes. The share is counted then.
    """
    low, high = 0.0, 1.0
    if fits(high):
        return 1.0
    if not fits(low):
        return sum(fits((2 * part + 1) / (2 * _PARTS)) for part in range(_PARTS)) / _PARTS if undisturbed else 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return (low + high) / 2


def _with_unbounded(share: float, doubts: Doubts, peaks: float) -> float | None:
    """The share with the causes that nothing bounds, on a card that holds so many of the reserved peaks: by their
    records; None where one without a record may decide."""
    if share > 0 and doubts.most("device") is None and not (doubts.times is not None and doubts.times <= peaks):
        more = doubts.chance(max(peaks - 1, _SMALLEST))
        return None if more is None else min(share, 1 - more)
    if share < 1 and doubts.least("device") is None:
        less = doubts.chance(min(peaks - 1, -_SMALLEST))
        return None if less is None else max(share, less)
    return share


def _peaks_of_room(runs: Runs, doubts: Doubts, setting: Setting) -> float:
    """How many times the card holds the reserved peak, beside the context and all that is bounded."""
    device = setting.device
    room = device.capacity_bytes - device.taken_bytes - doubts.at("device", 1.0)
    return room / max(1, runs.main.peak_reserved_bytes)


def _fits(trace: Trace, runs: Runs, size: int, run: Callable[[int], Runs], setting: Setting) -> bool:
    """True if it fits beside a context of this size. It need not be run where it fits without a limit, nor where live
    memory exceeds the card and no call can do with a later, smaller plan."""
    device = setting.device
    if size == device.context_bytes:
        return fits_card(runs, device)
    room = device.capacity_bytes - device.others_bytes
    if runs.limited is None and runs.main.peak_reserved_bytes + size <= room:
        return True
    can_do_with_less = trace.plans or trace.fractions or trace.refused
    if not can_do_with_less and runs.main.peak_requested_bytes + size > room:
        return False
    other = run(size)
    return fits_card(other, holding(setting, size).device)
