"""What every allocator must obey, whatever it decides: random runs under an independent judge."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.base import Allocator, BlockView, PoolAllocator, SegmentView
from graphmem.allocators.bfc import BumpDriver
from graphmem.allocators.cuda_driver import AddressPolicy, CudaDriver, LowestHole
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import DeviceOutOfMemory
from graphmem.units import KIB, MIB
from tests.support.addresses import HighestHole, NeverReused
from tests.support.checked_allocator import CheckedAllocator, InvalidHeapError, validate_segments
from tests.support.examples import examples

Factory = Callable[[], Allocator]


def _pytorch(
    conf: str = "",
    version: tuple[int, int] = (2, 13),
    addresses: Callable[[], AddressPolicy] = LowestHole,
    **driver: Any,
) -> Factory:
    return lambda: PyTorchCachingAllocator(
        conf=parse_alloc_conf(conf, version),
        torch_version=version,
        driver=CudaDriver(addresses=addresses(), **driver),
    )


FACTORIES: dict[str, Factory] = {
    "ideal": IdealAllocator,
    "ideal, 100 MiB": lambda: IdealAllocator(100 * MIB),
    "pytorch": PyTorchCachingAllocator,
    "pytorch, statistics": lambda: PyTorchCachingAllocator(track_stats=True),
    "pytorch 2.11, 100 MiB": _pytorch(version=(2, 11), capacity_bytes=100 * MIB),
    "pytorch, 100 MiB, 30 MiB of others": _pytorch(capacity_bytes=100 * MIB, other_bytes=30 * MIB),
    "pytorch, events that never complete": _pytorch(capacity_bytes=100 * MIB, event_lag=None),
    "pytorch, late events": _pytorch(event_lag=3, synchronize_completes_events=False),
    "pytorch, falling addresses": _pytorch(capacity_bytes=100 * MIB, addresses=HighestHole),
    "pytorch, new addresses": _pytorch(capacity_bytes=100 * MIB, addresses=NeverReused),
    "pytorch, expandable": _pytorch("expandable_segments:True"),
    "pytorch, expandable, 100 MiB": _pytorch("expandable_segments:True", capacity_bytes=100 * MIB, event_lag=2),
    "pytorch, max_split_size": _pytorch("max_split_size_mb:20", capacity_bytes=150 * MIB),
    "pytorch, garbage collection": _pytorch(
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9", capacity_bytes=150 * MIB
    ),
    "pytorch, rejecting": _pytorch("throw_on_cudamalloc_oom:True", capacity_bytes=150 * MIB),
    "pytorch, divisions": _pytorch("roundup_power2_divisions:[1:8,2:4,>:2]"),
    "pytorch, segments of 33 MiB": _pytorch("large_segment_size_mb:33", capacity_bytes=150 * MIB),
    "pytorch, expandable by 33 MiB": _pytorch("expandable_segments:True,large_segment_size_mb:33", event_lag=1),
}


def _add_if_there(name: str, module: str, make: Callable[[Any], Allocator]) -> None:
    """Allocators of other runtimes join the list when their module is there."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return
    FACTORIES[name] = lambda: make(found)


def _arena(strategy: int, limit: int) -> Callable[[Any], Allocator]:
    return lambda module: module.BFCArena(
        module.ArenaConfig(max_mem=limit, arena_extend_strategy=module.ExtendStrategy(strategy))
    )


_add_if_there("onnxruntime", "graphmem.allocators.onnxruntime_arena", _arena(0, 0))
_add_if_there("onnxruntime, as requested", "graphmem.allocators.onnxruntime_arena", _arena(1, 0))
_add_if_there("onnxruntime, 100 MiB", "graphmem.allocators.onnxruntime_arena", _arena(0, 100 * MIB))


