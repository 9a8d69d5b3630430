"""Run one sequence of events on the allocator of a CUDA build: ``python -m tests.recorded.allocator.record JOB FILE``.

Written: the events (``ev``), and after each of them the columns as differences from the event before (``d``); the
statistics, the segments at the end, the first messages of running out of memory. ``addr`` is the address that was
returned, from the start of the stub's arena; -1: out of memory; -2: not an allocation.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.recorded import stub
from tests.recorded.allocator.jobs import JOBS
from tests.recorded.allocator.traces import Event

COLUMNS = [
    *("addr", "allocated", "active", "reserved", "inactive_split", "requested", "n_alloc", "n_active", "n_segment"),
    *("n_inactive_split", "retries", "ooms", "dev_alloc", "dev_free", "phys"),
]
_BYTES = ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split_bytes", "requested_bytes")
_COUNTS = ("allocation", "active", "segment", "inactive_split")
_NUMBERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
_FORMAT = (
    "ev: [op,...] rows: ['a',id,size,stream] ['f',id] ['r',id,stream] ['s'] ['e'] ['p',fraction] ['c',settings]; "
    "d: per column, differences from the previous event (first from 0), one per event, taken AFTER the event. addr is "
    "the returned address minus base (cudaMalloc arena) or vbase (expandable arena); -1: OOM; -2: not an alloc or "
    "nothing done."
)
_OUT_OF_MEMORY, NOTHING = -1, -2
_MESSAGES = 3


class Allocator:
    """PyTorch's allocator under events. On a real card addresses are absolute and physical memory is unknown (-1)."""

    def __init__(self) -> None:
        torch.cuda.init()
        self.base, self.virtual_base = stub.counter("base") or 0, stub.counter("vbase") or 1 << 62
        self.streams: dict[int, Any] = {0: torch.cuda.default_stream()}
        self.live: dict[int, torch.Tensor] = {}
        self.current: Any = None
        self.messages: list[str] = []

    def address(self, pointer: int) -> int:
        return pointer - (self.virtual_base if pointer >= self.virtual_base else self.base)

    def stream(self, number: int) -> Any:
        if number not in self.streams:
            self.streams[number] = torch.cuda.Stream()
        return self.streams[number]

    def step(self, event: Event) -> int:
        match event:
            case ["a", name, size, stream]:
                return self._allocate(name, size, self.stream(stream))
            case ["f", name]:
                self.live.pop(name, None)
            case ["r", name, stream]:
                if name in self.live:
                    self.live[name].record_stream(self.stream(stream))
            case ["s"]:
                torch.cuda.synchronize()
            case ["e"]:
                torch.cuda.empty_cache()
            case ["p", fraction]:
                torch.cuda.set_per_process_memory_fraction(fraction)
            case ["c", text]:
                torch.cuda.memory._set_allocator_settings(text)
            case _:
                raise ValueError(event)
        return NOTHING

    def use(self, stream: Any) -> None:
        """Make ``stream`` the current one."""
        if self.current is not stream:
            torch.cuda.set_stream(stream)
            self.current = stream

    def _allocate(self, name: int, size: int, stream: Any) -> int:
        self.use(stream)
        try:
            self.live[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            if len(self.messages) < _MESSAGES:
                self.messages.append(str(error))
            return _OUT_OF_MEMORY
        return self.address(self.live[name].data_ptr())

    def row(self) -> list[int]:
        stats = torch._C._cuda_memoryStats(0)
        used = stub.counter("used")
        return [
            *(stats[name]["all"]["current"] for name in (*_BYTES, *_COUNTS)),
            *(stats[name] for name in _NUMBERS),
            -1 if used is None else used,
        ]

    def segments(self) -> list[Any]:
        numbers = {stream.cuda_stream: number for number, stream in self.streams.items()}
        return [
            [
                self.address(segment["address"]),
                segment["total_size"],
                numbers.get(segment["stream"], -1),
                segment["segment_type"],
                int(segment["is_expandable"]),
                [[block["size"], block["requested_size"], block["state"]] for block in segment["blocks"]],
            ]
            for segment in torch.cuda.memory_snapshot()
        ]


def record(events: list[Event]) -> dict[str, Any]:
    """The document of a sequence."""
    allocator = Allocator()
    rows = [[allocator.step(event), *allocator.row()] for event in events]
    columns = list(zip(*rows, strict=True))
    stats = torch.cuda.memory_stats(0)
    peak = stub.counter("peak")
    return {
        "format": _FORMAT,
        "config": configuration(),
        "ev": events,
        "d": {name: differences(column) for name, column in zip(COLUMNS, columns, strict=True)},
        "peaks": {name: value for name, value in stats.items() if name.endswith(".peak")},
        "final": {name: value for name, value in stats.items() if not name.endswith(".peak")},
        "phys_peak": -1 if peak is None else peak,
        "oom_messages": allocator.messages,
        "snapshot": allocator.segments(),
    }


def configuration() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "",
        "total_mib": int(os.environ.get("FAKE_CUDA_TOTAL_MIB") or 81920),
        "other_mib": int(os.environ.get("FAKE_CUDA_OTHER_MIB") or 0),
        "va": os.environ.get("FAKE_CUDA_VA") or "firstfit",
        "event_lag": int(os.environ.get("FAKE_CUDA_EVENT_LAG") or 0),
    }


def differences(column: tuple[int, ...]) -> list[int]:
    return [value - before for value, before in zip(column, (0, *column[:-1]), strict=True)]


if __name__ == "__main__":
    data = json.dumps(record(JOBS[sys.argv[1]].events()), separators=(",", ":")).encode()
    Path(sys.argv[2]).write_bytes(gzip.compress(data, 9, mtime=0))
