"""Record private pools of PyTorch's own CUDA caching allocator, on the stub driver.

    python -m tests.recorded pools record [NAME ...]

Events (a pool is a number from 1 on; a graph is a number; streams as in the other recordings):

    a ID SIZE STREAM    allocate on a stream            f ID           free
    r ID STREAM         record_stream                   s, e           synchronize, empty_cache
    m POOL OOM NOSPLIT  MemPool(use_on_oom, no_split)   d POOL         delete that MemPool
    u POOL, v POOL      enter, leave use_mem_pool
    g GRAPH POOL STREAM CUDAGraph().capture_begin on a stream, into POOL (a new pool's number if it is not known)
    h GRAPH STREAM      capture_end on that stream      x GRAPH        drop the graph
    j STREAM FROM       STREAM waits for FROM, and so joins its capture

After every event 15 columns of state as in the other recordings, and the checksum of ``memory_snapshot``.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import random
import sys
import zlib
from pathlib import Path
from typing import Any

MIB = 1 << 20
COLUMNS = [
    *("addr", "allocated", "active", "reserved", "inactive_split", "requested", "n_alloc", "n_active", "n_segment"),
    *("n_inactive_split", "retries", "ooms", "dev_alloc", "dev_free", "phys", "snapshot"),
]
SIZES = (1, 512, 1000, 4096, 100_000, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 33 * MIB, 70 * MIB)

#: name: (seed, events, kinds of events that are frequent, environment)
TRACES: dict[str, tuple[int, int, str, dict[str, str]]] = {}
for _seed in range(4):
    TRACES[f"pools{_seed}"] = (_seed, 300, "pools", {})
    TRACES[f"graphs{_seed}"] = (10 + _seed, 300, "graphs", {})
    TRACES[f"mixed{_seed}"] = (20 + _seed, 400, "mixed", {"FAKE_CUDA_EVENT_LAG": str(2 * _seed)})
for _name, _conf in (
    ("expandable", "expandable_segments:True"),
    ("maxsplit", "max_split_size_mb:32"),
    ("pow2", "roundup_power2_divisions:8"),
    ("gc", "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9"),
    ("reject", "per_process_memory_fraction:0.7,throw_on_cudamalloc_oom:True"),
    ("largeseg", "large_segment_size_mb:40"),
):
    for _seed in (1, 2) if _name == "reject" else (0, 1):
        environment = {"PYTORCH_ALLOC_CONF": _conf, "FAKE_CUDA_EVENT_LAG": str(_seed)}
        TRACES[f"{_name}{_seed}"] = (40 + _seed, 300, "mixed", environment | {"FAKE_CUDA_TOTAL_MIB": "900"})
for _seed in range(2):
    conf = {"PYTORCH_ALLOC_CONF": "throw_on_cudamalloc_oom:True", "FAKE_CUDA_TOTAL_MIB": "400"}
    TRACES[f"reject_all{_seed}"] = (100 + _seed, 300, "overflow", conf)
# Seeds whose captures begin with memory to spare: one that cannot take its generator's state leaves its route behind.
for _seed in (0, 3, 4, 7):
    TRACES[f"oom{_seed}"] = (60 + _seed, 300, "oom", {"FAKE_CUDA_TOTAL_MIB": "400"})
for _seed in range(4):
    TRACES[f"overflow{_seed}"] = (70 + _seed, 300, "overflow", {"FAKE_CUDA_TOTAL_MIB": "300"})
for _seed in range(2):
    conf = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "FAKE_CUDA_TOTAL_MIB": "400"}
    TRACES[f"expandable_oom{_seed}"] = (80 + _seed, 300, "overflow", conf)
    TRACES[f"falling{_seed}"] = (90 + _seed, 300, "mixed", {"FAKE_CUDA_VA": "down", "FAKE_CUDA_TOTAL_MIB": "500"})

#: What happens how often: allocate, free, record, synchronize, empty, and for pools, routes and graphs.
WEIGHTS = {
    "pools": {"a": 40, "f": 25, "r": 3, "s": 1, "e": 4, "m": 3, "d": 3, "u": 8, "v": 8},
    "graphs": {"a": 40, "f": 25, "r": 4, "s": 1, "e": 4, "g": 8, "h": 8, "x": 3, "j": 2},
    "mixed": {"a": 40, "f": 25, "r": 6, "s": 1, "e": 4, "m": 2, "d": 2, "u": 5, "v": 5}
    | {"g": 5, "h": 5, "x": 2, "j": 2},
}
WEIGHTS["oom"] = WEIGHTS["mixed"] | {"a": 70}
WEIGHTS["overflow"] = WEIGHTS["pools"] | {"a": 60}


class Script:
    """Random events that a program may do; keeps just enough state to leave out what PyTorch refuses."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.events: list[list[Any]] = []
        self.live: list[int] = []
        self.allocated = 0
        self.pools: list[int] = []  # MemPools held by the program
        self.known = 0  # pools so far, those of graphs included
        self.routed: list[tuple[int, str]] = []  # active routes: pool, and u or g
        self.graphs: dict[int, tuple[int, int]] = {}  # finished graphs: pool, and the stream
        self.capturing: dict[int, tuple[int, int]] = {}  # graph: pool, stream
        self.count = 0

    def run(self, events: int) -> list[list[Any]]:
        weights = WEIGHTS[self.kind]
        while len(self.events) < events:
            name = self.random.choices(list(weights), list(weights.values()))[0]
            event = getattr(self, f"do_{name}")()
            if event is not None:
                self.events.append(event)
        return self.events

    def _size(self) -> int:
        size = self.random.choice(SIZES)
        return max(1, size - self.random.choice((0, 0, 1, size // 3)))

    def do_a(self) -> list[Any]:
        self.allocated += 1
        self.live.append(self.allocated)
        streams = [stream for _, stream in self.capturing.values()] * 3 or [0, 0, 0]
        return ["a", self.allocated, self._size(), self.random.choice([*streams, 0, 1, 2])]

    def do_f(self) -> list[Any] | None:
        if not self.live:
            return None
        return ["f", self.live.pop(self.random.randrange(len(self.live)))]

    def do_r(self) -> list[Any] | None:
        return ["r", self.random.choice(self.live), self.random.randrange(3)] if self.live else None

    def do_s(self) -> list[Any] | None:
        return None if self.capturing else ["s"]

    def do_e(self) -> list[Any]:
        return ["e"]

    def do_m(self) -> list[Any] | None:
        if len(self.pools) >= 3:
            return None
        self.known += 1
        self.pools.append(self.known)
        # One pool at a time serves as an overflow: with several, the order is that of a hash table.
        overflow = self.kind == "overflow" and len(self.pools) == 1
        return ["m", self.known, int(overflow), int(self.random.random() < 0.2)]

    def do_d(self) -> list[Any] | None:
        busy = {pool for pool, _ in self.routed} | {pool for pool, _ in self.graphs.values()}
        free = [pool for pool in self.pools if pool not in busy]
        if not free or self.capturing:
            return None
        pool = self.random.choice(free)
        self.pools.remove(pool)
        return ["d", pool]

    def _routable(self) -> int | None:
        free = [pool for pool in self.pools if pool not in {routed for routed, _ in self.routed}]
        return self.random.choice(free) if free else None

    def do_u(self) -> list[Any] | None:
        pool = self._routable()
        if pool is None:
            return None
        self.routed.append((pool, "u"))
        return ["u", pool]

    def do_v(self) -> list[Any] | None:
        ends = [route for route in self.routed if route[1] == "u"]
        if not ends:
            return None
        route = self.random.choice(ends[-2:])
        self.routed.remove(route)
        return ["v", route[0]]

    def do_g(self) -> list[Any] | None:
        if self.capturing:  # one capture at a time, as PyTorch asks
            return None
        busy = {stream for _, stream in self.capturing.values()}
        stream = self.random.choice([stream for stream in (1, 2, 3) if stream not in busy])
        routed = {pool for pool, _ in self.routed}
        shared = [pool for pool, _ in self.graphs.values() if pool not in routed]
        shared += [pool for pool in self.pools if pool not in routed]
        if shared and self.random.random() < 0.5:
            pool = self.random.choice(shared)
        else:
            self.known += 1
            pool = self.known
        self.count += 1
        self.capturing[self.count] = (pool, stream)
        self.routed.append((pool, "g"))
        return ["g", self.count, pool, stream]

    def do_h(self) -> list[Any] | None:
        if not self.capturing:
            return None
        graph = self.random.choice(list(self.capturing))
        self.graphs[graph] = self.capturing.pop(graph)
        self.routed.remove((self.graphs[graph][0], "g"))
        return ["h", graph, self.graphs[graph][1]]

    def do_x(self) -> list[Any] | None:
        # Dropping a graph during another capture is refused by a real driver.
        if not self.graphs or self.capturing:
            return None
        graph = self.random.choice(list(self.graphs))
        del self.graphs[graph]
        return ["x", graph]

    def do_j(self) -> list[Any] | None:
        if not self.capturing:
            return None
        _, origin = self.random.choice(list(self.capturing.values()))
        busy = {stream for _, stream in self.capturing.values()}
        others = [stream for stream in (1, 2, 3) if stream not in busy]
        return ["j", self.random.choice(others), origin] if others else None


class Recorder:
    """Does the events with PyTorch, and looks at its allocator after each."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.driver = ctypes.CDLL(None)
        for name in ("used", "peak", "base", "vbase"):
            getattr(self.driver, f"fake_cuda_{name}").restype = ctypes.c_ulonglong
        self.streams = {0: torch.cuda.default_stream()}
        self.live: dict[int, Any] = {}
        self.pools: dict[int, Any] = {}
        self.graphs: dict[int, Any] = {}
        self.ids: dict[int, tuple[int, int]] = {}
        self.own_pools = 0
        self.messages: list[str] = []

    def stream(self, index: int) -> Any:
        while index not in self.streams:
            self.streams[len(self.streams)] = self.torch.cuda.Stream()
        return self.streams[index]

    def handle(self, pool: int) -> tuple[int, int] | None:
        """What to capture into: a known pool, or a new one, every second of which the graph makes for itself."""
        if pool in self.ids:
            return self.ids[pool]
        if pool % 2:
            self.ids[pool] = self.torch.cuda.graph_pool_handle()
            return self.ids[pool]
        self.own_pools += 1
        self.ids[pool] = (self.own_pools, 0)
        return None

    def address(self, pointer: int) -> int:
        virtual = self.driver.fake_cuda_vbase()
        return pointer - virtual if pointer >= virtual else pointer - self.driver.fake_cuda_base()

    def step(self, event: list[Any]) -> int:
        torch, allocator = self.torch, self.torch._C
        match event:
            case ["a", name, size, stream]:
                torch.cuda.set_stream(self.stream(stream))
                try:
                    self.live[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError as error:
                    self.messages.append(str(error))
                    return -1
                return self.address(self.live[name].data_ptr())
            case ["f", name]:
                self.live.pop(name, None)
            case ["r", name, stream]:
                if name in self.live:
                    self.live[name].record_stream(self.stream(stream))
            case ["s"]:
                torch.cuda.synchronize()
            case ["e"]:
                torch.cuda.empty_cache()
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
                torch.cuda.set_stream(self.stream(stream))
                self.graphs[graph] = torch.cuda.CUDAGraph()
                self.graphs[graph].capture_begin(self.handle(pool), "relaxed")
            case ["h", graph, stream]:
                torch.cuda.set_stream(self.stream(stream))
                self.graphs[graph].capture_end()
            case ["x", graph]:
                del self.graphs[graph]
            case ["j", stream, origin]:
                self.stream(stream).wait_stream(self.stream(origin))
            case _:
                raise ValueError(event)
        return -2

    def snapshot(self) -> list[Any]:
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
            for segment in self.torch.cuda.memory_snapshot()
        )

    def row(self, address: int) -> tuple[int, ...]:
        stats = self.torch._C._cuda_memoryStats(0)
        names = (
            "allocated_bytes active_bytes reserved_bytes inactive_split_bytes requested_bytes allocation active segment"
        )
        current = [stats[name]["all"]["current"] for name in [*names.split(), "inactive_split"]]
        counters = [stats[n] for n in ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")]
        checksum = zlib.crc32(json.dumps(self.snapshot(), separators=(",", ":")).encode())
        return (address, *current, *counters, self.driver.fake_cuda_used(), checksum)


def record(name: str, folder: Path) -> None:
    seed, count, kind, environment = TRACES[name]
    for key, value in environment.items():
        assert os.environ.get(key) == value, f"run with {key}={value}"
    events = Script(seed, kind).run(count)
    recorder = Recorder()
    rows = [recorder.row(recorder.step(event)) for event in events]
    stats = recorder.torch.cuda.memory_stats(0)
    pools = {f"{first}_{second}": pool for pool, (first, second) in recorder.ids.items()}
    document = {
        "config": {
            "torch": recorder.torch.__version__,
            "alloc_conf": environment.get("PYTORCH_ALLOC_CONF", ""),
            "total_mib": int(environment.get("FAKE_CUDA_TOTAL_MIB", 81920)),
            "other_mib": 0,
            "va": environment.get("FAKE_CUDA_VA", "firstfit"),
            "event_lag": int(environment.get("FAKE_CUDA_EVENT_LAG", 0)),
        },
        "ev": events,
        "d": {
            column: [value - before for before, value in zip((0, *values), values, strict=False)]
            for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)
        },
        "pool_ids": pools,
        "peaks": {key: value for key, value in stats.items() if key.endswith(".peak")},
        "final": {key: value for key, value in stats.items() if not key.endswith(".peak")},
        "phys_peak": recorder.driver.fake_cuda_peak(),
        "oom_messages": recorder.messages[:3],
        "snapshot": recorder.snapshot(),
    }
    packed = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0)
    (folder / f"{name}.json.gz").write_bytes(packed)
    # Everything is still held: leave without destructors, whose order at exit is nobody's business.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
