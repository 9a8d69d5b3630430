"""Reading memory snapshots: what becomes of one, and that no damaged or hostile file does anything but be refused."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.base import SegmentView
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import TraceError, UsageError
from graphmem.replay import replay
from graphmem.sources.plain_pickle import load_plain_pickle
from graphmem.sources.snapshot import read_recording, read_snapshot, recording_of, trace_of
from graphmem.trace import EventKind, Phase
from graphmem.units import MIB
from tests import places
from tests.support.examples import examples

BASE = 0x7F00_0000_0000


def _block(size: int, requested: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": requested, "state": state, **more}


def _event(action: str, address: int, size: int, stream: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 1, **more}


def _small_segment(*blocks: dict[str, Any], stream: int = 0, device: int = 0, address: int = BASE) -> dict[str, Any]:
    rest = 2 * MIB - sum(block["size"] for block in blocks)
    return {
        "device": device,
        "address": address,
        "total_size": 2 * MIB,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": stream,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [*blocks, *([_block(rest, 0, "inactive")] if rest else [])],
    }


USER_FRAMES = [
    {"filename": "??", "line": 0, "name": "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"},
    {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 5, "name": "linear"},
    {"filename": "/home/me/model.py", "line": 12, "name": "forward"},
    {"filename": "/home/me/train.py", "line": 40, "name": "main"},
]


def _snapshot() -> dict[str, Any]:
    """Two blocks alive at the start (one of them to the end), one allocated and freed, one allocated and kept."""
    events = [
        _event("alloc", BASE + 1024, 600, frames=USER_FRAMES),
        _event("free_requested", BASE + 512, 400),
        _event("free_completed", BASE + 512, 400),
        _event("segment_alloc", BASE + 4 * MIB, 2 * MIB, 7777),
        _event("alloc", BASE + 4 * MIB, 100, 7777),
        _event("free_requested", BASE + 1024, 600),
        _event("free_completed", BASE + 1024, 600),
        _event("snapshot", 0, 0),
    ]
    return {
        "segments": [
            _small_segment(_block(512, 300)),
            _small_segment(_block(512, 100), stream=7777, address=BASE + 4 * MIB),
        ],
        "device_traces": [events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        "external_annotations": [],
    }


def _write(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_recording_that_begins_in_the_middle(tmp_path: Path, protocol: int) -> None:
    path = _write(tmp_path / "snapshot.pickle", _snapshot(), protocol)
    trace = read_snapshot(path)
    assert trace.phases == (Phase(0, "before recording"), Phase(0, "recorded"))
    assert [(storage.bytes, storage.stream) for storage in trace.storages] == [(300, 0), (400, 0), (600, 0), (100, 1)]
    assert {storage.category.name for storage in trace.storages} == {"UNKNOWN"}
    rows = [(event.kind.name, event.subject, trace.operators[event.operator].name) for event in trace.events()]
    assert rows == [
        ("ALLOC", 0, "before recording"),
        ("ALLOC", 1, "before recording"),
        ("ALLOC", 2, "aten.mm"),
        ("FREE", 1, "free_completed"),
        ("ALLOC", 3, "alloc"),
        ("FREE", 2, "free_completed"),
    ]
    assert trace.operators[2].source == "/home/me/model.py:12"
    assert dict(trace.notes) == {
        "device": "0",
        "allocator settings": "expandable_segments:False",
        "recorded peak reserved": str(4 * MIB),
        "alive before recording": "2 blocks, 700 requested bytes",
    }
    recording = read_recording(path)
    assert not recording.is_complete
    assert recording.start_ranges == ((BASE, 2 * MIB),)
    result = replay(trace, PyTorchCachingAllocator())
    assert result.requested_bytes.tolist() == [300, 700, 1300, 900, 1000, 400]
    assert result.reserved_bytes.tolist() == [2 * MIB] * 4 + [4 * MIB] * 2


def test_a_complete_recording() -> None:
    snapshot = _snapshot()
    snapshot["segments"] = snapshot["segments"][1:]
    snapshot["device_traces"] = [snapshot["device_traces"][0][3:5]]
    recording = recording_of(snapshot)
    assert recording.is_complete
    assert [phase.name for phase in trace_of(recording).phases] == ["recorded"]


def test_a_recording_without_history_holds_what_is_alive() -> None:
    snapshot = _snapshot() | {"device_traces": []}
    trace = trace_of(recording_of(snapshot))
    assert [storage.bytes for storage in trace.storages] == [300, 100]
    assert set(trace.kinds.tolist()) == {EventKind.ALLOC}


def test_a_segment_given_back_was_there_at_the_start() -> None:
    snapshot = _snapshot()
    snapshot["device_traces"][0].append(_event("segment_free", BASE + 8 * MIB, 20 * MIB))
    assert recording_of(snapshot).start_ranges == ((BASE, 2 * MIB), (BASE + 8 * MIB, 20 * MIB))


def test_memory_given_back_is_an_emptied_cache() -> None:
    snapshot = _snapshot()
    events = snapshot["device_traces"][0]
    events[3:3] = [_event("segment_free", BASE + (8 + 2 * i) * MIB, 2 * MIB) for i in range(3)]
    events.append(_event("segment_free", BASE + 20 * MIB, 2 * MIB))
    kinds = [event.kind.name for event in trace_of(recording_of(snapshot)).events()]
    assert kinds == ["ALLOC", "ALLOC", "ALLOC", "FREE", "EMPTY_CACHE", "ALLOC", "FREE", "EMPTY_CACHE"]


def test_expandable_ranges_are_walked_back() -> None:
    snapshot = _snapshot()
    segment = snapshot["segments"][0]
    segment |= {"total_size": 6 * MIB, "is_expandable": True}
    segment["blocks"][-1]["size"] += 4 * MIB
    snapshot["segments"] = [segment]
    snapshot["device_traces"] = [
        [
            _event("segment_map", BASE + 2 * MIB, 2 * MIB),
            _event("segment_unmap", BASE + 6 * MIB, 2 * MIB),
            _event("segment_map", BASE + 4 * MIB, 2 * MIB),
        ]
    ]
    assert recording_of(snapshot).start_ranges == ((BASE, 2 * MIB), (BASE + 6 * MIB, 2 * MIB))


def test_a_deferred_free_stands_where_the_memory_came_back() -> None:
    snapshot = _snapshot()
    events = snapshot["device_traces"][0]
    events.insert(4, events.pop(2))  # the completion of the first free, behind the next allocation
    trace = trace_of(recording_of(snapshot))
    kinds = [event.kind.name for event in trace.events()]
    assert kinds == ["ALLOC", "ALLOC", "ALLOC", "ALLOC", "FREE", "FREE"]
    assert dict(trace.notes)["deferred frees"].startswith("1 frees")


def test_a_block_pending_at_either_end() -> None:
    snapshot = _snapshot()
    del snapshot["device_traces"][0][1]  # the request of the first free lies before the recording
    pending = _block(1024, 600, "active_pending_free")
    snapshot["segments"][0] = _small_segment(_block(512, 300), _block(512, 0, "inactive"), pending)
    del snapshot["device_traces"][0][5]  # the completion of the second lies behind it
    recording = recording_of(snapshot)
    assert [block.requested_bytes for block in recording.start_blocks] == [300]
    assert [block.requested_bytes for block in recording.start_pending] == [400]
    trace = trace_of(recording)
    assert trace.live_at(len(trace) - 1) == [0, 2, 3]


def test_recordings_that_leave_actions_out() -> None:
    for missing in ("free_requested", "free_completed"):
        snapshot = _snapshot()
        snapshot["device_traces"] = [[e for e in snapshot["device_traces"][0] if e["action"] != missing]]
        trace = trace_of(recording_of(snapshot))
        assert [storage.bytes for storage in trace.storages] == [300, 400, 600, 100]
        assert trace.live_at(len(trace) - 1) == [0, 3]


def test_what_is_unknown_is_counted() -> None:
    snapshot = _snapshot()
    snapshot["segments"][0]["segment_pool_id"] = (0, 1)
    snapshot["device_traces"][0] += [
        {"action": "oom", "device_free": 3, "size": 1 << 40, "stream": 0},
        {"action": "capture_begin"},
        {"action": "capture_begin"},
    ]
    notes = dict(trace_of(recording_of(snapshot)).notes)
    assert notes["ignored events"] == "2 capture_begin"
    assert notes["out of memory"].startswith(f"the run died of a request for {1 << 40} bytes")
    assert notes["private pools"].startswith("1 (")


def test_several_devices() -> None:
    snapshot = _snapshot()
    snapshot["segments"].append(_small_segment(_block(512, 77), device=1, address=BASE))
    with pytest.raises(TraceError, match=r"2 devices \(0, 1\)"):
        recording_of(snapshot)
    assert [storage.bytes for storage in trace_of(recording_of(snapshot, 1)).storages] == [77]
    assert len(trace_of(recording_of(snapshot, 0)).storages) == 4
    with pytest.raises(UsageError, match="no device 2; accepted: 0, 1"):
        recording_of(snapshot, 2)


def _set(value: Any, *path: Any) -> Any:
    def change(snapshot: dict[str, Any]) -> None:
        target: Any = snapshot
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(None, "segments"), "segments"),
        (_set({}, "device_traces"), "device_traces"),
        (_set([5], "device_traces"), "not a list"),
        (_set([3], "segments"), "segment is not a dict"),
        (_set("half", "segments", 0, "blocks", 0, "state"), "state"),
        (_set(1024, "segments", 0, "blocks", 0, "size"), "do not fill"),
        (_set(513, "segments", 0, "blocks", 0, "requested_size"), "smaller than its request"),
        (_set(BASE + 1, "segments", 0, "blocks", 0, "address"), "do not tile"),
        (_set(True, "segments", 0, "address"), "bool"),
        (_set(-1, "segments", 0, "address"), "-1"),
        (_set(BASE + MIB, "segments", 1, "address"), "overlaps"),
        (_set("x", "device_traces", 0, 0, "addr"), "addr"),
        (_set(2**70, "device_traces", 0, 0, "size"), "size"),
        (_set(BASE + 2048, "device_traces", 0, 0, "addr"), "neither freed later nor alive"),
        (_set(601, "device_traces", 0, 0, "size"), "neither freed later nor alive"),
        (_set(BASE, "device_traces", 0, 6, "addr"), "still alive"),
        (_set(BASE, "device_traces", 0, 5, "addr"), "does not become free"),
        (_set(BASE - 512, "device_traces", 0, 2, "addr"), "outside the memory"),
        (_set(BASE + 5 * MIB, "device_traces", 0, 3, "addr"), "not held"),
    ],
)
def test_contradictions_are_refused(change: Any, reason: str) -> None:
    snapshot = _snapshot()
    change(snapshot)
    with pytest.raises(TraceError, match=reason):
        recording_of(snapshot)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"segments": []}, {"segments": [], "device_traces": []}])
def test_other_values_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceError):
        read_snapshot(_write(tmp_path / "x.pickle", value))


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read_snapshot(tmp_path / "nothing.pickle")
    with pytest.raises(TraceError, match="cannot read"):
        read_snapshot(tmp_path)


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_does_nothing(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "made"
    path = _write(tmp_path / "bad.pickle", {"segments": [Malicious(victim)], "device_traces": []}, protocol)
    with pytest.raises(TraceError):
        read_snapshot(path)
    assert not victim.exists()
    pickle.loads(path.read_bytes())  # the file is what it claims to be
    assert victim.exists()


@pytest.mark.parametrize("value", [range(3), {1}, frozenset(), 1j, bytearray(2), Path("x"), print, os.system])
def test_objects_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TraceError, match=r"plain data"):
        load_plain_pickle(pickle.dumps(value))


def test_a_memo_index_cannot_reserve_memory() -> None:
    # The C unpickler would make room for two thousand million entries here.
    assert load_plain_pickle(b"\x80\x02]r\x00\x00\x00\x7f.") == []


def _plain(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.tuples(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers(), inner)
        ),
        max_leaves=30,
    )


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
#: Protocol 2 has no bytes: Python writes a call there, which is refused.
PLAIN = _plain(SCALARS | st.binary())


@settings(max_examples=examples(200), deadline=None)
@given(
    case=st.tuples(_plain(SCALARS), st.just(2)) | st.tuples(PLAIN, st.integers(3, 5)),
    shared=st.booleans(),
)
def test_plain_data_reads_as_python_reads_it(case: tuple[Any, int], shared: bool) -> None:
    value, protocol = case
    data = pickle.dumps([value, value, {"again": value}] if shared else value, protocol=protocol)
    assert load_plain_pickle(data) == pickle.loads(data)


def test_large_containers() -> None:
    value = {"events": [{"i": i, "t": "x" * (i % 300), "b": bytes(i % 300)} for i in range(3000)], "n": 1 << 5000}
    for protocol in (3, 4, 5):
        buffer = io.BytesIO()
        pickle.dump(value, buffer, protocol)
        assert load_plain_pickle(buffer.getvalue()) == value


def _only_trace_error(data: bytes) -> None:
    try:
        trace_of(recording_of(load_plain_pickle(data)))
    except TraceError:
        return


VALID = pickle.dumps(_snapshot(), protocol=4)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_truncated_file_is_refused(protocol: int) -> None:
    data = pickle.dumps(_snapshot(), protocol=protocol)
    for length in range(len(data)):
        with pytest.raises(TraceError):
            load_plain_pickle(data[:length])


@settings(max_examples=examples(1000), deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_raise_nothing_but_trace_errors(changes: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for position, byte in changes:
        data[position] = byte
    _only_trace_error(bytes(data))


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_noise_raises_nothing_but_trace_errors(data: bytes, headed: bool) -> None:
    _only_trace_error((b"\x80\x04" if headed else b"") + data)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in _paths(item, (*path, key)))]


JUNK = st.one_of(
    PLAIN,
    st.sampled_from([0, 1, 512, -1, 2**63 - 1, 2**64, BASE, BASE + 512, BASE + 1024, BASE + 4 * MIB, 2 * MIB]),
    st.sampled_from(["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map"]),
    st.sampled_from(["active_allocated", "inactive", "active_pending_free"]),
)


@settings(max_examples=examples(1000), deadline=None)
@given(data=st.data())
def test_damaged_values_raise_nothing_but_trace_errors(data: st.DataObject) -> None:
    snapshot = deepcopy(_snapshot())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in _paths(snapshot) if path]))
        target: Any = snapshot
        for key in path[:-1]:
            target = target[key]
        if data.draw(st.booleans()):
            target[path[-1]] = data.draw(JUNK)
        elif isinstance(target, list):
            target.insert(path[-1], deepcopy(target[data.draw(st.integers(0, len(target) - 1))]))
        else:
            del target[path[-1]]
    try:
        trace_of(recording_of(snapshot))
    except TraceError:
        return


POOLED = places.PYTORCH / "pool_snapshot.pickle.gz"


def _pooled(names_pools: bool) -> Any:
    """A run with private pools (``python -m tests.recorded pool_snapshot``), as new or old versions write it."""
    snapshot: Any = load_plain_pickle(gzip.decompress(POOLED.read_bytes()))
    if not names_pools:
        for event in snapshot["device_traces"][0]:
            event.pop("pool_id", None)
    return recording_of(snapshot)


@pytest.mark.parametrize("names_pools", [True, False])
def test_private_pools_replay_to_the_recorded_peak(names_pools: bool) -> None:
    recording = _pooled(names_pools)
    result = replay(trace_of(recording), PyTorchCachingAllocator())
    assert result.peak_reserved_bytes == recording.peak_reserved_bytes == 281_018_368
    if names_pools:
        assert _segments_by_pool(result.segments) == _segments_by_pool(recording.final_segments)
        assert len({segment.pool for segment in result.segments}) == 3


def _segments_by_pool(segments: Iterable[SegmentView]) -> Counter[tuple[int, str, int]]:
    return Counter((segment.pool, segment.kind, segment.total_size) for segment in segments)


def test_a_pool_without_a_pair_of_numbers_is_refused() -> None:
    snapshot = _snapshot()
    snapshot["segments"][0]["segment_pool_id"] = "private"
    with pytest.raises(TraceError, match="segment_pool_id"):
        recording_of(snapshot)
