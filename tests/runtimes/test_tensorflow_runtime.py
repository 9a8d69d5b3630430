"""TensorFlow's options by their native names, its limit on a card, and what a trace does under it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphmem import replay_trace
from graphmem.allocators.tensorflow_bfc import BFCOptions, OneRegion, TensorFlowBFC
from graphmem.devices import Device, device_named
from graphmem.devices.capabilities import limits_of
from graphmem.errors import DeviceOutOfMemory, UsageError
from graphmem.replay import replay
from graphmem.runtimes.bfc import bare_context_bytes
from graphmem.runtimes.tensorflow.card import limit_on, run_on_card, with_eigen_scratch
from graphmem.runtimes.tensorflow.options import TensorFlowOptions, memory_limit_bytes, min_system_memory, read_options
from graphmem.trace import Category, Trace, TraceBuilder
from graphmem.units import GIB, MIB
from tests.support.checked_allocator import CheckedAllocator


def read(text: str = "", **environment: str) -> TensorFlowOptions:
    return read_options(text, environment)


# --- options ----------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_a_gpu() -> None:
    options = read()
    assert options == TensorFlowOptions()
    assert options.bfc() == BFCOptions(allow_growth=False, garbage_collection=True, fragmentation_fraction=0.0)
    assert options.cudnn_workspace_limit_bytes == 8 * GIB


def test_options_and_variables_in_one_text() -> None:
    options = read("gpu_options.allow_growth:true, experimental.internal_fragmentation_fraction=0.25,"
                   "TF_CUDNN_WORKSPACE_LIMIT_IN_MB=64,memory_limit:4096.5")  # fmt: skip
    assert (options.allow_growth, options.internal_fragmentation_fraction) == (True, 0.25)
    assert (options.cudnn_workspace_limit_bytes, options.memory_limit) == (64 * MIB, 4096.5)


def test_variables_win_over_options_and_the_text_over_the_environment() -> None:
    assert not read("allow_growth:true", TF_FORCE_GPU_ALLOW_GROWTH="false").allow_growth
    assert read("TF_FORCE_GPU_ALLOW_GROWTH=true", TF_FORCE_GPU_ALLOW_GROWTH="false").allow_growth
    assert not read(TF_ENABLE_GPU_GARBAGE_COLLECTION="false").garbage_collection
    assert read(TF_GPU_ALLOCATOR="cuda_malloc_async").use_cuda_malloc_async
    assert read(TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC="-1").async_preallocation_bytes == -1


@pytest.mark.parametrize("entry", ["TF_FORCE_GPU_ALLOW_GROWTH=1", "TF_ENABLE_GPU_GARBAGE_COLLECTION=FALSE",
                                   "TF_DEVICE_MIN_SYS_MEMORY_IN_MB=-5", "TF_CUDNN_WORKSPACE_LIMIT_IN_MB=8GB",
                                   "TF_GPU_ALLOCATOR=bfc"])  # fmt: skip
def test_what_tensorflow_ignores_is_ignored_and_said(entry: str) -> None:
    options = read(entry)
    assert len(options.warnings) == 1
    assert options.warnings[0].startswith(f"TensorFlow ignores {entry}: ")
    assert replace(options, warnings=()) == TensorFlowOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allow_growth", "write NAME:VALUE"),
        ("allow_growth:yes", "accepted: true or false"),
        ("allow_growth:true,allow_growth:false", "given twice"),
        ("memory_fraction:0.5", "no memory option 'memory_fraction'; accepted: allow_growth"),
        ("per_process_gpu_memory_fraction:1.5", "unified memory, which is not modelled"),
        ("per_process_gpu_memory_fraction:half", "accepted: a number"),
        ("memory_limit:0", "at least 1"),
        ("memory_limit:1e30", "at least 1"),
        ("gpu_system_memory_size_in_mb:-1", "a whole number of MiB"),
        ("use_unified_memory:true", "unified memory is not modelled; accepted: false"),
        ("memory_limit:100,per_process_gpu_memory_fraction:0.5", "together with memory_limit"),
        ("TF_GPU_ALLOCATOR=cuda_malloc", "for debugging"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(text)


# --- the limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "major", "reserved"),
    [(2 * GIB - 1, 9, 225), (2 * GIB, 3, 500), (8 * GIB, 6, 500), (8 * GIB, 7, 1050), (8 * GIB, 8, 1536),
     (8 * GIB, 9, 1800), (8 * GIB, 12, 1800)],
)  # fmt: skip
def test_memory_left_to_the_system(available: int, major: int, reserved: int) -> None:
    assert min_system_memory(available, limits_of((major, 0)).tensorflow_system_bytes) == reserved * MIB


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("", 11000 - 1536),
        ("per_process_gpu_memory_fraction:0.5", 6000),
        ("gpu_system_memory_size_in_mb:100", 10900),
        ("gpu_system_memory_size_in_mb:100,TF_DEVICE_MIN_SYS_MEMORY_IN_MB=300", 10700),
        ("per_process_gpu_memory_fraction:0.5,TF_DEVICE_MIN_SYS_MEMORY_IN_MB=300", 10700),
        ("TF_DEVICE_MIN_SYS_MEMORY_IN_MB=11001", 11000 - 1536),  # more than there is: ignored
        ("num_virtual_devices_per_gpu:2", (11000 - 1536) // 2),
        ("memory_limit:2048.9", 2048),
        ("memory_limit:50000", 50000),
    ],
)
def test_the_limit_on_a_card_of_12000_mib_of_which_11000_are_free(text: str, limit: int) -> None:
    found = memory_limit_bytes(
        read(text), total_bytes=12000 * MIB, available_bytes=11000 * MIB, system_bytes=1536 * MIB
    )
    assert found == limit * MIB


#: "Created device ... with N MB memory" as TensorFlow 2 logged it on idle cards of public logs; the same card
#: differs between drivers by as much as this is asked to meet.
LOGGED = {
    "A100-40GB": 38366,
    "A100-PCIE-40GB": 38367,
    "A100-80GB": 79197,
    "H100-80GB": 78763,
    "T4": 13757,
    "RTX-3090": 22289,
}


@pytest.mark.parametrize(("name", "logged"), LOGGED.items())
def test_limits_are_those_that_tensorflow_logs(name: str, logged: int) -> None:
    assert limit_on(read(), device_named(name)) / MIB == pytest.approx(logged, rel=0.005)


def test_the_context_at_device_creation_is_at_most_the_whole_one() -> None:
    for name in ("H100-80GB", "RTX-3090", "T4"):
        device = device_named(name)
        assert 0 < bare_context_bytes(device) <= device.context_bytes


# --- runs -------------------------------------------------------------------------------------------------------------


def trace_of(*sizes: int, name: str = "op") -> Trace:
    """Storages that are all alive at the end."""
    builder = TraceBuilder("sizes")
    operator = builder.operator(name, phase=builder.phase(1, "run"))
    for size in sizes:
        builder.alloc(size, operator, Category.ACTIVATION)
    return builder.build()


def card(text: str = "", gpu: str | Device = "H100-80GB", **options: Any) -> Any:
    device = gpu if isinstance(gpu, Device) else device_named(gpu)
    return lambda trace: run_on_card(trace, replace(read(text), **options), device)


def test_without_growth_the_whole_limit_is_reserved_and_what_is_enough_is_said() -> None:
    runs = card()(trace_of(10 * MIB, 20 * MIB))
    assert runs.main.peak_reserved_bytes == runs.limit_bytes
    assert runs.main.peak_allocated_bytes == 30 * MIB
    details = dict(runs.details)
    assert details["sufficient_memory_limit_bytes"] == 30 * MIB
    assert details["reserved_with_memory_growth_bytes"] == 16 * MIB + 32 * MIB
    assert "memory_limit=30 (MiB), and with memory growth it holds 48.00 MiB" in runs.notes[0].message


def test_a_limit_that_is_said_to_suffice_does() -> None:
    sizes = [s * MIB for s in (300, 5, 290, 7, 130, 128, 3)]
    enough = dict(card()(trace_of(*sizes)).details)["sufficient_memory_limit_bytes"]
    again = card(f"memory_limit:{-(-enough // MIB)}")(trace_of(*sizes))
    assert again.limited is None
    assert card(f"memory_limit:{sum(sizes) // MIB - 1}")(trace_of(*sizes)).limited is not None


def test_growth_doubles_regions() -> None:
    runs = card("allow_growth:true")(trace_of(*[MIB] * 7))
    assert [segment.total_size for segment in runs.main.segments] == [2 * MIB, 4 * MIB, 8 * MIB]
    assert runs.notes[-1].message.endswith("2.00 MiB, 4.00 MiB, 8.00 MiB")


def test_a_run_beyond_the_limit_fails_and_still_says_what_it_needs() -> None:
    runs = card("memory_limit:100")(trace_of(60 * MIB, 60 * MIB))
    assert runs.limited is not None
    assert runs.limited.out_of_memory.event == 1
    assert runs.main.out_of_memory is None
    assert runs.main.peak_reserved_bytes == 120 * MIB


def test_the_device_limit_of_the_executor_makes_regions_smaller() -> None:
    runs = card("TF_PER_DEVICE_MEMORY_LIMIT_MB=1024")(trace_of(MIB))
    assert 0.85 * GIB < runs.main.peak_reserved_bytes <= GIB  # the limit times 0.9 until it fits


def test_the_pool_of_the_driver_is_a_bound_and_says_so() -> None:
    runs = card("TF_GPU_ALLOCATOR=cuda_malloc_async")(trace_of(3, 5))
    assert (runs.main.peak_reserved_bytes, runs.main.peak_allocated_bytes) == (8, 8)
    assert [note.kind for note in runs.notes] == ["unknown"]
    held = card("TF_GPU_ALLOCATOR=cuda_malloc_async,TF_CUDA_MALLOC_ASYNC_SUPPORTED_PREALLOC=-1")(trace_of(3, 5))
    assert held.main.peak_reserved_bytes == held.limit_bytes


@pytest.mark.parametrize(("name", "count"), [("aten.convolution.default", 1), ("Conv", 1), ("ConvTranspose", 1),
                                             ("aten.convert", 0), ("aten.mm.default", 0)])  # fmt: skip
def test_convolutions_are_counted_for_the_scratch_of_autotuning(name: str, count: int) -> None:
    notes = [
        note
        for note in card("TF_CUDNN_WORKSPACE_LIMIT_IN_MB=64")(trace_of(1, name=name)).notes
        if note.kind == "unknown"
    ]
    assert sum(note.count for note in notes) == count
    assert all("up to 64.00 MiB each (TF_CUDNN" in note.message for note in notes)


def test_the_scratch_of_the_device_comes_first_and_stays() -> None:
    trace = with_eigen_scratch(trace_of(5))
    assert [storage.bytes for storage in trace.storages] == [5, 1028]
    run = replay(trace, TensorFlowBFC(GIB))
    assert run.requested_bytes.tolist() == [1028, 1033]
    assert run.allocated_bytes.tolist() == [1280, 1536]


def test_one_region_is_a_valid_heap_without_end() -> None:
    allocator = CheckedAllocator(OneRegion(BFCOptions()))
    blocks = [allocator.malloc(size) for size in (100, 5 * MIB, 0, 300)]
    allocator.free(blocks[1])
    allocator.malloc(2 * MIB)
    allocator.malloc(4 * MIB)
    assert allocator.reserved_bytes == 256 + 5 * MIB + 512 + 4 * MIB


def test_an_estimate_names_the_levels_and_the_moment() -> None:
    trace = trace_of(10 * MIB, 20 * MIB)
    estimate = replay_trace(trace, runtime="tensorflow", device="H100-80GB", alloc_conf="allow_growth:false")
    assert estimate.moment.event == 1  # the most that is allocated, not the first event, which reserves everything
    assert estimate.fit is not None
    assert estimate.fit.fits
    text = estimate.report(details=True)
    assert "chunks in use (get_memory_info: peak)" in text
    assert "TensorFlow 2.21 BFC without memory growth, limit" in text


def test_a_limit_that_fails_is_no_missing_memory_of_the_card() -> None:
    estimate = replay_trace(trace_of(60 * MIB), runtime="tf", device="H100-80GB", alloc_conf="memory_limit:50")
    assert estimate.fit is not None
    assert not estimate.fit.fits
    assert "but the allocator's own limit or fragmentation stops it" in " ".join(estimate.report(details=True).split())


# --- the allocator's rules, one by one --------------------------------------------------------------------------------


def test_free_regions_are_given_back_before_a_request_fails() -> None:
    allocator = TensorFlowBFC(32 * MIB, BFCOptions(allow_growth=True))
    for size in (2 * MIB, 4 * MIB, 8 * MIB):
        allocator.free(allocator.malloc(size))
    assert allocator.reserved_bytes == 14 * MIB
    allocator.malloc(20 * MIB)  # 18 MiB are left: the three regions go
    assert (allocator.reserved_bytes, allocator.num_alloc_retries) == (32 * MIB, 1)
    with pytest.raises(DeviceOutOfMemory, match="ran out of memory trying to allocate"):
        allocator.malloc(20 * MIB)


def test_without_garbage_collection_the_request_fails() -> None:
    allocator = TensorFlowBFC(32 * MIB, BFCOptions(allow_growth=True, garbage_collection=False))
    allocator.free(allocator.malloc(16 * MIB))
    with pytest.raises(DeviceOutOfMemory):
        allocator.malloc(20 * MIB)


def test_a_refused_region_is_asked_for_again_at_nine_tenths() -> None:
    asked: list[int] = []

    def device(size: int) -> int | None:
        asked.append(size)
        return 4096 if size < 2000 else None

    TensorFlowBFC(2560, driver_alloc=device).malloc(100)
    # 2560 x 0.9 = 2304, 2304 x 0.9 rounds up to 2304 again, so one step of 256 bytes
    assert asked == [2560, 2304, 2048, 1792]


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_is_a_fraction(fraction: float) -> None:
    with pytest.raises(UsageError, match="fragmentation_fraction"):
        BFCOptions(fragmentation_fraction=fraction)
    with pytest.raises(UsageError, match="memory limit"):
        TensorFlowBFC(-1)
