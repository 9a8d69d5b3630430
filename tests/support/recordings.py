"""Recordings of real runs, for tests: their own JSON as a snapshot, and an allocator held to every recorded address."""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphmem.allocators.base import BlockView, SegmentView
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.sources.snapshot import Recording
from graphmem.units import MIB
from tests.support.addresses import RecordedAddresses
from tests.support.restored_heap import restore

#: Public memory snapshots of real GPUs, reduced to JSON: others' work, not part of this repository, and only there
#: where ``pytest --traces FOLDER`` (or GRAPHMEM_TRACES) says so.
TRACES = Path(os.environ["GRAPHMEM_TRACES"]) if os.environ.get("GRAPHMEM_TRACES") else None
ACTIONS = {
    "A": "alloc",
    "f": "free_requested",
    "F": "free_completed",
    "S": "segment_alloc",
    "s": "segment_free",
}


def snapshot_of(document: dict[str, Any]) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` returned, from the reduced JSON of one device."""
    segments = []
    for segment in document["final_segments"]:
        blocks = [dict(zip(("size", "requested_size", "state"), row, strict=True)) for row in segment["blocks"]]
        segments.append({**segment, "device": 0, "segment_pool_id": (0, 0), "blocks": blocks})
    events = [
        {
            "action": ACTIONS[action],
            "addr": address,
            "size": size,
            "stream": stream,
            "time_us": time,
            "frames": _frames(place),
        }
        for action, address, size, stream, time, place in document["events"]
    ]
    return {
        "segments": segments,
        "device_traces": [events],
        "allocator_settings": document["settings"],
        "external_annotations": [],
    }


def _frames(place: str) -> list[dict[str, Any]]:
    if not place:
        return []
    filename, line, name = place.rsplit(":", 2)
    return [{"filename": filename, "line": int(line), "name": name}]


def load_trace(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


@dataclass(frozen=True)
class Comparison:
    """How far an allocator followed a recording: differences as text, and both peaks (bytes)."""

    allocations: int
    differences: tuple[str, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    final_segments: tuple[SegmentView, ...]


def compare_with_recording(
    recording: Recording, torch_version: tuple[int, int], start: Iterable[SegmentView] = ()
) -> Comparison:
    """Drive an allocator with the recorded requests, the driver answering with the recorded addresses.

    Every block must get the recorded address, and every segment must be made (and given back) at the recorded event.
    ``start`` is the heap that the recording began with.
    """
    segments = [event for event in recording.events if event.action == "segment_alloc"]
    driver = CudaDriver(addresses=RecordedAddresses(event.address for event in segments))
    allocator = PyTorchCachingAllocator(torch_version=torch_version, driver=driver)
    live: dict[int, Any] = dict(restore(allocator, start))
    reserved = peak_reserved = sum(segment.total_size for segment in start)
    differences: list[str] = []
    allocations = 0
    for index, event in enumerate(recording.events):
        if event.action == "segment_alloc":
            reserved += event.size
        elif event.action == "segment_free":
            reserved -= event.size
        elif event.action == "alloc":
            allocations += 1
            try:
                block = allocator.malloc(event.size, event.stream)
            except LookupError as error:
                differences.append(f"event {index}: {error}")
                break
            assert block is not None
            if block.address != event.address:
                differences.append(f"event {index}: {event.size} bytes at {block.address:#x}, not {event.address:#x}")
            live[event.address] = block
        elif event.action == "free_requested":
            allocator.free(live.pop(event.address))
        if event.action in ("alloc", "free_completed") and allocator.reserved_bytes != reserved:
            differences.append(f"event {index}: {allocator.reserved_bytes} bytes reserved, not {reserved}")
            break
        peak_reserved = max(peak_reserved, reserved)
    return Comparison(
        allocations,
        tuple(differences),
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        peak_reserved,
        allocator.segments(),
    )


def start_heap(recording: Recording, segments: Iterable[tuple[int, int, int, str]]) -> tuple[SegmentView, ...]:
    """The heap at the start of a recording: ``segments`` (address, bytes, stream, kind), tiled by the live blocks.

    The recording does not say how much of the gap behind a block is the block's own slack. At most what the allocator
    would not have split off; and the first allocation in the gap begins where the slack ends.
    """
    blocks = {block.address: block.requested_bytes for block in recording.start_blocks}
    starts = sorted(blocks)
    slack: dict[int, int] = {}  # block -> bytes, as the first allocation behind it shows
    freed: set[int] = set()
    for event in recording.events:
        if event.action == "free_requested":
            freed.add(event.address)
        elif event.action == "alloc" and (position := bisect_right(starts, event.address)):
            before = starts[position - 1]
            if before not in freed:
                slack.setdefault(before, event.address - before - _rounded(blocks[before]))
    return tuple(
        SegmentView(address, size, stream, kind, False, tuple(_tiling(address, size, kind, blocks, slack)))
        for address, size, stream, kind in segments
    )


def _tiling(address: int, size: int, kind: str, blocks: dict[int, int], slack: dict[int, int]) -> Iterable[BlockView]:
    unsplit = 0 if kind == "small" else MIB
    inside = sorted(position for position in blocks if address <= position < address + size)
    ends = [*inside, address + size]
    if ends[0] > address:
        yield BlockView(address, ends[0] - address, 0, "free")
    for position, following in zip(inside, ends[1:], strict=True):
        rounded = _rounded(blocks[position])
        gap = following - position - rounded
        own = gap if gap <= unsplit else slack.get(position, 0)
        if own > unsplit:  # the first allocation lies in another segment, far behind
            own = 0
        yield BlockView(position, rounded + own, blocks[position], "allocated")
        if gap > own:
            yield BlockView(position + rounded + own, gap - own, 0, "free")


def _rounded(size: int) -> int:
    return -(-size // 512) * 512
