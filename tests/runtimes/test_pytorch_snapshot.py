"""A step written as a PyTorch memory snapshot reads back as the same run."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.analyze import replay_trace
from graphmem.cli.main import cli
from graphmem.runtimes.pytorch import snapshot as pytorch_snapshot
from graphmem.runtimes.pytorch.snapshot import _without, recorded
from graphmem.sources.snapshot import read_recording, read_snapshot, recording_of, trace_of
from graphmem.trace import Category, EventKind, Place, Trace, TraceBuilder
from graphmem.units import MIB


def _step() -> Trace:
    """Two iterations with weights, a host storage, an empty one, small and large blocks, and an emptied cache."""
    builder = TraceBuilder("hand-made")
    build = builder.operator("to", "net.fc", builder.phase(0, "build"), "train.py:7")
    builder.alloc(30 * MIB, build, Category.PARAMETER)
    builder.alloc(64 * MIB, build, place=Place.HOST)
    for iteration in (1, 2):
        operator = builder.operator("aten.mm", "net.fc", builder.phase(iteration, "forward"), "net.py:33")
        saved = [builder.alloc(size, operator) for size in (300, 0, 700_000, 5 * MIB, iteration * 40 * MIB)]
        for storage in saved:
            builder.free(storage, operator)
        builder.event(EventKind.EMPTY_CACHE, operator)
    return builder.build()


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:32"])
def test_the_snapshot_reads_back_as_the_same_run(tmp_path: Path, conf: str) -> None:
    trace = _step()
    (tmp_path / "s.pickle").write_bytes(pytorch_snapshot.render(trace, conf))
    again = replay_trace(read_snapshot(tmp_path / "s.pickle"), alloc_conf=conf, torch_version="2.13")
    direct = replay_trace(trace, alloc_conf=conf, torch_version="2.13")
    assert again.peak.allocated_bytes == direct.peak.allocated_bytes
    assert again.peak.reserved_bytes == direct.peak.reserved_bytes
    assert again.breakdown == direct.breakdown
    recording = read_recording(tmp_path / "s.pickle")
    assert sum(view.total_size for view in recording.final_segments) > 30 * MIB - 1
    assert not recording.ignored_actions
    assert not recording.start_blocks


def test_blocks_name_the_operator_the_line_the_module_and_the_phase() -> None:
    rows = pytorch_snapshot.snapshot(_step(), "")["device_traces"][0]
    largest = max((row for row in rows if row["action"] == "alloc"), key=lambda row: row["size"])
    assert largest["size"] == 80 * MIB
    assert largest["frames"][0] == {"name": "aten.mm", "filename": "net.py", "line": 33}
    assert [frame["name"] for frame in largest["frames"][1:]] == ["temporary", "net.fc", "iteration 2 forward"]
    assert all((frame["filename"], frame["line"]) == ("net.py", 33) for frame in largest["frames"])
    assert [row["time_us"] for row in rows] == list(range(len(rows)))


def test_what_memory_is_for_is_read_back_and_what_is_of_others_is_not(tmp_path: Path) -> None:
    builder = TraceBuilder("hand-made")
    operator = builder.operator("aten.mm", phase=builder.phase(1, "forward"))
    builder.alloc(MIB, operator, Category.WORKSPACE, label="cuBLAS workspace (main thread)")
    made = pytorch_snapshot.snapshot(builder.build(), "")
    (read,) = trace_of(recording_of(made)).storages
    assert (read.category, read.label) == (Category.WORKSPACE, "cuBLAS workspace (main thread)")
    for row in made["device_traces"][0]:
        row.update(category="of another tool", user_metadata="workspace of mine")
    (read,) = trace_of(recording_of(made)).storages
    assert (read.category, read.label) == (Category.UNKNOWN, "")


def test_a_request_that_the_card_refuses_is_in_the_snapshot() -> None:
    builder = TraceBuilder("hand-made")
    operator = builder.operator("aten.mm", phase=builder.phase(1, "forward"))
    builder.alloc(700 * MIB, operator)
    builder.refuse(builder.alloc(500 * MIB + 1, operator, Category.ACTIVATION))
    driver = CudaDriver(1024 * MIB, other_bytes=100 * MIB)
    death = recording_of(recorded(builder.build(), "", (2, 13), driver)).death
    assert death is not None
    assert (death.requested_bytes, death.free_bytes) == (500 * MIB + 512, 224 * MIB)
    assert recording_of(pytorch_snapshot.snapshot(builder.build(), "")).death is None  # a card without a limit


def test_the_viewer_is_told_what_memory_is_for_and_when() -> None:
    builder = TraceBuilder("hand-made")
    build = builder.operator("to", "net", builder.phase(0, "build"), "train.py:7")
    builder.alloc(30 * MIB, build, Category.PARAMETER, label="fc.weight")
    back = builder.operator("aten.mm", "net.fc", builder.phase(1, "backward"), "net.py:33")
    builder.alloc(40 * MIB, back, Category.GRADIENT, label="fc.weight.grad")
    made = pytorch_snapshot.snapshot(builder.build(), "")
    weight, gradient = (row for row in made["device_traces"][0] if row["action"] == "alloc")
    assert (weight["category"], weight["user_metadata"]) == ("parameter", "parameter fc.weight")
    assert "forward_frames" not in weight
    assert gradient["forward_frames"] == ['  File "net.py", line 33, in net.fc\n']
    # The viewer breaks on categories of which none is unknown.
    assert {row["category"] for row in made["device_traces"][0]} == {"parameter", "gradient", "unknown"}
    blocks = [block for segment in made["segments"] for block in segment["blocks"] if block["state"] != "inactive"]
    assert [block["frames"][0]["filename"] for block in blocks] == ["train.py", "net.py"]
    assert [(one["stage"], one["name"]) for one in made["external_annotations"]] == [
        ("START", "build"), ("END", "build"), ("START", "iteration 1 backward"), ("END", "iteration 1 backward"),
    ]  # fmt: skip


def test_a_block_that_another_stream_uses_waits_as_pytorch_says() -> None:
    builder = TraceBuilder("hand-made")
    operator = builder.operator("to", "net", builder.phase(0, "build"), "train.py:7")
    used = builder.alloc(30 * MIB, operator)
    builder.event(EventKind.RECORD_STREAM, operator, used, stream=1)
    builder.free(used, operator)
    made = pytorch_snapshot.snapshot(builder.build(), "")
    assert [row["action"] for row in made["device_traces"][0]] == ["segment_alloc", "alloc", "free_requested"]
    assert made["segments"][0]["blocks"][0]["state"] == "active_pending_free"
    builder.alloc(1 * MIB, operator)  # which looks whose events have come
    rows = pytorch_snapshot.snapshot(builder.build(), "")["device_traces"][0]
    assert [row["action"] for row in rows][2:4] == ["free_requested", "free_completed"]


_INTERVALS = st.lists(st.integers(0, 60), unique=True, max_size=12).map(
    lambda points: [(a, b) for a, b in zip(sorted(points)[::2], sorted(points)[1::2], strict=False)]
)


@given(_INTERVALS, _INTERVALS)
def test_ranges_without_others(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {point for begin, end in intervals for point in range(begin, end)}

    left = list(_without(ranges, others))
    assert points(left) == points(ranges) - points(others)
    assert sum(end - begin for begin, end in left) == len(points(left))


def test_the_command_writes_a_pickle_of_plain_values(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\ndef build(batch=2):\n    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)\n"
    )
    model, target = f"{tmp_path / 'net.py'}:build", tmp_path / "s.pickle"
    refused = CliRunner().invoke(cli, ["export", model, "--format", "snapshot"])
    assert refused.exit_code == 1
    assert "binary file" in refused.stderr
    written = CliRunner().invoke(cli, ["export", model, "--format", "snapshot", "-o", str(target)])
    assert written.exit_code == 0, written.stderr
    assert set(pickle.loads(target.read_bytes())) >= {"segments", "device_traces"}
    assert CliRunner().invoke(cli, ["replay", str(target)]).exit_code == 0


def test_a_frame_without_a_line_is_called_as_pytorch_calls_it() -> None:
    trace = _step()
    bare = replace(trace, operators=tuple(replace(one, source="") for one in trace.operators))
    (rows,) = pytorch_snapshot.snapshot(bare)["device_traces"]
    assert {(frame["filename"], frame["line"]) for row in rows for frame in row["frames"]} == {("??", 0)}
