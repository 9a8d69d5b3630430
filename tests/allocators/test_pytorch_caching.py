"""The caching allocator's rules one at a time, where the recordings do not reach or a person wants to read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.alloc_conf import AllocConf, parse_alloc_conf
from graphmem.allocators.base import BlockView, SegmentView
from graphmem.allocators.cuda_driver import AddressPolicy, CudaDriver, LowestHole
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import format_size, get_allocation_size, round_size
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.units import MIB
from tests.support.addresses import HighestHole, RecordedAddresses
from tests.support.examples import examples
from tests.support.restored_heap import restore


@pytest.mark.parametrize(
    ("size", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),  # the rounded size decides
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (8_519_680, 8_519_680, 20 * MIB),  # cuBLAS's workspace
        (33_554_432, 33_554_432, 32 * MIB),
        (100_000_000, 100_000_256, 96 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(size: int, rounded: int, segment: int) -> None:
    assert round_size(size, (0,) * 16) == rounded
    assert get_allocation_size(rounded, 20 * MIB) == segment
    allocator = PyTorchCachingAllocator()
    allocator.malloc(size)
    assert allocator.reserved_bytes == segment


@pytest.mark.parametrize(
    ("size", "divisions", "rounded"),
    [
        (1_228_800, 4, 1_310_720),
        (5000, 8, 5120),
        (3_145_729, 4, 3_670_016),
        (3_145_729, 8, 3_407_872),
        (4097, 4, 5120),
        (700, 1, 1024),
        (4096, 8, 4096),  # up to 512 times the divisions nothing changes
        (1 << 30, 8, 1 << 30),
        ((1 << 30) + 1, 2, 3 << 29),
    ],
)
def test_sizes_with_divisions(size: int, divisions: int, rounded: int) -> None:
    assert round_size(size, (divisions,) * 16) == rounded


def test_a_large_block_keeps_a_remainder_of_up_to_1_mib() -> None:
    allocator = PyTorchCachingAllocator()
    allocator.malloc(11 * MIB)
    assert allocator.allocated_bytes == 12 * MIB
    allocator.malloc(19 * MIB - 512)
    assert allocator.allocated_bytes == 12 * MIB + 20 * MIB - MIB - 512
    assert allocator.reserved_bytes == 12 * MIB + 20 * MIB


@pytest.mark.parametrize(("version", "lower_first"), [((2, 11), True), ((2, 12), False), ((2, 13), False)])
def test_equal_blocks_go_by_address_or_by_age(version: tuple[int, int], lower_first: bool) -> None:
    allocator = PyTorchCachingAllocator(torch_version=version, driver=CudaDriver(addresses=HighestHole()))
    older, newer = allocator.malloc(10 * MIB), allocator.malloc(10 * MIB)
    assert older is not None
    assert newer is not None
    assert newer.address < older.address
    allocator.free(older)
    allocator.free(newer)
    again = allocator.malloc(10 * MIB)
    assert again is (newer if lower_first else older)


@pytest.mark.parametrize(("version", "lower_first"), [((2, 11), True), ((2, 12), False), ((2, 13), True)])
def test_a_split_and_merged_block_is_a_new_one_in_2_12(version: tuple[int, int], lower_first: bool) -> None:
    """Pull request 178362: of one segment too, the block that was made first is taken first."""
    allocator = PyTorchCachingAllocator(torch_version=version)
    low, _, high, _ = (allocator.malloc(size) for size in (1024, 512, 1024, 512))
    assert low is not None
    assert high is not None
    addresses = low.address, high.address
    allocator.free(low)
    allocator.free(allocator.malloc(512))  # split off the lower one, and merged with the rest of it
    allocator.free(high)
    again = allocator.malloc(1024)
    assert again is not None
    assert again.address == addresses[0 if lower_first else 1]


def test_zero_bytes_are_nothing() -> None:
    allocator = PyTorchCachingAllocator(0)
    handle = allocator.malloc(0)
    allocator.record_stream(handle, 1)
    allocator.free(handle)
    assert (handle, allocator.reserved_bytes) == (None, 0)


def test_another_stream_gets_its_own_segment() -> None:
    allocator = PyTorchCachingAllocator()
    allocator.free(allocator.malloc(10 * MIB, stream=0))
    allocator.malloc(10 * MIB, stream=1)
    assert allocator.reserved_bytes == 20 * MIB


@pytest.mark.parametrize(("lag", "reuses_at"), [(0, 1), (1, 2), (3, 4), (None, None)])
def test_a_recorded_stream_delays_reuse(lag: int | None, reuses_at: int | None) -> None:
    allocator = PyTorchCachingAllocator(driver=CudaDriver(event_lag=lag))
    block = allocator.malloc(10 * MIB)
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 0)
    allocator.free(block)
    assert allocator.allocated_bytes == 0
    reused = [allocator.malloc(10 * MIB) is block for _ in range(5)]
    assert reused == [attempt == reuses_at for attempt in range(1, 6)]
    if lag is None:
        allocator.synchronize()
        assert allocator.malloc(10 * MIB) is block


def test_retry_then_out_of_memory() -> None:
    allocator = PyTorchCachingAllocator(40 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    kept = allocator.malloc(32 * MIB)
    assert (allocator.num_alloc_retries, allocator.reserved_bytes) == (1, 32 * MIB)
    with pytest.raises(DeviceOutOfMemory, match=r"Tried to allocate 10\.00 MiB.*40\.00 MiB of which 8\.00 MiB is free"):
        allocator.malloc(10 * MIB)
    assert (allocator.num_alloc_retries, allocator.num_ooms, allocator.allocated_bytes) == (2, 1, 32 * MIB)
    allocator.free(kept)
    allocator.malloc(10 * MIB)


def test_one_exbibyte_is_refused_outright() -> None:
    allocator = PyTorchCachingAllocator()
    with pytest.raises(DeviceOutOfMemory, match="more than 1EB"):
        allocator.malloc(1 << 60)
    assert allocator.num_ooms == 0


@pytest.mark.parametrize(("version", "fits"), [((2, 11), False), ((2, 13), True)])
def test_the_memory_cap_is_cut_up_to_2_11_and_rounded_since_2_13(version: tuple[int, int], fits: bool) -> None:
    """30/44 is a little less than it should be in binary: the product with 44 MiB falls short of 30 MiB."""
    allocator = PyTorchCachingAllocator(44 * MIB, torch_version=version)
    allocator.set_memory_fraction(30 / 44)
    if fits:
        allocator.malloc(30 * MIB)
    else:
        with pytest.raises(DeviceOutOfMemory):
            allocator.malloc(30 * MIB)


def test_rejecting_skips_the_retries() -> None:
    allocator = PyTorchCachingAllocator(100 * MIB, parse_alloc_conf("throw_on_cudamalloc_oom:True"))
    allocator.free(allocator.malloc(40 * MIB))
    with pytest.raises(DeviceOutOfMemory, match=r"preemptively rejected .* Requested size: 70\.00 MiB"):
        allocator.malloc(70 * MIB)
    assert (allocator.num_oom_rejections, allocator.num_ooms, allocator.num_alloc_retries) == (1, 0, 0)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_memory_fraction_comes_before_the_rejection() -> None:
    """As recorded with 2.13 (``reject1`` and ``reject2`` of the private pools' recordings)."""
    conf = parse_alloc_conf("per_process_memory_fraction:0.5,throw_on_cudamalloc_oom:True")
    allocator = PyTorchCachingAllocator(100 * MIB, conf)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)
    assert (allocator.num_oom_rejections, allocator.num_alloc_retries, allocator.reserved_bytes) == (0, 1, 50 * MIB)


