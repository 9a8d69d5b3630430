"""A run written for other programs holds what the estimate says: the same bytes, the same peak, at the same events."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphmem.analyze import replay_trace
from graphmem.cli.main import cli
from graphmem.errors import TraceError, UsageError
from graphmem.estimate import Estimate
from graphmem.exports import EXPORTS, Asked, Export, export_named
from graphmem.reports.tables import TABLES, columns
from graphmem.trace import Category, Place, TraceBuilder, from_json
from graphmem.units import MIB


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    """A weight, its gradient, what is saved for it, memory of the host, and an optimizer of no module."""
    builder = TraceBuilder("hand-made")
    build = builder.operator("to", "", builder.phase(0, "build"), "train.py:7")
    builder.alloc(30 * MIB, build, Category.PARAMETER, label="net.fc.weight")
    builder.alloc(64 * MIB, build, place=Place.HOST)
    forward = builder.operator("aten.mm", "net.fc", builder.phase(1, "forward"), "net.py:33")
    saved = builder.alloc(41 * MIB, forward, Category.ACTIVATION)
    act = builder.operator("aten.relu", "net.act", builder.phase(1, "forward"), "net.py:34")
    builder.free(builder.alloc(700, act), act)
    backward = builder.operator("aten.mm", "net.fc", builder.phase(1, "backward"), "net.py:33")
    builder.alloc(30 * MIB, backward, Category.GRADIENT, label="net.fc.weight.grad")
    builder.free(saved, backward)
    step = builder.operator("aten._foreach_mul", "", builder.phase(1, "optimizer"))
    builder.free(builder.alloc(2 * MIB, step), step)
    return replay_trace(builder.build(), device="T4")


def _document(estimate: Estimate, name: str) -> Any:
    return json.loads(EXPORTS.named(name).render(estimate, Asked()))


def test_perfetto_counts_the_levels_and_nests_modules(estimate: Estimate) -> None:
    rows = _document(estimate, "perfetto")["traceEvents"]
    for row in rows:
        assert row["ph"] in "MCXi"
        assert isinstance(row["pid"], int)
        assert row["ph"] == "M" or row["ts"] >= 0
    peaks = {
        level: max(row["args"]["bytes"] for row in rows if row["ph"] == "C" and row["name"] == level)
        for level in ("requested", "allocated", "reserved")
    }
    assert peaks == {level: getattr(estimate, level) for level in peaks}
    tracks = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    slices = [row for row in rows if row["ph"] == "X"]
    named = {track: [row["name"] for row in slices if tracks[row["tid"]] == track] for track in tracks.values()}
    assert named["phases"] == ["build", "iteration 1 forward", "iteration 1 backward", "iteration 1 optimizer"]
    assert named["modules"] == ["net", "fc", "act", "fc"]
    assert named["operators"] == ["to", "aten.mm", "aten.relu", "aten.mm", "aten._foreach_mul"]
    assert estimate.trace is not None
    assert sum(row["dur"] for row in slices if tracks[row["tid"]] == "operators") == len(estimate.trace)
    net, fc = (next(row for row in slices if row["name"] == name) for name in ("net", "fc"))
    assert net["ts"] <= fc["ts"] < fc["ts"] + fc["dur"] <= net["ts"] + net["dur"]
    (peak,) = (row for row in rows if row["ph"] == "i")
    assert peak["ts"] == estimate.moment.event


def test_perfetto_is_as_the_trace_event_format_has_it(estimate: Estimate) -> None:
    """The keys that the JSON importer of Perfetto reads, by phase; slices of a track lie in each other or apart (Trace
    Event Format: "complete events" of a thread nest)."""
    document = _document(estimate, "perfetto")
    needed = {"M": {"args"}, "C": {"ts", "args"}, "X": {"ts", "dur", "tid"}, "i": {"ts", "s"}}
    ends: dict[tuple[int, int], list[float]] = {}
    assert isinstance(document["traceEvents"], list)
    slices = sorted(
        (row for row in document["traceEvents"] if row["ph"] == "X"), key=lambda row: (row["ts"], -row["dur"])
    )
    for row in document["traceEvents"]:
        assert row.keys() >= {"name", "ph", "pid", *needed[row["ph"]]}
        assert isinstance(row["name"], str)
        assert row["ph"] != "C" or all(type(value) in (int, float) for value in row["args"].values())
        assert row["ph"] != "i" or row["s"] in "gpt"
        assert row["ph"] != "M" or (row["name"].endswith(("_name", "_sort_index")) and len(row["args"]) == 1)
    for row in slices:
        around = ends.setdefault((row["pid"], row["tid"]), [])
        while around and around[-1] <= row["ts"]:
            around.pop()
        assert not around or row["ts"] + row["dur"] <= around[-1]
        around.append(row["ts"] + row["dur"])


def test_speedscope_divides_the_peak_by_module_and_by_line(estimate: Estimate) -> None:
    document = _document(estimate, "speedscope")
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = document["shared"]["frames"]
    for profile in document["profiles"]:
        assert (profile["type"], profile["unit"], profile["startValue"]) == ("sampled", "bytes", 0)
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == profile["endValue"] == estimate.device
        assert all(0 <= index < len(frames) for stack in profile["samples"] for index in stack)
    stacks = [
        {tuple(frames[index]["name"] for index in stack): size for stack, size in zip(*pair, strict=True)}
        for pair in ((profile["samples"], profile["weights"]) for profile in document["profiles"])
    ]
    assert stacks[0]["net", "fc", "aten.mm", "gradient"] == 30 * MIB
    assert stacks[0]["net", "fc", "to", "parameter"] == 30 * MIB
    assert stacks[1]["net.py", "net.py:33", "aten.mm", "activation"] == 41 * MIB
    assert {"name": "aten.mm", "file": "net.py", "line": 33} in frames


def test_json_is_the_trace(estimate: Estimate) -> None:
    content = EXPORTS.named("json").render(estimate, Asked())
    assert estimate.trace is not None
    assert from_json(content).storages == estimate.trace.storages


@pytest.mark.parametrize("table", TABLES)
def test_csv_is_the_table(estimate: Estimate, table: str) -> None:
    rows = list(csv.DictReader(io.StringIO(str(EXPORTS.named("csv").render(estimate, Asked(table=table))))))
    expected = columns(estimate, table)
    for name, values in expected.items():
        assert [row[name] for row in rows] == ["" if value is None else str(value) for value in values]


def test_the_tables_add_up(estimate: Estimate) -> None:
    storages = columns(estimate, "storages")
    held = [
        size
        for size, at_peak, place in zip(*(storages[key] for key in ("bytes", "at_peak", "place")), strict=True)
        if at_peak and place == "device"
    ]
    assert sum(held) == estimate.requested == sum(columns(estimate, "operators")["bytes_at_peak"])
    assert columns(estimate, "phases")["reserved_bytes"][-1] == estimate.phases[-1].peak.reserved_bytes
    modules = columns(estimate, "modules")
    fc = modules["module"].index("net.fc")
    assert [modules[name][fc] for name in ("parameters", "gradients", "activations")] == [30 * MIB, 30 * MIB, 41 * MIB]
    assert modules["bytes"][modules["module"].index("net")] == modules["bytes"][fc]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(estimate: Estimate, library: str) -> None:
    pytest.importorskip(library)
    for table in TABLES:
        frame = estimate.to_frame(table, library)
        assert type(frame).__module__.startswith(library)
        assert list(frame.columns) == list(columns(estimate, table))
        assert len(frame) == len(columns(estimate, table)[frame.columns[0]])


def test_parquet_reads_back(estimate: Estimate) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    content = EXPORTS.named("parquet").render(estimate, Asked(table="phases"))
    assert parquet.read_table(io.BytesIO(content)).to_pydict() == columns(estimate, "phases")  # type: ignore[arg-type]


def test_what_is_missing_is_named(estimate: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphmem.reports.tables.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs pandas or polars, which is not installed: pip install pandas"):
        estimate.to_frame()
    with pytest.raises(UsageError, match="needs polars, which is not installed: pip install polars"):
        estimate.to_frame(library="polars")
    monkeypatch.setattr("graphmem.exports.parquet.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install pyarrow"):
        EXPORTS.named("parquet").render(estimate, Asked())
    with pytest.raises(UsageError, match="accepted: storages, operators, modules, phases"):
        columns(estimate, "layers")


def test_an_estimate_without_events_says_so(estimate: Estimate) -> None:
    for name in ("json", "snapshot", "perfetto", "speedscope", "csv"):
        with pytest.raises(TraceError, match="keeps no trace"):
            EXPORTS.named(name).render(estimate.without_events(), Asked())
    with pytest.raises(UsageError, match="PyTorch's allocator, and this runs under onnxruntime"):
        EXPORTS.named("snapshot").render(replace(estimate, runtime="onnxruntime"), Asked())


def test_the_end_of_the_name_chooses() -> None:
    ends = {"a.pickle": "snapshot", "a.perfetto.json": "perfetto", "a.speedscope.json": "speedscope", "a.csv": "csv",
            "a.parquet": "parquet", "a.json": "json", "a": "json"}  # fmt: skip
    assert {file: export_named(None, file).name for file in ends} == ends
    assert all(isinstance(one, Export) for one in EXPORTS.all())


def test_an_answer_is_saved_by_the_name_of_the_file(estimate: Estimate, tmp_path: Path) -> None:
    estimate.save(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()
    estimate.save(tmp_path / "report.txt", details=True)
    assert (tmp_path / "report.txt").read_text() == estimate.report(details=True)


def test_the_command_writes_what_a_viewer_reads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\ndef build(batch=2):\n    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)\n"
    )
    target = tmp_path / "step.speedscope.json"
    written = CliRunner().invoke(cli, ["export", f"{tmp_path / 'net.py'}:build", "-o", str(target)])
    assert written.exit_code == 0, written.stderr
    assert "by module" in json.loads(target.read_text())["profiles"][0]["name"]
    wrong = CliRunner().invoke(cli, ["export", "zoo:mlp", "--format", "gif"])
    assert wrong.exit_code == 2
    assert "accepted: json, snapshot, perfetto, speedscope, csv, parquet" in wrong.stderr
