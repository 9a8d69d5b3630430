"""Record ONNX Runtime's arena under random requests, in every kind of configuration, through its C API.

    python -m tests.oracles.onnxruntime.record_arena
    python -m tests.oracles.onnxruntime.record_arena - < JOB.json > ROWS.json

Writes ``tests/golden/onnxruntime/ort_arena_traces.json.gz``. A request is ``["a" | "R", ID, BYTES]`` (Alloc,
Reserve) or ``["f", ID]``; to each belongs a row: address (-1: refused), the columns of :data:`COLUMNS`, new regions as
[bytes, address], and ONNX Runtime's words where it refused. ``start`` are the statistics before the first request, the
session's own initializer being reserved.

Addresses are those of the C library's ``malloc``, from the lowest of the case on. They decide between equal chunks, so
recording again gives other addresses and, after a tie, other chunks.
"""

from __future__ import annotations

import ctypes as c
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from graphmem.accuracy.onnxruntime import capi as onnxruntime_capi
from graphmem.accuracy.onnxruntime.session import CpuSession
from tests import places
from tests.oracles.onnxruntime.capi import Allocator, register_arena
from tests.oracles.onnxruntime.record_sessions import write
from tests.oracles.random_requests import PROFILES, random_requests

TARGET = places.ONNXRUNTIME / "ort_arena_traces.json.gz"
COLUMNS = ("InUse", "MaxInUse", "TotalAllocated", "NumAllocs", "NumReserves", "NumArenaExtensions", "RequestedInUse",
           "MaxAllocSize")  # fmt: skip
#: Fields of ``OrtArenaCfg``; those that are not named have its defaults. One limit is no multiple of 256.
CONFIGURATIONS: tuple[dict[str, int], ...] = (
    {},
    {"arena_extend_strategy": 1},
    {"arena_extend_strategy": 0, "initial_chunk_size_bytes": 16 << 20},
    {"arena_extend_strategy": 0, "max_power_of_two_extend_bytes": 64 << 20},
    {"arena_extend_strategy": 0, "max_mem": (256 << 20) + 777},
    {"arena_extend_strategy": 1, "max_mem": 128 << 20},
    {"arena_extend_strategy": 0, "max_dead_bytes_per_chunk": 1 << 20, "initial_chunk_size_bytes": 256},
)
REQUESTS, RESERVES = 250, 0.1
#: Where in its source it refused, before the words.
PLACE = re.compile(r"^/\S+:\d+ .*\) (?=[A-Z])")
EXTENDED, MEMORY = re.compile(r"Extended allocation by (\d+) bytes"), re.compile(r"Allocated memory at 0x([0-9a-f]+)")


class Arena:
    """The arena of a session, and what it wrote of its regions since :attr:`regions` was emptied."""

    def __init__(self, configuration: dict[str, int]) -> None:
        self.regions: list[list[int]] = []
        environment = onnxruntime_capi.environment(self._logged)
        if configuration:
            register_arena(environment, onnxruntime_capi.memory_info(True), configuration)
        entries = {"session.use_env_allocators": "1"} if configuration else {}
        with tempfile.TemporaryDirectory() as folder:
            self.session = CpuSession(_smallest_model(Path(folder)), environment, entries=entries)
        self.handle = self.session.arena()
        self._reserve = c.cast(self.handle, c.POINTER(Allocator)).contents.Reserve

    def _logged(self, text: str) -> None:
        if found := EXTENDED.search(text):
            self.regions.append([int(found[1])])
        elif found := MEMORY.search(text):
            self.regions[-1].append(int(found[1], 16))

    def alloc(self, size: int) -> int | None:
        """Raises :class:`~graphmem.accuracy.onnxruntime.capi.OrtError` where it refuses."""
        return onnxruntime_capi.made("AllocatorAlloc", (c.c_void_p, self.handle), (c.c_size_t, size)).value

    def reserve(self, size: int) -> int | None:
        return self._reserve(c.cast(self.handle, c.POINTER(Allocator)), size)

    def free(self, address: int) -> None:
        onnxruntime_capi.call("AllocatorFree", (c.c_void_p, self.handle), (c.c_void_p, address))

    def statistics(self) -> dict[str, int]:
        return onnxruntime_capi.statistics(self.handle)


def _smallest_model(folder: Path) -> Path:
    """Six numbers and six weights."""
    weights = numpy_helper.from_array(np.ones(6, np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [6]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "smallest", ends[:1], ends[1:], [weights])
    path = folder / "smallest.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()
    )
    return path


def answered(configuration: dict[str, int], requests: list[list[Any]]) -> dict[str, Any]:
    """``start`` and the rows of these requests. An environment is for ever: one call a process."""
    arena = Arena(configuration)
    start, rows = arena.statistics(), []
    live: dict[int, int] = {}
    for kind, identifier, *size in requests:
        arena.regions, address, words = [], None, None
        if kind == "f":
            if identifier in live:
                arena.free(live.pop(identifier))
        else:
            try:
                address = (arena.alloc if kind == "a" else arena.reserve)(*size)
                if address is not None:
                    live[identifier] = address
            except onnxruntime_capi.OrtError as error:
                address, words = -1, PLACE.sub("", str(error))
        stats = arena.statistics()
        rows.append([address, *(stats[column] for column in COLUMNS), arena.regions, words])
    return {"start": start, "expect": from_the_lowest(rows)}


def from_the_lowest(rows: list[list[Any]]) -> list[list[Any]]:
    """The rows with addresses counted from the lowest of them, which becomes one page."""
    bases = [base for row in rows for _, base in row[9]]
    lowest = min(bases + [row[0] for row in rows if row[0] is not None and row[0] >= 0]) - 4096
    for row in rows:
        if row[0] is not None and row[0] >= 0:
            row[0] -= lowest
        row[9] = [[size, base - lowest] for size, base in row[9]]
    return rows


def asked(configuration: dict[str, int], requests: list[list[Any]]) -> dict[str, Any]:
    """:func:`answered` in a process of its own."""
    command = [sys.executable, "-m", "tests.oracles.onnxruntime.record_arena", "-"]
    job = json.dumps([configuration, requests])
    done = subprocess.run(command, input=job, capture_output=True, text=True, cwd=places.ROOT)
    if done.returncode:
        raise SystemExit(done.stderr[-600:])
    return json.loads(done.stdout)


def main() -> None:
    if sys.argv[1:] == ["-"]:
        json.dump(answered(*json.load(sys.stdin)), sys.stdout)
        sys.stdout.flush()
        os._exit(0)  # the environment's destructors would call back into Python
    cases = []
    for profile, configuration in itertools.product(PROFILES, CONFIGURATIONS):
        requests = random_requests(profile, f"{profile} {configuration}", REQUESTS, RESERVES)
        case = {"profile": profile, "config": configuration, "ops": requests, **asked(configuration, requests)}
        cases.append(case)
        refused = sum(row[0] == -1 for row in case["expect"])
        print(profile, configuration, len(requests), "requests,", refused, "refused", flush=True)
    write(TARGET, {"version": onnxruntime_capi.library_version(), "cases": cases})


if __name__ == "__main__":
    main()
