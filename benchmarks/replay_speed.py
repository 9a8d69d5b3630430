"""How many events a second the replay does: python benchmarks/replay_speed.py [trace.json ...]

Without arguments it replays the recorded events under ``golden/pytorch/2.13/allocator`` that were made with default
settings; otherwise traces in graphmem's own JSON (``graphmem.trace.to_json``). Prints events
per second of processor time, the best of three runs of each allocator.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from graphmem.allocators.base import Allocator
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.replay import replay
from graphmem.trace import EventKind, Trace, TraceBuilder, from_json

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "pytorch" / "2.13" / "allocator"
ALLOCATORS: dict[str, Callable[[], Allocator]] = {
    "pytorch_caching": PyTorchCachingAllocator,
    "ideal": IdealAllocator,
}
RUNS = 3


def recorded_trace(path: Path) -> Trace:
    """The events of an allocator recording as a trace."""
    builder = TraceBuilder(path.name)
    operator = builder.operator("recorded")
    storages: dict[int, int] = {}
    for event in json.loads(gzip.decompress(path.read_bytes()))["ev"]:
        if event[0] == "a":
            storages[event[1]] = builder.alloc(event[2], operator, stream=event[3])
        elif event[0] == "f":
            builder.free(storages[event[1]], operator)
        elif event[0] == "e":
            builder.event(EventKind.EMPTY_CACHE, operator)
    return builder.build()


def events_per_second(traces: Iterable[Trace], make: Callable[[], Allocator]) -> float:
    """Events of all traces by the time of replaying them once."""
    events, seconds = 0, 0.0
    for trace in traces:
        allocator = make()
        start = time.process_time()
        replay(trace, allocator)
        seconds += time.process_time() - start
        events += len(trace)
    return events / seconds


def main(paths: list[str]) -> None:
    """Measure and print."""
    if paths:
        traces = [from_json(Path(path).read_text()) for path in paths]
    else:
        traces = [recorded_trace(path) for path in sorted(GOLDEN.glob("a*_default.json.gz"))]
    print(f"{len(traces)} traces, {sum(map(len, traces)):,} events")
    for name, make in ALLOCATORS.items():
        best = max(events_per_second(traces, make) for _ in range(RUNS))
        print(f"{name:16} {best:12,.0f} events/s")


if __name__ == "__main__":
    main(sys.argv[1:])
