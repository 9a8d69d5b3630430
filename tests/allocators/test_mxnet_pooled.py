"""MXNet's pooled storage, rule by rule: rounding, reuse, the reserve, giving back everything."""

from __future__ import annotations

import pytest

from graphmem import replay_trace
from graphmem.allocators.mxnet_pooled import MXNetPooledStorage, PoolConfig, round_alloc_size
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.runtimes.mxnet import read_options
from graphmem.trace import TraceBuilder
from graphmem.units import GIB, KIB, MIB


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1, 4096), (4096, 4096), (4097, 8192), (2 * MIB, 2 * MIB), (2 * MIB - 1, 2 * MIB), (2 * MIB + 1, 4 * MIB),
        (5 * MIB, 6 * MIB), (6 * MIB, 6 * MIB),
    ],
)  # fmt: skip
def test_naive_rounds_to_pages_and_large_sizes_to_slabs(size: int, rounded: int) -> None:
    assert round_alloc_size(size, PoolConfig()) == rounded


def test_naive_with_other_pages_and_slabs() -> None:
    config = PoolConfig(pool_page_size=100, mem_large_alloc_round_size=1000)
    assert [round_alloc_size(size, config) for size in (1, 101, 1000, 1001)] == [100, 200, 1000, 2000]


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1, 4 * KIB), (2, 4 * KIB), (4 * KIB, 4 * KIB), (4 * KIB + 1, 8 * KIB), (5 * MIB, 8 * MIB), (8 * MIB, 8 * MIB),
        (16 * MIB, 16 * MIB), (16 * MIB + 1, 32 * MIB), (33 * MIB, 48 * MIB), (3 * GIB + 1, 3 * GIB + 16 * MIB),
    ],
)  # fmt: skip
def test_round_doubles_up_to_the_cutoff_and_adds_beyond_it(size: int, rounded: int) -> None:
    assert round_alloc_size(size, PoolConfig("Round")) == rounded


def test_the_cutoff_moves() -> None:
    config = PoolConfig("Round", mem_pool_round_linear_cutoff=20)
    assert [round_alloc_size(size, config) for size in (MIB, MIB + 1, 5 * MIB - 1)] == [MIB, 2 * MIB, 5 * MIB]


def test_a_free_block_serves_its_own_size_only_and_the_last_one_first() -> None:
    storage = MXNetPooledStorage()
    first, second = storage.malloc(5000), storage.malloc(8192)
    storage.free(first)
    storage.free(second)
    assert storage.malloc(4097) is second
    assert storage.malloc(4096) not in (first, second)
    assert storage.malloc(8000) is first
    assert storage.reserved_bytes == 8192 + 8192 + 4096


def test_what_is_freed_stays_reserved_until_the_reserve_is_touched() -> None:
    storage = MXNetPooledStorage(capacity_bytes=100 * MIB)  # 5 MiB are kept free
    storage.free(storage.malloc(40 * MIB))
    storage.malloc(50 * MIB)  # 60 MiB are free: 10 MiB stay
    assert storage.reserved_bytes == 90 * MIB
    storage.malloc(6 * MIB)  # 4 MiB would stay: the 40 MiB that wait are given back
    assert (storage.reserved_bytes, storage.num_alloc_retries) == (56 * MIB, 1)
    storage.malloc(42 * MIB)  # nothing to give back, but the device has it
    assert storage.reserved_bytes == 98 * MIB


def test_the_reserve_is_a_share_of_the_whole_card_and_others_count() -> None:
    storage = MXNetPooledStorage(PoolConfig(mem_pool_reserve=50), capacity_bytes=100 * MIB, other_bytes=10 * MIB)
    storage.free(storage.malloc(20 * MIB))
    storage.malloc(20 * MIB)  # reused
    assert storage.num_alloc_retries == 0
    storage.free(storage.malloc(18 * MIB))  # 52 MiB would stay
    storage.malloc(4 * MIB)  # 48 MiB would stay
    assert storage.num_alloc_retries == 1


def test_beyond_the_device_it_fails_and_changes_nothing() -> None:
    storage = MXNetPooledStorage(capacity_bytes=10 * MIB)
    storage.malloc(6 * MIB)
    with pytest.raises(DeviceOutOfMemory, match="Memory allocation failed"):
        storage.malloc(5 * MIB)
    assert storage.allocated_bytes == storage.reserved_bytes == 6 * MIB


def test_unpooled_asks_for_exactly_that_and_keeps_nothing() -> None:
    storage = MXNetPooledStorage(PoolConfig("Unpooled"))
    block = storage.malloc(123)
    assert storage.reserved_bytes == 123
    storage.free(block)
    assert (storage.reserved_bytes, storage.peak_reserved_bytes) == (0, 123)


def test_nothing_is_no_block() -> None:
    storage = MXNetPooledStorage()
    assert storage.malloc(0) is None
    storage.free(None)
    with pytest.raises(ValueError, match="not allocated"):
        storage.free(MXNetPooledStorage().malloc(1))


def test_the_variables_of_the_environment_and_of_the_text() -> None:
    environment = {"MXNET_GPU_MEM_POOL_TYPE": "Round", "MXNET_GPU_MEM_POOL_RESERVE": "10", "MXNET_HOME": "/"}
    assert read_options("", environment) == PoolConfig("Round", mem_pool_reserve=10)
    assert read_options("MXNET_GPU_MEM_POOL_TYPE=Naive, MXNET_GPU_POOL_PAGE_SIZE:64", environment) == PoolConfig(
        pool_page_size=64, mem_pool_reserve=10
    )
    with pytest.raises(UsageError, match="accepted: MXNET_GPU_MEM_POOL_TYPE"):
        read_options("pool:Round", {})
    with pytest.raises(UsageError, match="a whole number"):
        read_options("MXNET_GPU_MEM_POOL_RESERVE=five", {})


def test_a_trace_replays_in_it() -> None:
    builder = TraceBuilder("two")
    operator = builder.operator("op", phase=builder.phase(1, "run"))
    builder.free(builder.alloc(5 * MIB, operator), operator)
    builder.alloc(3 * MIB, operator)
    estimate = replay_trace(builder.build(), runtime="mxnet", alloc_conf="MXNET_GPU_MEM_POOL_RESERVE=7")
    assert (estimate.allocated, estimate.reserved) == (6 * MIB, 10 * MIB)
    assert estimate.allocator == "MXNet pooled storage (MXNET_GPU_MEM_POOL_RESERVE=7)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_pool_type": "Pooled"}, "accepted: Naive, Round, Unpooled"),
        ({"pool_page_size": 31}, "accepted: 32 or more"),
        ({"mem_large_alloc_round_size": 0}, "ROUND_SIZE is 0"),
        ({"mem_pool_reserve": 101}, "percent"),
        ({"mem_pool_type": "Round", "pool_page_size": 5000}, "powers of two"),
        ({"mem_pool_type": "Round", "mem_pool_round_linear_cutoff": 19}, "accepted: 20 to 34"),
        ({"mem_pool_type": "Round", "mem_pool_round_linear_cutoff": 35}, "accepted: 20 to 34"),
        ({"mem_pool_type": "Round", "pool_page_size": 1 << 26}, "accepted: 26 to 34"),
    ],
)
def test_what_mxnet_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PoolConfig(**options)  # type: ignore[arg-type]