def test_expandable_segments_grow_by_pages() -> None:
    allocator = PyTorchCachingAllocator(conf=AllocConf(expandable_segments=True))
    allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(50 * MIB)
    assert (allocator.reserved_bytes, len(allocator.segments())) == (80 * MIB, 1)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cudaMallocAsync.*not modelled"):
        PyTorchCachingAllocator(conf=parse_alloc_conf("backend:cudaMallocAsync"))
    with pytest.raises(UsageError, match="capacity_bytes"):
        PyTorchCachingAllocator(conf=AllocConf(per_process_memory_fraction=0.5))
    with pytest.raises(UsageError, match="not both"):
        PyTorchCachingAllocator(1, driver=CudaDriver())
    with pytest.raises(UsageError, match="0 to 1"):
        PyTorchCachingAllocator(1).set_memory_fraction(1.1)
    with pytest.raises(UsageError, match="track_stats"):
        PyTorchCachingAllocator().memory_stats()


def test_restoring_a_heap() -> None:
    allocator = PyTorchCachingAllocator(64 * MIB)
    heap = (
        SegmentView(
            1 << 40,
            20 * MIB,
            0,
            "large",
            False,
            (
                BlockView(1 << 40, 5 * MIB, 5 * MIB - 1, "allocated"),
                BlockView((1 << 40) + 5 * MIB, 15 * MIB, 0, "free"),
            ),
        ),
    )
    live = restore(allocator, heap)
    assert allocator.segments() == heap
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (5 * MIB, 20 * MIB)
    block = allocator.malloc(2 * MIB)
    assert block is not None
    assert block.address == (1 << 40) + 5 * MIB
    allocator.free(live[1 << 40])
    allocator.free(block)
    allocator.empty_cache()
    assert allocator.driver.used_bytes == 0
    with pytest.raises(UsageError, match="does not fit"):
        restore(PyTorchCachingAllocator(MIB), heap)


