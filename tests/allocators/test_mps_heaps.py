"""PyTorch's heaps on Apple's cards: each rule of ``MPSAllocator.h`` and ``MPSAllocator.mm``, through behaviour."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.mps_heaps import MPSHeaps, Watermarks, heap_bytes
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.units import GIB, MIB
from tests.support.examples import examples


@pytest.mark.parametrize(
    ("size", "heap"),
    [(9, 8 * MIB), (MIB, 8 * MIB), (MIB + 1, 32 * MIB), (10 * MIB - 256, 32 * MIB), (10 * MIB, GIB),
     (512 * MIB - 256, GIB), (512 * MIB, 512 * MIB), (513 * MIB, 514 * MIB), (2 * GIB + 1, 2 * GIB + 2 * MIB)],
)  # fmt: skip
def test_the_first_buffer_of_a_size_makes_a_heap_of_its_class(size: int, heap: int) -> None:
    allocator = MPSHeaps()
    allocator.malloc(size)
    assert allocator.reserved_bytes == heap


def test_buffers_are_multiples_of_256_bytes_and_nothing_takes_nothing() -> None:
    allocator = MPSHeaps()
    allocator.malloc(257)
    assert allocator.allocated_bytes == 512
    assert allocator.malloc(0) is None
    allocator.free(None)
    assert allocator.allocated_bytes == 512


def test_scalars_have_a_heap_apart_where_the_rest_is_in_private_memory() -> None:
    for apart, reserved in ((True, 16 * MIB), (False, 8 * MIB)):
        allocator = MPSHeaps(scalars_apart=apart)
        allocator.malloc(8)
        allocator.malloc(9)
        assert allocator.reserved_bytes == reserved


def test_small_and_large_buffers_never_share_a_heap() -> None:
    allocator = MPSHeaps()
    allocator.malloc(20 * MIB)
    allocator.malloc(MIB)
    assert sorted(segment.kind for segment in allocator.segments()) == ["large", "small"]


def test_buffers_share_a_heap_until_it_is_full() -> None:
    allocator = MPSHeaps()
    for _ in range(8):
        allocator.malloc(MIB)
    assert allocator.reserved_bytes == 8 * MIB
    allocator.malloc(256)
    assert allocator.reserved_bytes == 16 * MIB


def test_a_freed_buffer_is_kept_whole_and_serves_smaller_requests() -> None:
    allocator = MPSHeaps()
    first = allocator.malloc(30 * MIB)
    allocator.free(first)
    assert allocator.reserved_bytes == GIB
    assert allocator.malloc(11 * MIB) is first
    assert allocator.allocated_bytes == 30 * MIB


def test_a_buffer_more_than_32_mib_too_large_is_not_reused() -> None:
    """It stays where its heap has room beside it."""
    allocator = MPSHeaps()
    first = allocator.malloc(60 * MIB)
    allocator.free(first)
    assert allocator.malloc(28 * MIB) is first
    allocator.free(first)
    assert allocator.malloc(28 * MIB - 256) is not first
    assert allocator.allocated_bytes == 28 * MIB - 256
    assert allocator.reserved_bytes == GIB


def test_a_far_too_large_buffer_makes_room_where_no_heap_has_any() -> None:
    allocator = MPSHeaps()
    allocator.free(allocator.malloc(600 * MIB))
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 600 * MIB  # the same heap, cut anew
    (segment,) = allocator.segments()
    assert [block.size for block in segment.blocks] == [20 * MIB, 580 * MIB]


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    allocator = MPSHeaps()
    buffers = [allocator.malloc(size * MIB) for size in (30, 20, 25)]
    for buffer in buffers:
        allocator.free(buffer)
    assert allocator.malloc(21 * MIB) is buffers[2]


def test_the_high_watermark_counts_whole_heaps_and_what_others_hold() -> None:
    allocator = MPSHeaps(20 * MIB, Watermarks(1.0, 0.0), other_bytes=3 * MIB)
    allocator.malloc(MIB)  # 8 + 3 of 20 MiB
    allocator.malloc(9 * MIB)  # allowed: 11 + 9; the heap itself is larger, and nobody asks
    assert allocator.reserved_bytes == 40 * MIB
    with pytest.raises(DeviceOutOfMemory, match=r"max allowed: 20\.00 MiB"):
        allocator.malloc(256)


def test_without_a_high_watermark_nothing_is_refused() -> None:
    allocator = MPSHeaps(MIB, Watermarks(0.0, 0.0))
    allocator.malloc(100 * GIB)
    assert allocator.reserved_bytes == 100 * GIB


def test_the_limit_is_1_7_times_the_working_set_by_default() -> None:
    assert MPSHeaps(10 * GIB).high_limit == 17 * GIB
    assert MPSHeaps(10 * GIB).low_limit == 14 * GIB


def test_cached_buffers_go_back_before_a_request_fails() -> None:
    allocator = MPSHeaps(1200 * MIB, Watermarks(1.0, 0.0))
    allocator.free(allocator.malloc(600 * MIB))
    allocator.malloc(700 * MIB)
    assert allocator.reserved_bytes == 700 * MIB
    assert allocator.num_alloc_retries == 1


def test_all_pools_are_emptied_where_one_is_not_enough() -> None:
    allocator = MPSHeaps(1200 * MIB, Watermarks(1.0, 0.0))
    allocator.free(allocator.malloc(MIB))
    allocator.free(allocator.malloc(600 * MIB))
    allocator.malloc(1200 * MIB)
    assert allocator.reserved_bytes == 1200 * MIB


def test_under_pressure_a_buffer_gets_a_heap_of_its_own() -> None:
    assert heap_bytes(20 * MIB, under_pressure=True) == (20 * MIB, False)
    allocator = MPSHeaps(1000 * MIB, Watermarks(2.0, 1.0))
    allocator.malloc(1000 * MIB)
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 1020 * MIB


def test_pressure_begins_within_a_mebibyte_of_the_low_watermark() -> None:
    for taken, reserved in ((998, 998 + 1024), (1000, 1020)):
        allocator = MPSHeaps(1000 * MIB, Watermarks(2.0, 1.0))
        allocator.malloc(taken * MIB)
        allocator.malloc(20 * MIB)
        assert allocator.reserved_bytes == reserved * MIB


def test_garbage_is_what_was_passed_over_most_down_to_the_low_watermark() -> None:
    allocator = MPSHeaps(2000 * MIB, Watermarks(2.0, 1.0))
    old = allocator.malloc(600 * MIB)
    allocator.free(old)
    young = allocator.malloc(700 * MIB)  # passes the old one over
    allocator.malloc(900 * MIB)
    allocator.free(young)
    assert allocator.reserved_bytes == 2200 * MIB
    allocator.malloc(800 * MIB)  # under pressure, with 1300 MiB in the cache
    sizes = sorted(segment.total_size // MIB for segment in allocator.segments())
    assert sizes == [700, 800, 900]


def test_without_a_low_watermark_nothing_is_collected() -> None:
    allocator = MPSHeaps(2000 * MIB, Watermarks(2.0, 0.0))
    for size in (600, 700, 900):
        allocator.free(allocator.malloc(size * MIB))
    allocator.malloc(1200 * MIB)
    assert allocator.reserved_bytes == 3400 * MIB


@pytest.mark.parametrize(("high", "low"), [(2.1, 1.0), (-0.1, 0.0), (0.8, 1.4), (1.0, -1.0), (float("nan"), 0.0)])
def test_ratios_that_pytorch_refuses_are_refused(high: float, low: float) -> None:
    with pytest.raises(UsageError, match="WATERMARK_RATIO is"):
        Watermarks(high, low)


def test_freeing_twice_is_an_error() -> None:
    allocator = MPSHeaps()
    buffer = allocator.malloc(1)
    allocator.free(buffer)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(buffer)


@settings(max_examples=examples(60), deadline=None)
@given(sizes=st.lists(st.integers(1, 40 * MIB), max_size=40))
def test_reserved_bytes_are_whole_heaps_and_a_repeated_step_takes_no_more(sizes: list[int]) -> None:
    """What one step left in the cache serves the next, which asks the same in the same order."""
    allocator = MPSHeaps()
    reserved = []
    for _ in range(3):
        live = [allocator.malloc(size) for size in sizes]
        assert allocator.allocated_bytes >= sum(sizes)
        for buffer in live:
            allocator.free(buffer)
        reserved.append(allocator.reserved_bytes)
        assert allocator.reserved_bytes % (2 * MIB) == 0
    assert reserved[1] == reserved[2]
