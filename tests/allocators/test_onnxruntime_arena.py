"""The arena's own rules, one by one, and an independent check of its books under random requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.bfc import BumpDriver, FreeChunks
from graphmem.allocators.onnxruntime_arena import ArenaConfig, BFCArena, ExtendStrategy
from graphmem.errors import DeviceOutOfMemory, UsageError
from tests.support.examples import examples

MIB = 1 << 20


def arena_with(capacity: int | None = None, **options: int) -> BFCArena:
    if "arena_extend_strategy" in options:
        options["arena_extend_strategy"] = ExtendStrategy(options["arena_extend_strategy"])
    driver = BumpDriver(capacity)
    return BFCArena(ArenaConfig(**options), driver_alloc=driver.alloc, driver_free=driver.free)  # type: ignore[arg-type]


def region_sizes(arena: BFCArena) -> list[int]:
    return [segment.total_size for segment in arena.segments() if segment.kind == "region"]


def test_growth_doubles_for_requests_that_fit() -> None:
    arena = arena_with()
    for _ in range(15):
        arena.malloc(MIB)
    assert region_sizes(arena) == [1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB]


def test_growth_follows_the_measured_sequence() -> None:
    # measured on a used 1 MiB arena: 5 MiB, 3 MiB, 300 MiB and 1 GiB ask the device for 8, 8, 512 and 1024 MiB
    arena = arena_with()
    arena.malloc(MIB)
    for size in (5, 3, 300, 1024):
        arena.malloc(size * MIB)
    assert region_sizes(arena) == [1 * MIB, 8 * MIB, 8 * MIB, 512 * MIB, 1024 * MIB]


def test_the_cap_on_doubling_does_not_hold_for_one_large_request() -> None:
    arena = arena_with()
    for _ in range(3):
        arena.malloc(3 << 30)
    assert region_sizes(arena) == [4 << 30, 4 << 30, 4 << 30]


def test_shrink_keeps_the_first_region_and_restarts_growth() -> None:
    arena = arena_with()
    handles = [arena.malloc(MIB) for _ in range(8)]
    for handle in handles:
        arena.free(handle)
    arena.empty_cache()
    assert region_sizes(arena) == [1 * MIB]
    assert arena.stats()["NumArenaShrinkages"] == 3
    assert arena.stats()["NumArenaExtensions"] == 1
    arena.malloc(MIB)
    arena.malloc(MIB)
    assert region_sizes(arena) == [1 * MIB, 2 * MIB]
    assert arena.peak_reserved_bytes == 15 * MIB


def test_shrink_keeps_what_is_in_use_and_reserved() -> None:
    arena = arena_with(arena_extend_strategy=1)
    first, second = arena.malloc(1000), arena.malloc(2000)
    arena.reserve(100)
    arena.free(first)
    arena.empty_cache()
    assert region_sizes(arena) == [2048]
    arena.free(second)
    arena.empty_cache()
    assert region_sizes(arena) == []
    assert arena.reserved_bytes == 100


def test_a_full_device_makes_the_arena_ask_for_less() -> None:
    arena = arena_with(capacity=7 * MIB)
    arena.malloc(5 * MIB)
    # 8 MiB is refused, so is 0.9 x 8 MiB = 7549952 (up to 256); 0.9 x that = 6794956.8, cut and rounded up, fits
    assert region_sizes(arena) == [6795008]
    with pytest.raises(DeviceOutOfMemory, match="Failed to allocate memory for requested buffer of size 5242880"):
        arena.malloc(5 * MIB)


def test_reserving_past_the_limit_removes_the_limit() -> None:
    arena = arena_with(max_mem=MIB)
    arena.reserve(2 * MIB)
    arena.malloc(64 * MIB)
    assert arena.reserved_bytes == 66 * MIB


def test_a_limit_refuses() -> None:
    arena = arena_with(max_mem=MIB)
    with pytest.raises(DeviceOutOfMemory, match=r"Available memory of 1048576 is smaller than .* 1048832"):
        arena.malloc(MIB + 1)


def test_nothing_is_asked_for_nothing() -> None:
    arena = arena_with()
    assert arena.malloc(0) is None
    assert arena.reserve(0) is None
    arena.free(None)
    assert arena.stats()["NumAllocs"] == 0
    assert arena.reserved_bytes == 0


def test_freeing_twice_is_refused() -> None:
    arena = arena_with()
    handle = arena.malloc(1)
    arena.free(handle)
    with pytest.raises(ValueError, match="not allocated"):
        arena.free(handle)


def test_sizes_that_would_loop_for_ever_are_refused() -> None:
    with pytest.raises(UsageError, match="initial_chunk_size_bytes is 0"):
        ArenaConfig(initial_chunk_size_bytes=0)


def check_books(arena: BFCArena, live: dict[int, int]) -> None:
    """The independent validator: blocks tile their segment, live ones are exactly ``live``, and the sums agree."""
    allocated = {}
    for segment in arena.segments():
        position = segment.address
        for left, right in zip(segment.blocks, segment.blocks[1:], strict=False):
            assert not (left.state == right.state == "free")
        for block in segment.blocks:
            assert block.address == position
            position += block.size
            if block.state == "allocated":
                assert block.requested_bytes <= block.size
                allocated[block.address] = block
        assert position == segment.address + segment.total_size
    assert {address: block.requested_bytes for address, block in allocated.items()} == live
    assert sum(block.size for block in allocated.values()) == arena.allocated_bytes
    assert sum(segment.total_size for segment in arena.segments()) == arena.reserved_bytes
    assert sum(live.values()) == arena.stats()["RequestedInUse"]


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["malloc", "reserve", "free", "shrink"]), st.integers(0, 3 * MIB), st.integers(0, 50)),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(REQUESTS, st.sampled_from([0, 1]), st.sampled_from([None, 16 * MIB]), st.sampled_from([0, 9 * MIB + 77]))
def test_the_books_agree(requests: list[tuple[str, int, int]], strategy: int, capacity: int | None, limit: int) -> None:
    arena = arena_with(capacity, arena_extend_strategy=strategy, max_mem=limit, max_dead_bytes_per_chunk=64 << 10)
    live: dict[int, int] = {}
    for kind, size, which in requests:
        if kind == "shrink":
            arena.empty_cache()
        elif kind == "free" and live:
            address = list(live)[which % len(live)]
            arena.free(address)
            del live[address]
        elif kind in ("malloc", "reserve"):
            try:
                address = getattr(arena, kind)(size)
            except DeviceOutOfMemory:
                continue
            if address is not None:
                live[address] = size
        check_books(arena, live)


def test_a_rest_of_exactly_the_dead_bytes_limit_is_split_off() -> None:
    for limit, used in ((1024, 3072), (1025, 4096)):
        arena = arena_with(initial_chunk_size_bytes=4096, max_dead_bytes_per_chunk=limit)
        arena.malloc(3072)
        assert arena.allocated_bytes == used


def test_asking_for_less_ends() -> None:
    # 0.9 x 2304 rounded up is 2304 again: without the floor of 8 KiB the arena would ask for ever
    arena = arena_with(capacity=1)
    with pytest.raises(DeviceOutOfMemory, match="requested buffer of size 256"):
        arena.malloc(1)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.integers(1, 4), st.integers(0, 40))))
def test_free_chunks_are_found_by_size_then_address(asked: list[tuple[str, int, int]]) -> None:
    free, model = FreeChunks(), set[tuple[int, int]]()
    for kind, size, address in asked:
        least = min((one for one in model if one[0] >= size), default=None)
        assert free.first(size) == least
        if kind == "add" and (size, address) not in model:
            free.add(size, address)
            model.add((size, address))
        elif kind == "remove" and model:
            gone = sorted(model)[address % len(model)]
            free.remove(*gone)
            model.remove(gone)
        elif kind == "take" and least is not None:
            free.remove(*least)
            model.remove(least)


def test_equal_free_chunks_are_not_moved_one_by_one() -> None:
    """The heap of a size stays within twice what is free, however often chunks come and go behind its first."""
    free = FreeChunks()
    for address in range(100):
        free.add(256, address)
    for _ in range(50):
        for address in range(50, 100):
            free.remove(256, address)
            free.add(256, address)
    _, heap = free._addresses[256]
    assert len(heap) <= 2 * 100 + 9
