"""ONNX Runtime's options by their own names, and a session's allocations: reserved weights, an arena for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphmem.allocators.onnxruntime_arena import ArenaConfig, ExtendStrategy
from graphmem.errors import UsageError
from graphmem.replay import Replay, replay
from graphmem.runtimes.onnxruntime.arenas import OnnxRuntimeSessions, default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options, parse_options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import load_onnx
from graphmem.trace import Trace
from tests.support import onnx_samples as samples


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", ArenaConfig()),
        ("gpu_mem_limit:2147483648", ArenaConfig(max_mem=2 << 30)),
        (" gpu_mem_limit : 2GiB , ", ArenaConfig(max_mem=2 << 30)),
        ("arena_extend_strategy:kSameAsRequested", ArenaConfig(arena_extend_strategy=ExtendStrategy.kSameAsRequested)),
        ("arena_extend_strategy:1", ArenaConfig(arena_extend_strategy=ExtendStrategy.kSameAsRequested)),
        (
            "initial_chunk_size_bytes:4096,max_dead_bytes_per_chunk:1,max_power_of_two_extend_bytes:64M,"
            "initial_growth_chunk_size_bytes:-1",
            ArenaConfig(
                initial_chunk_size_bytes=4096, max_dead_bytes_per_chunk=1, max_power_of_two_extend_bytes=64 << 20
            ),
        ),
    ],
)
def test_options(text: str, config: ArenaConfig) -> None:
    assert parse_options(text) == Options(arena=config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cudnn_fun:1", "no memory option 'cudnn_fun'; accepted: arena_extend_strategy, gpu_mem_limit, max_mem,"),
        ("gpu_mem_limit", "gpu_mem_limit has no value; write gpu_mem_limit:VALUE"),
        ("gpu_mem_limit:lots", "cannot read 'lots' as a memory size"),
        ("arena_extend_strategy:2", "'2'; accepted: kNextPowerOfTwo, kSameAsRequested, 0, 1"),
        ("gpu_mem_limit:1,max_mem:2", "max_mem is given after gpu_mem_limit"),
        ("initial_chunk_size_bytes:0", "initial_chunk_size_bytes is 0; accepted: 1 or more bytes"),
    ],
)
def test_bad_options(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(text)
    assert words in str(caught.value)


def replayed(trace: Trace, options: str = "", capacity: int | None = None) -> tuple[Replay, OnnxRuntimeSessions]:
    reserved = reserved_allocations(trace, parse_options(options))
    allocator = default_allocator(options, capacity, reserved=reserved)
    return replay(trace, allocator), allocator


def planned(path: Path, batch: int, options: str = "") -> Trace:
    return plan([[load_onnx(path, batch=batch)] * 2], parse_options(options)).trace


def test_a_session_reserves_its_initializers(tmp_path: Path) -> None:
    on_device = "session.use_device_allocator_for_initializers:1"
    trace = planned(samples.save(samples.perceptron(), tmp_path), 2)
    assert len(reserved_allocations(trace, parse_options(on_device))) == 2
    assert not reserved_allocations(trace, parse_options(""))  # from the arena's regions
    result, allocator = replayed(trace, on_device)
    assert [(s.kind, s.total_size) for s in allocator.segments()] == [
        ("reserved", 512), ("reserved", 256), ("region", 1 << 20),
    ]  # fmt: skip
    # x, h (overwritten by relu's r in place) and y; from the second run on, h lies in the pattern's block
    assert result.peak_requested_bytes == 512 + 256 + 64 + 256 + 32
    assert result.peak_allocated_bytes == 512 + 256 + 3 * 256
    assert result.peak_reserved_bytes == 512 + 256 + (1 << 20)
    assert allocator.stats()["NumReserves"] == 2


def test_options_reach_the_arena_and_a_limit_refuses(tmp_path: Path) -> None:
    trace = planned(samples.save(samples.perceptron(), tmp_path), 2)
    exact, _ = replayed(trace, "arena_extend_strategy:kSameAsRequested")
    assert exact.peak_reserved_bytes == 512 + 256 + 3 * 256
    limited, _ = replayed(trace, "gpu_mem_limit:1024")
    assert limited.out_of_memory is not None
    assert replayed(trace, capacity=1000)[0].out_of_memory is not None


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", samples.REAL_MODELS)
def test_real_models_run(tmp_path: Path, name: str, batch: int) -> None:
    path = samples.unpack(name, tmp_path)
    trace = planned(path, batch)
    result, allocator = replayed(trace, "session.use_device_allocator_for_initializers:1")
    graph = load_onnx(path, batch=batch)
    weights = sum(s.bytes for s in trace.storages[: len(graph.initializers)] if s.place == 0)
    assert result.out_of_memory is None
    assert weights < result.peak_requested_bytes <= result.peak_allocated_bytes <= result.peak_reserved_bytes
    assert allocator.allocated_bytes == weights  # a session keeps its weights and nothing else between runs