def _bfc(limit: int, capacity: int | None = None, **options: Any) -> Callable[[Any], Allocator]:
    def make(module: Any) -> Allocator:
        driver = BumpDriver(capacity)
        allocator: Allocator = module.TensorFlowBFC(
            limit, module.BFCOptions(**options), driver_alloc=driver.alloc, driver_free=driver.free
        )
        return allocator

    return make


_add_if_there("tensorflow", "graphmem.allocators.tensorflow_bfc", _bfc(1 << 40))
_add_if_there("tensorflow, growth", "graphmem.allocators.tensorflow_bfc", _bfc(1 << 40, allow_growth=True))
_add_if_there("tensorflow, 100 MiB", "graphmem.allocators.tensorflow_bfc", _bfc(100 * MIB, 90 * MIB))
_add_if_there(
    "tensorflow, growth, 100 MiB", "graphmem.allocators.tensorflow_bfc", _bfc(100 * MIB, 95 * MIB, allow_growth=True)
)
_add_if_there(
    "tensorflow, growth, no garbage collection, 1 %",
    "graphmem.allocators.tensorflow_bfc",
    _bfc(100 * MIB, allow_growth=True, garbage_collection=False, fragmentation_fraction=0.01),
)
_add_if_there("mxnet", "graphmem.allocators.mxnet_pooled", lambda module: module.MXNetPooledStorage())
_add_if_there(
    "mxnet, rounding, 100 MiB",
    "graphmem.allocators.mxnet_pooled",
    lambda module: module.MXNetPooledStorage(module.PoolConfig("Round"), capacity_bytes=100 * MIB, other_bytes=5 * MIB),
)
_add_if_there("mps", "graphmem.allocators.mps_heaps", lambda module: module.MPSHeaps())
_add_if_there(
    "mps, 100 MiB, 5 MiB of others",
    "graphmem.allocators.mps_heaps",
    lambda module: module.MPSHeaps(100 * MIB, module.Watermarks(1.0, 0.5), other_bytes=5 * MIB, scalars_apart=False),
)

SIZES = st.one_of(
    st.sampled_from([0, 1, 511, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 21 * MIB]),
    st.integers(1, 64 * KIB),
    st.integers(64 * KIB, 2 * MIB),
    st.integers(2 * MIB, 40 * MIB),
)
#: An operation: allocate (size, stream), or free / record a stream on one of the live blocks, or a whole-device call.
OPERATIONS = st.one_of(
    st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("malloc"), SIZES, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 30), st.just(0)),
    st.tuples(st.just("free"), st.just(-1), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 30), st.integers(0, 2)),
    st.tuples(st.sampled_from(["synchronize", "empty_cache"]), st.just(0), st.just(0)),
)


def _drive(
    allocator: CheckedAllocator, operations: list[tuple[str, int, int]], live: list[Any] | None = None
) -> list[Any]:
    """Do the operations on the handles that are ``live``, and return those that live afterwards."""
    live = [] if live is None else live
    for name, number, stream in operations:
        if name == "malloc":
            with suppress(DeviceOutOfMemory):
                live.append(allocator.malloc(number, stream))
        elif name == "synchronize":
            allocator.synchronize()
        elif name == "empty_cache":
            allocator.empty_cache()
        elif live:
            position = number % len(live)
            if name == "free":
                allocator.free(live.pop(position))
            else:
                allocator.record_stream(live[position], stream)
    return live


@pytest.mark.parametrize("name", FACTORIES)
@settings(max_examples=examples(60), deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=60))
def test_a_random_run_keeps_the_heap_valid(name: str, operations: list[tuple[str, int, int]]) -> None:
    allocator = CheckedAllocator(FACTORIES[name]())
    for handle in _drive(allocator, operations):
        allocator.free(handle)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize("name", FACTORIES)
