"""``replay`` and ``export``: which reader takes a file, and that what one writes the other reads."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmem.errors import GraphmemError, SourceError, TraceError
from graphmem.planning.recordings import read_file
from graphmem.trace import Category, Trace, TraceBuilder, from_json, to_json
from graphmem.units import GIB
from tests.cli.test_main import Recorder, one_line, recorder, run
from tests.support.estimates import training_estimate

__all__ = ["recorder"]


def small_trace() -> Trace:
    builder = TraceBuilder("test")
    operator = builder.operator("aten.mm", phase=builder.phase(1, "forward"))
    first = builder.alloc(1024, operator, Category.ACTIVATION)
    builder.alloc(2048, operator, Category.PARAMETER, label="weight")
    builder.free(first, operator)
    return builder.build()


def test_export_trace_writes_what_replay_reads(recorder: Recorder, tmp_path: Path) -> None:
    recorder.result = replace(training_estimate(), trace=small_trace())
    target = tmp_path / "trace.json"
    assert run("export", "net.py:build", "-b", "4", "-o", str(target)).exit_code == 0
    assert recorder.asked["batch"] == 4
    assert to_json(from_json(target.read_text())) == to_json(small_trace())

    result = run("replay", str(target), "--gpu-memory", "12GiB", "--alloc-conf", "max_split_size_mb:128", "--top", "3")
    assert result.exit_code == 0, result.output
    assert to_json(recorder.asked["trace"]) == to_json(small_trace())
    assert recorder.asked["device"].capacity_bytes == 12 * GIB
    assert (recorder.asked["alloc_conf"], recorder.asked["top"]) == ("max_split_size_mb:128", 3)


def test_export_trace_goes_to_stdout_by_default(recorder: Recorder) -> None:
    recorder.result = replace(training_estimate(), trace=small_trace())
    assert json.loads(run("export", "net.py:build").stdout)["schema"] == "graphmem.trace/1"


def test_an_analysis_without_a_trace_is_an_error(recorder: Recorder, tmp_path: Path) -> None:
    result = run("export", "net.py:build", "-o", str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "no trace" in one_line(result)
    assert list(tmp_path.iterdir()) == []


def test_anything_but_json_goes_to_the_snapshot_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def recording_in(file: Any, device: int | None = None) -> Any:
        asked.extend((file.read(), device))
        return SimpleNamespace(death=None)

    reader = SimpleNamespace(recording_in=recording_in, trace_of=lambda recording: small_trace())
    monkeypatch.setitem(sys.modules, "graphmem.sources.snapshot", reader)
    path = tmp_path / "snapshot.json"  # the name does not matter
    path.write_bytes(pickle.dumps({"segments": []}))
    read_file(path, 2)
    assert asked == [path.read_bytes(), 2]


@pytest.mark.parametrize("name", ["missing", "a\0b", ".", "x" * 5000])
def test_a_file_that_cannot_be_read_is_one_line(recorder: Recorder, name: str, tmp_path: Path) -> None:
    result = run("replay", str(tmp_path / name))
    assert result.exit_code == 1
    assert "cannot read" in one_line(result)


@pytest.mark.parametrize("content", [b"{", b'{"schema": 1}', b'  {"a": "\xff"}', b"{" * 100_000])
def test_json_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises((TraceError, SourceError)):
        read_file(path, None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60))
def test_any_json_text_is_a_trace_or_one_of_our_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text("{" + text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(GraphmemError):
        read_file(path, None)
