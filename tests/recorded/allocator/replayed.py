"""Recorded events on our allocator: what the CUDA build did in the same place, column by column."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.cuda_driver import AddressPolicy, CudaDriver, LowestHole
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import DeviceOutOfMemory
from graphmem.units import MIB
from tests.support.addresses import HighestHole, NeverReused

POLICIES: dict[str, Callable[[int], AddressPolicy]] = {
    "firstfit": LowestHole,
    "bump": NeverReused,
    "down": partial(HighestHole, span=8 << 40),  # the stub driver's
}
VIRTUAL_BASE = 1 << 50
OOM, NOTHING = -1, -2
STATES = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}


def load(path: Path) -> dict[str, Any]:
    """A recording, its columns absolute under ``columns``."""
    recording: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    recording["columns"] = {name: list(accumulate(steps)) for name, steps in recording["d"].items()}
    return recording


def allocator_for(config: dict[str, Any]) -> PyTorchCachingAllocator:
    """Ours, configured as the recorded one was."""
    major, minor = config["torch"].split(".")[:2]
    version = (int(major), int(minor))
    driver = CudaDriver(
        config["total_mib"] * MIB,
        other_bytes=config["other_mib"] * MIB,
        addresses=POLICIES[config["va"]](0),
        virtual_base=VIRTUAL_BASE,
        event_lag=config["event_lag"],
        synchronize_completes_events=False,
    )
    conf = parse_alloc_conf(config["alloc_conf"], version)
    return PyTorchCachingAllocator(conf=conf, torch_version=version, driver=driver, track_stats=True)


class Run:
    """One allocator fed with a recording's events."""

    def __init__(self, allocator: PyTorchCachingAllocator) -> None:
        self.allocator = allocator
        self.live: dict[int, Any] = {}
        self.messages: list[str] = []

    def step(self, event: list[Any]) -> int:
        """Do one event; the address it returned."""
        match event:
            case ["a", name, size, stream]:
                return self.allocate(name, lambda: self.allocator.malloc(size, stream))
            case ["f", name]:
                if name in self.live:
                    self.allocator.free(self.live.pop(name))
            case ["r", name, stream]:
                if name in self.live:
                    self.allocator.record_stream(self.live[name], stream)
            case ["s"]:
                self.allocator.synchronize()
            case ["e"]:
                self.allocator.empty_cache()
            case ["p", fraction]:
                self.allocator.set_memory_fraction(fraction)
            case ["c", text]:
                self.allocator.change_settings(text)
            case _:
                raise AssertionError(event)
        return NOTHING

    def allocate(self, name: int, malloc: Callable[[], Any]) -> int:
        """Keep what ``malloc`` returns under a name; its address, or the mark of an out-of-memory."""
        try:
            block = malloc()
        except DeviceOutOfMemory as error:
            self.messages.append(str(error))
            return OOM
        assert block is not None
        self.live[name] = block
        address: int = block.address % VIRTUAL_BASE
        return address

    def row(self, address: int) -> tuple[int, ...]:
        """The recorded columns, in their order."""
        allocator = self.allocator
        assert allocator.stats is not None
        current = allocator.stats.current
        assert allocator.allocated_bytes == current("allocated_bytes")
        return (
            address,
            allocator.allocated_bytes,
            current("active_bytes"),
            allocator.reserved_bytes,
            current("inactive_split_bytes"),
            current("requested_bytes"),
            current("allocation"),
            current("active"),
            current("segment"),
            current("inactive_split"),
            allocator.num_alloc_retries,
            allocator.num_ooms,
            allocator.num_device_alloc,
            allocator.num_device_free,
            allocator.driver.used_bytes,
        )

    def snapshot(self) -> list[Any]:
        return sorted(
            [
                segment.address % VIRTUAL_BASE,
                segment.total_size,
                segment.stream,
                segment.kind,
                segment.is_expandable,
                [(block.size, block.requested_bytes, block.state) for block in segment.blocks],
            ]
            for segment in self.allocator.segments()
        )


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


def first_difference(recording: dict[str, Any]) -> str:
    """The first event after which a column is not the recorded one; empty when none is."""
    pools = "pool_ids" in recording
    run = (PoolRun if pools else Run)(allocator_for(recording["config"]))
    expected = list(zip(*recording["columns"].values(), strict=True))
    if len(expected) != len(recording["ev"]):
        return f"{len(recording['ev'])} events, and {len(expected)} rows"
    for index, (event, wanted) in enumerate(zip(recording["ev"], expected, strict=True)):
        found = run.row(run.step(event))
        if found != wanted:
            differing = {n: (f, w) for n, f, w in zip(recording["columns"], found, wanted, strict=True) if f != w}
            return f"event {index} {event}: (ours, recorded) = {differing}"
    return ""
