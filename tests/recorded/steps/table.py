"""How close the predictions of all recorded runs are: ``python -m tests.recorded steps table [part of a name ...]``.

One line a run: peaks predicted and recorded (MiB), errors (%), share of allocations matched in order, seconds; then the
summary. ``--folder`` names another folder of recordings, ``--cudnn`` says that they were made with cuDNN's workspaces,
``--cudnn-library`` asks that cuDNN for them (a path, or ``installed``), ``--errors`` shows a failed run's traceback
instead of one line.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphmem.units import MIB
from tests.recorded.steps import runs

_HEADER = f"{'run':52s} {'allocated, MiB':>21s} {'error':>9s} {'reserved, MiB':>21s} {'error':>9s}  matched seconds"


@dataclass(frozen=True)
class Row:
    """The figures of one run that the summary needs."""

    allocated_error: float
    reserved_error: float
    exact: bool
    matched: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded steps table", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="only runs whose names contain every PART")
    parser.add_argument("--folder", type=Path, default=runs.FOLDER, help="recordings to compare with")
    parser.add_argument("--cudnn", action="store_true", help="the recordings have cuDNN's workspaces")
    parser.add_argument("--cudnn-library", metavar="PATH", help="ask this cuDNN for them; implies --cudnn")
    parser.add_argument("--errors", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    chosen = [name for name in runs.names(folder=options.folder) if all(part in name for part in options.parts)]
    print(_HEADER, flush=True)
    rows, failed = [], 0
    for name in chosen:
        try:
            workspaces = options.cudnn or options.cudnn_library is not None
            compared = runs.compare(name, options.folder, workspaces, options.cudnn_library)
        except Exception as error:
            failed += 1
            print(f"{name:52s} {type(error).__name__}: {_first_line(error)}", flush=True)
            if options.errors:
                traceback.print_exc()
            continue
        print(_line(compared), flush=True)
        rows.append(_row(compared))
        del compared
    print("\n".join(_summary(rows, failed)))
    return 1 if failed else 0


def _line(compared: runs.Comparison) -> str:
    recorded, predicted = compared.recorded, compared.predicted
    figures = (
        (predicted.replay.peak_allocated_bytes, recorded.peak_allocated_bytes, compared.allocated_error),
        (predicted.replay.peak_reserved_bytes, recorded.peak_reserved_bytes, compared.reserved_error),
    )
    columns = [f"{ours / MIB:10.2f} {theirs / MIB:10.2f} {error:+9.3%}" for ours, theirs, error in figures]
    return f"{recorded.name:52s} {' '.join(columns)}   {compared.match.share:.4f} {predicted.seconds:7.1f}"


def _row(compared: runs.Comparison) -> Row:
    exact = compared.allocated_error_bytes == 0 == compared.reserved_error_bytes
    return Row(compared.allocated_error, compared.reserved_error, exact, compared.match.share)


def _summary(rows: list[Row], failed: int) -> list[str]:
    lines = [f"{len(rows)} runs, {failed} failed"]
    if not rows:
        return lines
    lines.append(f"{sum(row.exact for row in rows)} equal to the byte at both levels")
    for level in ("allocated", "reserved"):
        errors = sorted(abs(getattr(row, f"{level}_error")) for row in rows)
        within = ", ".join(f"{sum(error <= limit for error in errors)} within {limit:.0%}" for limit in (0.02, 0.04))
        lines.append(
            f"{level:9s} equal {sum(error == 0 for error in errors)}, {within}, "
            f"median {statistics.median(errors):.3%}, largest {errors[-1]:.3%}"
        )
    both = sum(abs(row.allocated_error) <= 0.02 and abs(row.reserved_error) <= 0.04 for row in rows)
    lines.append(f"{both} within 2% allocated and 4% reserved")
    matched = [row.matched for row in rows]
    lines.append(f"matched: {sum(share == 1 for share in matched)} in full, least {min(matched):.4f}")
    return lines


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:160]


if __name__ == "__main__":
    sys.exit(main())
