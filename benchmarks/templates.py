"""Templates against captures: python benchmarks/templates.py [--checks N] [zoo model ...]

Each model of the zoo is captured at batches of 2, 3 and 64, or more where its curves need more; then N further batches
are written by the template and captured. Prints for each model what became of them (equal in every event, storage and
byte; refused by the template; wrong), the processor time of a capture and of a size by template, and their ratio, all
of one process; at the end the sums. A wrong one is a defect: the template was proven.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass, field

from graphmem.answering import runs
from graphmem.answering.question import Question
from graphmem.answering.runs import RunCache, silent
from graphmem.answering.sized import SizedRuns
from graphmem.errors import GraphmemError
from graphmem.sources.zoo import zoo_entries
from graphmem.trace import same

LEARNT = (2, 3, 64, 14, 9)
ASKED = (4, 7, 16, 33, 6, 24, 40, 11, 50, 10)


@dataclass
class Found:
    """What became of the checks of a model, and seconds of processor time."""

    ends: Counter[str] = field(default_factory=Counter)
    captures: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    why: str = ""


def checked(model: str, checks: int) -> Found:
    """Raises :class:`GraphmemError` where the model cannot be captured."""
    found = Found()

    def question(size: int) -> Question:
        return Question(model, batch=size, device="H200")

    with SizedRuns("batch", question, RunCache()) as sized:
        for size in LEARNT:
            started = time.process_time()
            sized.capture(size, silent)
            found.captures.append(time.process_time() - started)
            if sized.is_proven or sized.refused:
                break
        found.why = sized.refused or ("" if sized.is_proven else "not proven")
        for size in ASKED[:checks]:
            started = time.process_time()
            run = sized.by_template(size) if sized.is_proven else None
            if run is None:
                found.ends["refused"] += 1
                continue
            found.written.append(time.process_time() - started)
            captured = runs.record(question(size), runs.load(question(size)))
            found.ends["equal" if same(run.trace, captured.trace) else f"WRONG at {size}"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--checks", type=int, default=len(ASKED))
    asked = parser.parse_args()
    total = Counter[str]()
    for name in asked.models or [entry.name for entry in zoo_entries()]:
        try:
            found = checked(f"zoo:{name}", asked.checks)
        except GraphmemError as error:
            print(f"{name:24s} not captured: {str(error)[:90]}", flush=True)
            continue
        total += found.ends
        capture, written = min(found.captures), min(found.written, default=0.0)
        times = f"{capture:6.2f} s {1000 * written:6.0f} ms {capture / written:5.0f}x" if written else ""
        print(f"{name:24s} {dict(found.ends)} {times} {found.why[:110]}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
