"""Every model of the zoo analysed, in a few processes side by side: its peak, and what the analysis took."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from graphmem.accuracy.case import Case
from graphmem.answering.question import Question
from graphmem.answering.stages import estimate_of
from graphmem.errors import GraphmemError
from graphmem.estimate import Peak
from graphmem.workers import Workers

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Surveyed:
    """One analysis: the peak in bytes or the error, its seconds, the most memory its process held, in bytes (None on
    Windows, which Python does not ask), and how many times it met something that is not modelled."""

    case: Case
    peak: Peak | None
    error: str
    unknown: int
    seconds: float
    ram_bytes: int | None


def survey(cases: Sequence[Case], device: str | None = None, workers: Workers | None = None) -> Iterator[Surveyed]:
    """Analyse the cases, by ``workers``, else here, and yield them in order."""
    found = (workers or Workers()).map(partial(_survey_one, device=device), cases)
    for case, one in zip(cases, found, strict=True):
        yield Surveyed(case, None, str(one), 0, 0.0, None) if isinstance(one, GraphmemError) else one


def _survey_one(case: Case, device: str | None) -> Surveyed:
    _forget_peak_ram()
    begun = time.perf_counter()
    peak, error, unknown = None, "", 0
    try:
        estimate = estimate_of(Question(case.model, training=case.step, device=device, top=0))
        peak, unknown = estimate.peak, sum(item.count for item in estimate.diagnostics if item.kind == "unknown")
    except GraphmemError as raised:
        error = str(raised)
    seconds = time.perf_counter() - begun
    return Surveyed(case, peak, error, unknown, seconds, _peak_ram_bytes())


def _forget_peak_ram() -> None:
    """Let the process's high-water mark start anew; Linux alone can."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")


def _peak_ram_bytes() -> int | None:
    """The most memory this process has held since then, or since its start. Linux counts KiB, macOS bytes."""
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource

    held: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else held * 1024