@settings(max_examples=examples(20), deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_the_same_run_gives_the_same_heap(name: str, operations: list[tuple[str, int, int]]) -> None:
    first, second = CheckedAllocator(FACTORIES[name]()), CheckedAllocator(FACTORIES[name]())
    _drive(first, operations)
    _drive(second, operations)
    assert first.segments() == second.segments()


@pytest.mark.parametrize(
    "name", [name for name in FACTORIES if name.startswith(("pytorch", "ideal", "mxnet")) or name == "mps"]
)
@settings(max_examples=examples(20), deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=40))
def test_nothing_stays_reserved_once_all_is_freed_and_the_cache_emptied(
    name: str, operations: list[tuple[str, int, int]]
) -> None:
    allocator = CheckedAllocator(FACTORIES[name]())
    for handle in _drive(allocator, operations):
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments()) == (0, ())


#: Operations on private pools 1 to 3, of which 1 serves others when memory runs out and 2 does not split.
POOL_OPERATIONS = st.one_of(
    OPERATIONS,
    st.tuples(st.just("malloc_in_pool"), SIZES, st.integers(1, 3)),
    st.tuples(st.sampled_from(["hold", "let go", "enter", "leave", "empty_pool"]), st.integers(1, 3), st.just(0)),
    st.tuples(st.sampled_from(["enter_capture", "leave_capture"]), st.just(0), st.just(0)),
)
POOLED = [name for name in FACTORIES if name.startswith("pytorch")]


class _Pools:
    """Drives private pools; leaves out what a program cannot do."""

    def __init__(self, allocator: CheckedAllocator) -> None:
        self.allocator = allocator
        self.live: list[Any] = []
        self.holds = {1: 0, 2: 0, 3: 0}
        self.routed: set[int] = set()
        self.captured = False
        for pool in self.holds:
            allocator.pool_call("declare_pool", pool, use_on_oom=pool == 1, no_split=pool == 2)

    def run(self, operations: list[tuple[str, int, int]]) -> None:
        for name, number, other in operations:
            match name:
                case "malloc_in_pool" if self.holds[other]:
                    with suppress(DeviceOutOfMemory):
                        self.live.append(self.allocator.malloc_in_pool(number, 0, other))
                case "hold":
                    self.allocator.pool_call("create_or_incref_pool", number)
                    self.holds[number] += 1
                case "let go" if self.holds[number] > (number in self.routed):
                    self.allocator.pool_call("release_pool", number)
                    self.holds[number] -= 1
                case "enter" if number not in self.routed:
                    self.allocator.pool_call("begin_allocate_to_pool", number)
                    self.holds[number] += 1
                    self.routed.add(number)
                case "leave" if number in self.routed:
                    self.allocator.pool_call("end_allocate_to_pool", number)
                    self.routed.remove(number)
                case "empty_pool" if not self.captured:
                    self.allocator.pool_call("empty_pool", number)
                case "enter_capture" | "leave_capture":
                    self.allocator.pool_call(name)
                    self.captured = name == "enter_capture"
                case "malloc" | "free" | "record" | "synchronize" | "empty_cache":
                    _drive(self.allocator, [(name, number, other)], self.live)

    def end(self) -> None:
        """Let everything go."""
        self.allocator.pool_call("leave_capture")
        for handle in self.live:
            self.allocator.free(handle)
        for pool in sorted(self.routed):
            self.allocator.pool_call("end_allocate_to_pool", pool)
        for pool, holds in self.holds.items():
            for _ in range(holds):
                self.allocator.pool_call("release_pool", pool)


@pytest.mark.parametrize("name", POOLED)
@settings(max_examples=examples(40), deadline=None)
@given(operations=st.lists(POOL_OPERATIONS, max_size=60))
def test_private_pools_keep_the_heap_valid_and_give_everything_back(
    name: str, operations: list[tuple[str, int, int]]
) -> None:
    pools = _Pools(CheckedAllocator(FACTORIES[name]()))
    pools.run(operations)
    pools.end()
    pools.allocator.empty_cache()
    assert (pools.allocator.reserved_bytes, pools.allocator.segments()) == (0, ())


