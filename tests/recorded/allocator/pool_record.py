"""Run one sequence of events with private pools: ``python -m tests.recorded.allocator.pool_record NAME FOLDER``.

Written is what ``record`` writes, with one column more: the checksum of ``memory_snapshot`` after every event.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.recorded import stub
from tests.recorded.allocator.pool_traces import TRACES, Script
from tests.recorded.allocator.record import COLUMNS, NOTHING, Allocator, configuration, differences
from tests.recorded.allocator.traces import Event


class PoolAllocator(Allocator):
    """PyTorch's allocator under the events of ``pool_traces`` too."""

    def __init__(self) -> None:
        super().__init__()
        self.pools: dict[int, torch.cuda.MemPool] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.ids: dict[int, tuple[int, int]] = {}
        self.own_pools = 0

    def step(self, event: Event) -> int:
        allocator = torch._C
        match event:
            case ["m", pool, on_oom, no_split]:
                self.pools[pool] = torch.cuda.MemPool(use_on_oom=bool(on_oom), no_split=bool(no_split))
                self.ids[pool] = self.pools[pool].id
            case ["d", pool]:
                del self.pools[pool]
            case ["u", pool]:
                allocator._cuda_beginAllocateCurrentThreadToPool(0, self.ids[pool])
            case ["v", pool]:
                allocator._cuda_endAllocateToPool(0, self.ids[pool])
                allocator._cuda_releasePool(0, self.ids[pool])
            case ["g", graph, pool, stream]:
                self.use(self.stream(stream))
                self.graphs[graph] = torch.cuda.CUDAGraph()
                self.graphs[graph].capture_begin(self._handle(pool), "relaxed")
            case ["h", graph, stream]:
                self.use(self.stream(stream))
                self.graphs[graph].capture_end()
            case ["x", graph]:
                del self.graphs[graph]
            case ["j", stream, origin]:
                self.stream(stream).wait_stream(self.stream(origin))
            case _:
                return super().step(event)
        return NOTHING

    def _handle(self, pool: int) -> tuple[int, int] | None:
        """What to capture into: a known pool, or a new one, every second of which the graph makes for itself."""
        if pool in self.ids:
            return self.ids[pool]
        if pool % 2:
            self.ids[pool] = torch.cuda.graph_pool_handle()
            return self.ids[pool]
        self.own_pools += 1
        self.ids[pool] = (self.own_pools, 0)
        return None

    def row(self) -> list[int]:
        return [*super().row(), zlib.crc32(json.dumps(self.segments(), separators=(",", ":")).encode())]

    def segments(self) -> list[Any]:
        streams = {stream.cuda_stream: index for index, stream in self.streams.items()}
        pools = {identity: pool for pool, identity in self.ids.items()} | {(0, 0): 0}
        return sorted(
            [
                self.address(segment["address"]),
                segment["total_size"],
                streams[segment["stream"]],
                segment["segment_type"],
                int(segment["is_expandable"]),
                pools[tuple(segment["segment_pool_id"])],
                [
                    [block["size"], 0 if block["state"] == "inactive" else block["requested_size"], block["state"]]
                    for block in segment["blocks"]
                ],
            ]
            for segment in torch.cuda.memory_snapshot()
        )


def record(name: str) -> dict[str, Any]:
    """The document of a sequence of :data:`TRACES`."""
    seed, count, kind, environment = TRACES[name]
    for key, value in environment.items():
        assert os.environ.get(key) == value, f"run with {key}={value}"
    events = Script(seed, kind).run(count)
    allocator = PoolAllocator()
    rows = [[allocator.step(event), *allocator.row()] for event in events]
    stats = torch.cuda.memory_stats(0)
    return {
        "config": {key: value for key, value in configuration().items() if key != "cuda"},
        "ev": events,
        "d": {
            name: differences(column)
            for name, column in zip([*COLUMNS, "snapshot"], zip(*rows, strict=True), strict=True)
        },
        "pool_ids": {f"{first}_{second}": pool for pool, (first, second) in allocator.ids.items()},
        "peaks": {name: value for name, value in stats.items() if name.endswith(".peak")},
        "final": {name: value for name, value in stats.items() if not name.endswith(".peak")},
        "phys_peak": stub.counter("peak"),
        "oom_messages": allocator.messages,
        "snapshot": allocator.segments(),
    }


if __name__ == "__main__":
    data = json.dumps(record(sys.argv[1]), separators=(",", ":")).encode()
    (Path(sys.argv[2]) / f"{sys.argv[1]}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))
    # Everything is still held: leave without destructors, whose order at exit is nobody's business.
    sys.stdout.flush()
    os._exit(0)