def test_sizes_in_messages() -> None:
    assert [format_size(size) for size in (1024, 1536, MIB, 3 * MIB // 2, 5 << 29)] == [
        "1024 bytes",
        "1.50 KiB",
        "1024.00 KiB",
        "1.50 MiB",
        "2.50 GiB",
    ]


def test_a_recording_that_ends_too_early_says_so() -> None:
    driver = CudaDriver(addresses=RecordedAddresses([1 << 30]))
    assert driver.malloc(1) == 1 << 30
    with pytest.raises(LookupError, match="no further segment"):
        driver.malloc(1)


def test_the_driver_counts_pages_and_others() -> None:
    driver = CudaDriver(10 * MIB, other_bytes=3 * MIB)
    assert driver.malloc(3 * MIB) is not None
    assert (driver.used_bytes, driver.free_bytes()) == (4 * MIB, 3 * MIB)
    assert driver.malloc(3 * MIB) is None
    assert not driver.create(2, 2 * MIB)
    assert (driver.used_bytes, driver.peak_used_bytes) == (4 * MIB, 6 * MIB)


@pytest.mark.parametrize("policy", [LowestHole, HighestHole])
@settings(max_examples=examples(100), deadline=None)
@given(operations=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_holes_are_first_fit_from_their_end(
    policy: Callable[[int, int], AddressPolicy], operations: list[tuple[bool, int]]
) -> None:
    """Against a map of single pages."""
    pages = 200
    holes, used = policy(0, pages), [False] * pages
    taken: list[tuple[int, int]] = []
    for takes, number in operations:
        if not takes and taken:
            address, size = taken.pop(number % len(taken))
            holes.give(address, size)
            used[address : address + size] = [False] * size
            continue
        fits = [start for start in range(pages - number + 1) if not any(used[start : start + number])]
        if not fits:
            with pytest.raises(OverflowError):
                holes.take(number)
            continue
        wanted = fits[0] if policy is LowestHole else fits[-1]
        assert holes.take(number) == wanted
        used[wanted : wanted + number] = [True] * number
        taken.append((wanted, number))
