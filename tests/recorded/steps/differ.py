"""Where a prediction first goes another way than its recording: ``python -m tests.recorded steps differ CASE``.

Lines the predicted allocations up with the recorded ones (``--frees``: frees too) and shows the first differences: the
bytes of both sides, and for ours the operator, module, phase and source line. ``level`` is how far the prediction is
above the recording (bytes handed out, rounded to 512) where a difference begins.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from graphmem.accuracy.align import Match, align
from tests.recorded.steps import runs

_ROUNDING = 512
_SHOWN = 12


@dataclass(frozen=True)
class Side:
    """The compared events of one side: signed bytes, and where each stands in the run's allocations and frees."""

    sizes: list[int]
    positions: list[int]
    levels: list[int]  # bytes handed out before every change of the run, and at the end

    @staticmethod
    def of(changes: Sequence[int], frees: bool) -> Side:
        kept = [(size, position) for position, size in enumerate(changes) if frees or size > 0]
        levels = list(accumulate((_rounded(size) for size in changes), initial=0))
        return Side([size for size, _ in kept], [position for _, position in kept], levels)

    def level_before(self, index: int) -> int:
        """Bytes handed out just before the compared event ``index``."""
        return self.levels[self.positions[index]] if index < len(self.positions) else self.levels[-1]

    @property
    def peak(self) -> tuple[int, int]:
        """(highest level, position in the run's changes)."""
        highest = max(self.levels)
        return highest, self.levels.index(highest) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded steps differ", description=__doc__)
    parser.add_argument("case", metavar="CASE", help="name of a recorded run, or a part that only one has")
    parser.add_argument("--frees", action="store_true", help="compare frees too")
    parser.add_argument("-n", "--number", type=int, default=10, metavar="N", help="differences to show, 10 by default")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="differences to pass over first")
    parser.add_argument("--folder", type=Path, default=runs.FOLDER, help="recordings to compare with")
    parser.add_argument("--cudnn", action="store_true", help="the recordings have cuDNN's workspaces")
    options = parser.parse_args(arguments)
    compared = runs.compare(_case(options.case, options.folder), options.folder, options.cudnn)
    for line in report(compared, options.frees, options.number, options.skip):
        print(line)
    return 0


def _case(text: str, folder: Path) -> str:
    known = runs.names(folder=folder)
    found = [text] if text in known else [name for name in known if text in name]
    if len(found) != 1:
        raise SystemExit(f"{text!r} names {len(found)} recorded runs: {', '.join(found or known)}")
    return found[0]


def report(compared: runs.Comparison, frees: bool = False, number: int = 10, skip: int = 0) -> Iterator[str]:
    """The lines of the report."""
    recorded, predicted = compared.recorded, compared.predicted
    ours, theirs = Side.of(predicted.changes, frees), Side.of(recorded.changes, frees)
    match = align(ours.sizes, theirs.sizes)
    differences = match.differences()
    yield from _heading(compared, ours, theirs, match, len(differences))
    for start_a, end_a, start_b, end_b in differences[skip : skip + number]:
        level = ours.level_before(start_a) - theirs.level_before(start_b)
        part = _part(recorded, theirs.positions, start_b)
        yield ""
        yield f"event {start_a} of ours, {start_b} of the recording ({part}); level {level:+,}"
        if start_a > 0:
            yield f"    same {_event(predicted, ours, start_a - 1)}"
        for index in _shown(start_a, end_a):
            yield f"    ours {_event(predicted, ours, index)}"
        if end_a - start_a > _SHOWN:
            yield f"    ours ... {end_a - start_a - _SHOWN} more"
        yield f"    recorded {_sizes(theirs.sizes[start_b:end_b])}"


def _heading(compared: runs.Comparison, ours: Side, theirs: Side, match: Match, count: int) -> Iterator[str]:
    recorded, predicted = compared.recorded, compared.predicted
    yield f"{recorded.name}: {len(ours.sizes)} events, {len(theirs.sizes)} recorded, {match.share:.4f} matched"
    for name, figure, wanted in (
        ("allocated", predicted.replay.peak_allocated_bytes, recorded.peak_allocated_bytes),
        ("reserved", predicted.replay.peak_reserved_bytes, recorded.peak_reserved_bytes),
    ):
        yield f"{name:9s} peak {figure:,}, recorded {wanted:,} ({figure - wanted:+,}, {figure / wanted - 1:+.4%})"
    _, at = ours.peak
    _, recorded_at = theirs.peak
    yield f"highest level at {_where(predicted, predicted.events[at])}"
    allocations = sum(size > 0 for size in recorded.changes[: recorded_at + 1])
    yield f"highest level recorded at allocation {allocations - 1} ({_part_of(recorded, allocations - 1)})"
    yield f"{count} differences"


def _shown(start: int, end: int) -> range:
    return range(start, min(end, start + _SHOWN))


def _event(predicted: runs.PredictedRun, side: Side, index: int) -> str:
    event = predicted.events[side.positions[index]]
    storage = predicted.trace.storages[int(predicted.trace.subjects[event])]
    label = f" [{storage.label}]" if storage.label else ""
    return f"{_signed(side.sizes[index]):>15s} {storage.category.name.lower()}{label} {_where(predicted, event)}"


def _where(predicted: runs.PredictedRun, event: int) -> str:
    trace = predicted.trace
    operator = trace.operators[int(trace.event_operators[event])]
    parts = (operator.name, operator.module, str(trace.phases[operator.phase]), operator.source)
    return "  ".join(part for part in parts if part)


def _part(recorded: runs.RecordedRun, positions: Sequence[int], index: int) -> str:
    if index >= len(positions):
        return "end"
    allocations = sum(size > 0 for size in recorded.changes[: positions[index]])
    return _part_of(recorded, allocations)


def _part_of(recorded: runs.RecordedRun, allocation: int) -> str:
    """The part of the recorded run that made its allocation number ``allocation``: ``fwd0``, ``bwd0``, ``opt0`` ..."""
    ends = [count for _, count in recorded.marks]
    position = bisect_right(ends, allocation)
    return recorded.marks[position][0] if position < len(ends) else "end"


def _sizes(sizes: Sequence[int]) -> str:
    shown = " ".join(_signed(size) for size in sizes[:_SHOWN])
    more = f" ... {len(sizes) - _SHOWN} more" if len(sizes) > _SHOWN else ""
    return shown + more if sizes else "nothing"


def _signed(size: int) -> str:
    return f"{size:,}" if size > 0 else f"free {-size:,}"


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING) * _ROUNDING


if __name__ == "__main__":
    sys.exit(main())
