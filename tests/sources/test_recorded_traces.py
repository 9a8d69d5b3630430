"""Real GPUs: the allocator must put every block where the recorded driver and allocator put it.

The traces are public memory snapshots by others, reduced to JSON; they are not in this repository.
``pytest --traces FOLDER`` (or GRAPHMEM_TRACES) names the folder that holds them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.replay import replay
from graphmem.sources.snapshot import recording_of, trace_of
from tests.support.recordings import TRACES, compare_with_recording, load_trace, snapshot_of, start_heap

FOUND = sorted(TRACES.glob("*.json.gz")) if TRACES else []
#: Recorded from the start of the process, torch 2.6.
COMPLETE = [path for path in FOUND if path.name.startswith("NiuHuangxiaozi")]
#: Recorded from the middle of a run, torch 2.11.
WARM = [path for path in FOUND if path.name.startswith("Wedsonlin")]

pytestmark = pytest.mark.skipif(TRACES is None, reason="needs the published traces: pytest --traces FOLDER")


def test_the_folder_that_was_named_has_traces() -> None:
    assert COMPLETE
    assert WARM


def _name(path: Path) -> str:
    return path.name.split("__", 1)[1].removesuffix(".json.gz")


@pytest.mark.parametrize("path", COMPLETE, ids=_name)
def test_a_complete_recording_is_reproduced_block_by_block(path: Path) -> None:
    recording = recording_of(snapshot_of(load_trace(path)))
    assert recording.is_complete
    assert not recording.start_blocks
    result = compare_with_recording(recording, (2, 6))
    assert result.differences == ()
    assert result.allocations > 700
    assert result.peak_reserved_bytes == result.recorded_peak_reserved_bytes
    assert result.final_segments == tuple(sorted(recording.final_segments, key=lambda segment: segment.address))


@pytest.mark.parametrize("path", WARM, ids=_name)
def test_a_recording_from_the_middle_is_reproduced_from_the_heap_it_began_with(path: Path) -> None:
    document = load_trace(path)
    recording = recording_of(snapshot_of(document))
    assert not recording.is_complete
    assert [[b.address, b.requested_bytes] for b in recording.start_blocks] == sorted(
        [address, requested] for address, _, _, requested, _ in document["start_live_blocks"]
    )
    heap = start_heap(recording, [tuple(segment) for segment in document["start_segments"]])
    result = compare_with_recording(recording, (2, 11), heap)
    assert result.differences == ()
    assert result.peak_reserved_bytes == result.recorded_peak_reserved_bytes
    assert result.final_segments == tuple(sorted(recording.final_segments, key=lambda segment: segment.address))


@pytest.mark.parametrize("path", FOUND, ids=_name)
def test_the_trace_of_a_recording_replays(path: Path) -> None:
    recording = recording_of(snapshot_of(load_trace(path)))
    trace = trace_of(recording)
    frees = sum(event.action == "free_completed" for event in recording.events)
    allocs = sum(event.action == "alloc" for event in recording.events)
    assert len(trace) == len(recording.start_blocks) + allocs + frees
    ideal = replay(trace, IdealAllocator())
    alive = sum(block.requested_bytes for segment in recording.final_segments for block in segment.blocks)
    assert int(ideal.requested_bytes[-1]) == alive
    real = replay(trace, PyTorchCachingAllocator(torch_version=(2, 11)))
    assert np.array_equal(real.requested_bytes, ideal.requested_bytes)
    assert real.peak_reserved_bytes >= ideal.peak_reserved_bytes
