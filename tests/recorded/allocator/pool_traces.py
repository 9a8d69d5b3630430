"""Random sequences of allocator events with private pools, the same from the same seed.

Events (a pool is a number from 1 on; a graph is a number; streams as in the other recordings):

    a ID SIZE STREAM    allocate on a stream            f ID           free
    r ID STREAM         record_stream                   s, e           synchronize, empty_cache
    m POOL OOM NOSPLIT  MemPool(use_on_oom, no_split)   d POOL         delete that MemPool
    u POOL, v POOL      enter, leave use_mem_pool
    g GRAPH POOL STREAM CUDAGraph().capture_begin on a stream, into POOL (a new pool's number if it is not known)
    h GRAPH STREAM      capture_end on that stream      x GRAPH        drop the graph
    j STREAM FROM       STREAM waits for FROM, and so joins its capture
"""

from __future__ import annotations

import random
from typing import Any

from graphmem.units import MIB
from tests.recorded.allocator.traces import Event

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
        self.events: list[Event] = []
        self.live: list[int] = []
        self.allocated = 0
        self.pools: list[int] = []  # MemPools held by the program
        self.known = 0  # pools so far, those of graphs included
        self.routed: list[tuple[int, str]] = []  # active routes: pool, and u or g
        self.graphs: dict[int, tuple[int, int]] = {}  # finished graphs: pool, and the stream
        self.capturing: dict[int, tuple[int, int]] = {}  # graph: pool, stream
        self.count = 0

    def run(self, events: int) -> list[Event]:
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

    def do_f(self) -> Event | None:
        if not self.live:
            return None
        return ["f", self.live.pop(self.random.randrange(len(self.live)))]

    def do_r(self) -> Event | None:
        return ["r", self.random.choice(self.live), self.random.randrange(3)] if self.live else None

    def do_s(self) -> Event | None:
        return None if self.capturing else ["s"]

    def do_e(self) -> list[Any]:
        return ["e"]

    def do_m(self) -> Event | None:
        if len(self.pools) >= 3:
            return None
        self.known += 1
        self.pools.append(self.known)
        # One pool at a time serves as an overflow: with several, the order is that of a hash table.
        overflow = self.kind == "overflow" and len(self.pools) == 1
        return ["m", self.known, int(overflow), int(self.random.random() < 0.2)]

    def do_d(self) -> Event | None:
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

    def do_u(self) -> Event | None:
        pool = self._routable()
        if pool is None:
            return None
        self.routed.append((pool, "u"))
        return ["u", pool]

    def do_v(self) -> Event | None:
        ends = [route for route in self.routed if route[1] == "u"]
        if not ends:
            return None
        route = self.random.choice(ends[-2:])
        self.routed.remove(route)
        return ["v", route[0]]

    def do_g(self) -> Event | None:
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

    def do_h(self) -> Event | None:
        if not self.capturing:
            return None
        graph = self.random.choice(list(self.capturing))
        self.graphs[graph] = self.capturing.pop(graph)
        self.routed.remove((self.graphs[graph][0], "g"))
        return ["h", graph, self.graphs[graph][1]]

    def do_x(self) -> Event | None:
        # Dropping a graph during another capture is refused by a real driver.
        if not self.graphs or self.capturing:
            return None
        graph = self.random.choice(list(self.graphs))
        del self.graphs[graph]
        return ["x", graph]

    def do_j(self) -> Event | None:
        if not self.capturing:
            return None
        _, origin = self.random.choice(list(self.capturing.values()))
        busy = {stream for _, stream in self.capturing.values()}
        others = [stream for stream in (1, 2, 3) if stream not in busy]
        return ["j", self.random.choice(others), origin] if others else None
