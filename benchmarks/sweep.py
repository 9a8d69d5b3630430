"""What a sweep costs beside the capture it shares: python benchmarks/sweep.py [model]

The 50 settings are ten of the allocator on cards of five sizes, for one training step of GPT-2 (or of another model as
on the command line). First two of them are analysed on their own, then all 50 are swept. Prints seconds of wall time
and of processor time, the sweep in analyses, and what it takes besides one capture; all in one run of one process, so
that the ratios do not depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import graphmem
from graphmem.answering import runs
from graphmem.answering.question import Question
from graphmem.devices import custom_device
from graphmem.units import GIB

BATCH, SEQ_LEN = 4, 512
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:16",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8,max_split_size_mb:256",
    "large_segment_size_mb:64",
)
#: Memory of the cards; the step of GPT-2 does not fit the smallest, nor, under one of the settings, the next.
CAPACITIES = tuple(size * GIB for size in (3, 6, 12, 24, 80))


class Seconds(NamedTuple):
    """Of wall time, and of processor time."""

    wall: float
    processor: float


def timed(function: Callable[[], Any]) -> tuple[Seconds, Any]:
    """What the call takes, and gives."""
    wall, processor = time.perf_counter(), time.process_time()
    result = function()
    return Seconds(time.perf_counter() - wall, time.process_time() - processor), result


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "hf:gpt2"
    sizes: dict[str, Any] = {"batch": BATCH, "seq_len": SEQ_LEN}
    cards = [custom_device(capacity, like="H100") for capacity in CAPACITIES]
    vary: dict[str, list[Any]] = {"alloc_conf": list(CONFIGURATIONS), "device": list(cards)}
    graphmem.analyze(model, **sizes, iterations=1)  # imports

    corners = ((CONFIGURATIONS[0], cards[0]), (CONFIGURATIONS[-1], cards[-1]))
    alone = [timed(lambda c=c, d=d: graphmem.analyze(model, **sizes, alloc_conf=c, device=d)) for c, d in corners]
    one = Seconds(*(statistics.mean(values) for values in zip(*(taken for taken, _ in alone), strict=True)))
    question = Question(model, **sizes)
    capture, _ = timed(lambda: runs.record(question, runs.load(question)))
    sweep, rows = timed(lambda: graphmem.sweep(model, vary=vary, **sizes))
    assert [row.estimate.peak for row in (rows[0], rows[-1])] == [found.peak for _, found in alone]

    settings = len(rows)
    ratio = sweep.processor / one.processor
    besides = Seconds(*(whole - part for whole, part in zip(sweep, capture, strict=True)))
    print(f"{model}, training, batch {BATCH}, {SEQ_LEN} tokens; {settings} settings")
    print(f"{'':36s} {'wall s':>7s} {'cpu s':>7s}")
    for words, taken in (
        ("one analysis", one),
        ("one capture", capture),
        ("the sweep", sweep),
        ("the sweep besides one capture", besides),
        ("the same, for each setting", Seconds(*(value / settings for value in besides))),
    ):
        print(f"{words:36s} {taken.wall:7.3f} {taken.processor:7.3f}")
    print(f"the sweep costs {ratio:.2f} analyses, where {settings} analyses would cost {settings}")
    print(f"{sum(row.estimate.fit.fits for row in rows)} of {settings} settings fit")


if __name__ == "__main__":
    main()
