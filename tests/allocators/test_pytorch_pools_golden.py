"""Private pools against recordings of PyTorch's own allocator: CUDA graphs and ``torch.cuda.MemPool``.

Recorded by ``tests/oracles/pytorch/pool_traces.py`` (which describes the events) with the CUDA build of PyTorch 2.13.0
on the stub driver. After every event 15 columns of state are compared, and the checksum of the whole heap: every
segment with its pool, every block with its state.
"""

from __future__ import annotations

import gzip
import json
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from tests import places
from tests.allocators.test_pytorch_allocator_golden import NOTHING, VIRTUAL_BASE, Run, allocator_for

GOLDEN = places.PYTORCH / "allocator_pools"
RECORDINGS = sorted(GOLDEN.glob("*.json.gz"))
STATES = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}


class PoolRun(Run):
    """One allocator fed with a recording's events. Requests go where PyTorch's filters would send them."""

    def __init__(self, allocator: PyTorchCachingAllocator) -> None:
        super().__init__(allocator)
        self.routes: list[tuple[int, set[int] | None]] = []  # pool, and the streams it serves (None: all)
        self.graphs: dict[int, int] = {}
        self.generator_states: dict[int, list[Any]] = {}
        self.current_stream = 0

    def step(self, event: list[Any]) -> int:
        allocator = self.allocator
        match event:
            case ["a", name, size, stream]:
                self._set_stream(stream)
                return self.allocate(name, lambda: self._malloc(size, stream))
            case ["m", pool, on_oom, no_split]:
                allocator.declare_pool(pool, use_on_oom=bool(on_oom), no_split=bool(no_split))
                allocator.create_or_incref_pool(pool)
            case ["d", pool]:
                allocator.release_pool(pool)
                allocator.empty_pool(pool)
            case ["u", pool]:
                allocator.begin_allocate_to_pool(pool)
                self.routes.append((pool, None))
            case ["v", pool]:
                allocator.end_allocate_to_pool(pool)
                allocator.release_pool(pool)
                self._end_route(pool)
            case ["g", graph, pool, stream]:
                self._set_stream(stream)
                self._begin_capture(graph, pool, stream)
            case ["h", graph, stream]:
                allocator.end_allocate_to_pool(self.graphs[graph])
                self._end_route(self.graphs[graph])
                self._set_stream(stream)
            case ["x", graph]:
                self._drop_graph(graph)
            case ["j", stream, origin]:
                for _, streams in self.routes:
                    if streams is not None and origin in streams:
                        streams.add(stream)
                self._set_stream(self.current_stream)
            case _:
                return super().step(event)
        return NOTHING

    def _malloc(self, size: int, stream: int) -> Any:
        pool = next((p for p, streams in reversed(self.routes) if streams is None or stream in streams), 0)
        return self.allocator.malloc_in_pool(size, stream, pool) if pool else self.allocator.malloc(size, stream)

    def _begin_capture(self, graph: int, pool: int, stream: int) -> None:
        # The seed and the offset of the generator, two int64 for every graph, on the default stream.
        self.generator_states[graph] = [self._malloc(8, 0), self._malloc(8, 0)]
        self.graphs[graph] = pool
        self.allocator.begin_allocate_to_pool(pool)
        self.routes.append((pool, {stream}))
        self._set_stream(stream)

    def _drop_graph(self, graph: int) -> None:
        self.allocator.release_pool(self.graphs.pop(graph))
        for handle in reversed(self.generator_states.pop(graph)):
            self.allocator.free(handle)

    def _set_stream(self, stream: int) -> None:
        self.current_stream = stream
        if any(streams is not None and stream in streams for _, streams in self.routes):
            self.allocator.enter_capture()
        else:
            self.allocator.leave_capture()

    def _end_route(self, pool: int) -> None:
        self.routes = [route for route in self.routes if route[0] != pool]

    def row(self, address: int) -> tuple[int, ...]:
        checksum = zlib.crc32(json.dumps(self.heap(), separators=(",", ":")).encode())
        return (*super().row(address), checksum)

    def heap(self) -> list[Any]:
        return sorted(
            [
                segment.address % VIRTUAL_BASE,
                segment.total_size,
                segment.stream,
                segment.kind,
                int(segment.is_expandable),
                segment.pool,
                [[block.size, block.requested_bytes, STATES[block.state]] for block in segment.blocks],
            ]
            for segment in self.allocator.segments()
        )


def _load(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    recording["columns"] = {name: list(accumulate(steps)) for name, steps in recording["d"].items()}
    return recording


def _by_number(statistics: dict[str, int], numbers: dict[str, int]) -> dict[str, int]:
    """The recorded statistics with our numbers in place of PyTorch's identities of pools."""
    prefix = "reserved_bytes_by_private_pools."
    named = {}
    for key, value in statistics.items():
        if key.startswith(prefix):
            identity, _, rest = key.removeprefix(prefix).partition(".")
            key = f"{prefix}{numbers[identity]}.{rest}"
        named[key] = value
    return named


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_column_of_every_event(path: Path) -> None:
    recording = _load(path)
    run = PoolRun(allocator_for(recording["config"]))
    expected = list(zip(*recording["columns"].values(), strict=True))
    for index, (event, wanted) in enumerate(zip(recording["ev"], expected, strict=True)):
        found = run.row(run.step(event))
        if found != wanted:
            differing = {n: (f, w) for n, f, w in zip(recording["columns"], found, wanted, strict=True) if f != w}
            pytest.fail(f"event {index} {event}: (ours, recorded) = {differing}")
    assert run.heap() == recording["snapshot"]
    statistics = run.allocator.memory_stats()
    wanted_statistics = _by_number(recording["peaks"] | recording["final"], recording["pool_ids"])
    assert {name: statistics.get(name) for name in wanted_statistics} == wanted_statistics
    assert run.allocator.driver.peak_used_bytes == recording["phys_peak"]
    messages = [message.split(" If reserved but unallocated")[0] for message in recording["oom_messages"]]
    assert run.messages[:3] == messages


def test_all_recordings_are_there() -> None:
    assert len(RECORDINGS) == 38
