"""The least memory that would do for a run that does not fit its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphmem.answering.summarize import fits_card
from graphmem.estimate import Findings
from graphmem.runtimes.base import Runs, Setting
from graphmem.units import MIB

#: The search ends where it is known to this part of itself, or to this many bytes.
_PRECISION, _CLOSE = 1 / 200, 16 * MIB


def least_that_fits(run: Callable[[Setting], Runs], setting: Setting) -> Findings:
    """``details["least"]``: bytes of device memory with which the run ends, with cached segments given back
    (``flushed_bytes``; None where that helps nothing) and without (``bytes``). ``run`` runs it in a setting. Nothing
    is found where a limit of the allocator's own ends it."""
    free = run(setting).main
    if free.out_of_memory is not None:
        return Findings()
    context = setting.device.context_bytes
    most, low = free.peak_reserved_bytes + context, free.peak_requested_bytes + context
    high = most
    while high - low > max(_CLOSE, _PRECISION * high):
        middle = (low + high) // 2
        room = replace(setting, device=replace(setting.device, capacity_bytes=middle + setting.device.others_bytes))
        low, high = (low, middle) if fits_card(run(room), room.device) else (middle, high)
    return Findings(details={"least": {"bytes": most, "flushed_bytes": high if high < most else None}})