@pytest.mark.parametrize("name", POOLED)
def test_a_held_pool_keeps_its_segments_and_serves_nobody_else(name: str) -> None:
    allocator = FACTORIES[name]()
    assert isinstance(allocator, PoolAllocator)
    allocator.create_or_incref_pool(1)
    allocator.free(allocator.malloc_in_pool(3 * MIB, 0, 1))
    held = allocator.reserved_bytes
    allocator.empty_cache()
    assert allocator.reserved_bytes == held > 0
    allocator.malloc(3 * MIB)
    assert allocator.reserved_bytes > held
    assert {segment.pool for segment in allocator.segments()} == {0, 1}
    allocator.release_pool(1)
    allocator.empty_cache()
    assert {segment.pool for segment in allocator.segments()} == {0}


def _segment(*blocks: BlockView, address: int = 0, total: int | None = None) -> SegmentView:
    size = sum(block.size for block in blocks) if total is None else total
    return SegmentView(address, size, 0, "large", False, blocks)


VALID = (_segment(BlockView(0, 512, 100, "allocated"), BlockView(512, 1024, 0, "free")),)


@pytest.mark.parametrize(
    ("segments", "allocated", "reserved", "reason"),
    [
        (VALID, 100, 1536, "allocated_bytes"),
        (VALID, 512, 1535, "reserved_bytes"),
        ((*VALID, _segment(BlockView(1024, 512, 0, "free"), address=1024)), 512, 2048, "overlap"),
        ((_segment(BlockView(0, 512, 0, "free"), BlockView(1024, 512, 0, "free")),), 0, 1024, "comes next"),
        ((_segment(BlockView(0, 512, 0, "free"), BlockView(256, 512, 0, "free")),), 0, 1024, "comes next"),
        ((_segment(BlockView(0, 512, 0, "free"), total=1024),), 0, 1024, "do not fill"),
        ((_segment(BlockView(0, 512, 513, "allocated")),), 512, 512, "does not fit"),
        ((_segment(BlockView(0, 512, 1, "free")),), 0, 512, "holds a request"),
        ((_segment(BlockView(0, 512, 0, "lost")),), 0, 512, "unknown state"),
        ((_segment(BlockView(0, 0, 0, "free")),), 0, 0, "empty"),
    ],
)
def test_the_judge_sees_broken_heaps(
    segments: tuple[SegmentView, ...], allocated: int, reserved: int, reason: str
) -> None:
    validate_segments(VALID, allocated_bytes=512, reserved_bytes=1536)
    with pytest.raises(InvalidHeapError, match=reason):
        validate_segments(segments, allocated_bytes=allocated, reserved_bytes=reserved)


class Overlapping(IdealAllocator):
    """Hands out the same address twice."""

    def malloc(self, size: int, stream: int = 0) -> Any:
        self._next_address = 0
        return super().malloc(size, stream)


class Hoarding(IdealAllocator):
    """Does not free."""

    def free(self, handle: Any) -> None:
        self.record_stream(handle, 0)


def test_the_judge_sees_broken_allocators() -> None:
    overlapping = CheckedAllocator(Overlapping())
    overlapping.malloc(1)
    with pytest.raises(InvalidHeapError, match="overlap"):
        overlapping.malloc(1)
    hoarding = CheckedAllocator(Hoarding())
    with pytest.raises(InvalidHeapError, match="other blocks"):
        hoarding.free(hoarding.malloc(1))
    twice = CheckedAllocator(IdealAllocator())
    handle = twice.malloc(1)
    twice.free(handle)
    with pytest.raises(InvalidHeapError, match="twice"):
        twice.free(handle)


@pytest.mark.parametrize("factory", [IdealAllocator, PyTorchCachingAllocator])
def test_freeing_twice_is_an_error_in_itself(factory: Factory) -> None:
    allocator = factory()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(handle)
