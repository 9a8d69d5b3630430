"""Events with their streams: how a loop is recorded on the CUDA build, and how a capture predicts the same.

    python -m tests.recorded parallel record [part of a name ...]     records, on a machine with a CUDA build

writes ``parallel/<group>.jsonl.gz`` of its version, a loop a line: bytes asked for and, negative, given back,
with the stream (0: the default one; others by first use), in a private pool its number too (by first use from 1 on),
and the most bytes reserved.
"""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator
from graphmem.capture.session.session import Session, capture
from graphmem.replay import replay
from graphmem.trace import EventKind, Place, Trace
from tests import places
from tests.recorded import differ, loops
from tests.recorded.case import named
from tests.recorded.cases.loops.registry import Case
from tests.recorded.cases.parallel import ddp, graphs, sharded, streams
from tests.recorded.device import CARD, TORCH_VERSION, warm_up

FOLDER = places.PYTORCH / "parallel"
CASES = {**streams.CASES, **ddp.CASES, **sharded.CASES, **graphs.CASES}
_MOST_EVENTS = 1_000_000
NO_POOL = (0, 0)


@dataclass(frozen=True)
class Run:
    """``events``: (bytes, stream), or (bytes, stream, private pool), negative when given back. ``reserved_bytes``: the
    peak when the work of a stream is done at once; ``late_bytes``: the peak of blocks in use, those that wait for
    events included, when an event is ready after :data:`LATE` queries."""

    events: list[tuple[int, ...]]
    reserved_bytes: int
    late_bytes: int


#: Queries until an event is ready, in the second recording of a loop.
LATE = 50


def record(case: Case) -> Run:
    """What the CUDA build does, on a driver that can be told when events are ready."""
    driver = ctypes.CDLL(None)
    events, reserved, _ = _recorded(case)
    driver.fake_cuda_set_event_lag(ctypes.c_ulonglong(LATE))
    _, _, late = _recorded(case)
    driver.fake_cuda_set_event_lag(ctypes.c_ulonglong(0))
    return Run(events, reserved, late)


def _recorded(case: Case) -> tuple[list[tuple[int, ...]], int, int]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    warm_up()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found: list[tuple[int, int, Any]] = []
    started = False

    def mark() -> None:
        nonlocal started
        if started:
            for event in torch.cuda.memory._snapshot()["device_traces"][0]:
                if event["action"] in ("alloc", "free_requested"):
                    sign = 1 if event["action"] == "alloc" else -1
                    found.append((sign * event["size"], event["stream"], tuple(event.get("pool_id", NO_POOL))))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
        started = True

    loops.run(case, mark)
    stats = torch.cuda.memory_stats()
    return _numbered(found), stats["reserved_bytes.all.peak"], stats["active_bytes.all.peak"]


def predict(case: Case) -> Run:
    """What a capture says of it."""
    trace, marks = captured(case)
    events = []
    columns = (trace.kinds, trace.subjects)
    for kind, subject in list(zip(*(column.tolist() for column in columns), strict=True))[slice(*marks)]:
        storage = trace.storages[subject]
        if kind in (EventKind.ALLOC, EventKind.FREE) and storage.place == Place.DEVICE and storage.bytes:
            sign = 1 if kind == EventKind.ALLOC else -1
            events.append((sign * storage.bytes, storage.stream, storage.pool or NO_POOL))
    late = PyTorchCachingAllocator(driver=CudaDriver(event_lag=LATE), track_stats=True)
    replay(trace, late)
    reserved = replay(trace, PyTorchCachingAllocator()).peak_reserved_bytes
    return Run(_numbered(events), reserved, late.memory_stats()["active_bytes.all.peak"])


def captured(case: Case) -> tuple[Trace, list[int]]:
    """The trace of a loop, and the events between which it ran."""
    marks: list[int] = []

    def step(session: Session) -> None:
        warm_up()
        torch.cuda.empty_cache()
        loops.run(case, lambda: marks.append(len(session.recorder.builder.rows)))

    trace = capture(step, source=case.name, device=CARD, torch_version=TORCH_VERSION, cudnn_workspaces=False).trace
    return trace, marks


def _numbered(events: Iterable[tuple[int, int, Any]]) -> list[tuple[int, ...]]:
    streams, pools, numbered = {0: 0}, {NO_POOL: 0}, []
    for change, stream, pool in events:
        number = pools.setdefault(pool, len(pools))
        numbered.append((change, streams.setdefault(stream, len(streams)), *([number] if number else [])))
    return numbered


def load(folder: Path = FOLDER) -> dict[str, Run]:
    """Every recording by name of its loop."""
    found = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            document = json.loads(line)
            found[document["case"]] = Run([tuple(pair) for pair in document["events"]], *document["reserved_bytes"])
    return found


class _Parallel:
    """The loops as a kind of recording."""

    def record(self, arguments: list[str]) -> int:
        runs = load() if arguments else {}
        for case in CASES.values():
            if not case.refused and named(case, arguments):
                runs[case.name] = record(case)
                print(case.name, len(runs[case.name].events), runs[case.name].reserved_bytes, flush=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        for group in dict.fromkeys(case.group for case in CASES.values()):
            lines = [
                json.dumps(_document(name, runs[name]))
                for name, case in CASES.items()
                if case.group == group and name in runs
            ]
            (FOLDER / f"{group}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode() + b"\n", 9, mtime=0))
        return 0

    def table(self, arguments: list[str]) -> int:
        """Of the events; ``reserved_bytes`` and ``late_bytes`` are compared by the tests."""
        differ.table(CASES, _events(load()), lambda case: predict(case).events, arguments)
        return 0

    def differ(self, arguments: list[str]) -> int:
        parts = [part for part in arguments if part != "-v"]
        differ.show(CASES, _events(load()), lambda case: predict(case).events, parts, "-v" in arguments)
        return 0


def _events(runs: dict[str, Run]) -> dict[str, list[tuple[int, ...]]]:
    return {name: run.events for name, run in runs.items()}


def _document(name: str, run: Run) -> dict[str, Any]:
    return {
        "case": name,
        "torch": torch.__version__,
        "reserved_bytes": [run.reserved_bytes, run.late_bytes],
        "events": run.events,
    }


KIND = _Parallel()
