"""Files of others are read within limits, and no path makes a reader wait for ever."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmem.allocators.onnxruntime_arena import ArenaConfig
from graphmem.base import documents
from graphmem.base.documents import (
    open_file,
    parse_json,
    read_content,
    read_gzipped_json,
    read_json,
    read_lines,
    read_yaml,
)
from graphmem.errors import SourceError, UsageError
from graphmem.serving import loads
from graphmem.serving.base import Request
from graphmem.trace import to_json
from tests.cli.test_main import one_line, run
from tests.cli.test_replay import small_trace
from tests.support.examples import examples

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
devices = pytest.mark.skipif(not Path("/dev/zero").exists(), reason="devices of POSIX")
_ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32")


def _fifo(folder: Path) -> Path:
    path = folder / "pipe"
    os.mkfifo(path)
    return path


def _sparse(folder: Path, first: bytes = b"\0") -> Path:
    path = folder / "sparse"
    path.write_bytes(first)
    os.truncate(path, 10 << 30)
    return path


_READERS: dict[str, Callable[[Path], Any]] = {
    "content": read_content,
    "json": read_json,
    "gzip": read_gzipped_json,
    "yaml": read_yaml,
    "lines": lambda path: list(read_lines(path, 100)),
}


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize("place", [pytest.param("/dev/zero", marks=devices), "folder"])
def test_what_is_no_file_is_not_read(tmp_path: Path, reader: str, place: str) -> None:
    with pytest.raises(OSError, match=r"device|[Dd]irectory"):
        _READERS[reader](tmp_path if place == "folder" else Path(place))


@pipes
@pytest.mark.parametrize("reader", _READERS)
def test_a_pipe_without_a_writer_is_given_up(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_WRITER_PATIENCE", 0.05)
    with pytest.raises(OSError, match="nothing came"):
        _READERS[reader](_fifo(tmp_path))


@pytest.mark.skipif(os.name != "posix", reason="sparse files")
@pytest.mark.parametrize("reader", [name for name in _READERS if name != "gzip"])
def test_a_file_of_ten_gigabytes_is_not_read(tmp_path: Path, reader: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than"):
            _READERS[reader](_sparse(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 2 * documents.LARGEST_CONFIGURATION + (1 << 20)
    finally:
        tracemalloc.stop()


@pipes
def test_a_slow_writer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_WRITER_PATIENCE", 5.0)
    path = _fifo(tmp_path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for part in (b'{"a":', b" [1, ", b"2]}"):
                time.sleep(0.05)
                file.write(part)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_json(path) == {"a": [1, 2]}
    thread.join()


@pipes
def test_a_pipe_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = _fifo(tmp_path)
    thread = threading.Thread(target=lambda: path.write_bytes(b"x" * 1001), daemon=True)
    thread.start()
    with pytest.raises(ValueError, match="more than"):
        read_content(path, 1000)
    with pytest.raises(OSError, match="has to be a file"):
        open_file(path, pipes=False)


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5), st.lists, max_leaves=5))
@settings(max_examples=examples(50))
def test_json_is_read_in_every_encoding(value: Any) -> None:
    text = json.dumps({"first": value}, ensure_ascii=False)
    for encoding in _ENCODINGS:
        try:
            assert parse_json(text.encode(encoding)) == {"first": value}, encoding
        except UnicodeEncodeError:  # half of a pair
            return


@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_a_trace_is_a_trace_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    from graphmem.planning.recordings import read_file

    path = tmp_path / "trace.json"
    path.write_bytes(to_json(small_trace()).encode(encoding))
    found: Any = read_file(path, None)
    assert to_json(found) == to_json(small_trace())


@pytest.mark.parametrize("head", [b"\0", b"{", b"\x80\x04"])
@pytest.mark.skipif(os.name != "posix", reason="sparse files")
def test_replay_does_not_read_ten_gigabytes(tmp_path: Path, head: bytes) -> None:
    result = run("replay", str(_sparse(tmp_path, head)))
    assert result.exit_code == 1
    assert "more than" in one_line(result) or "begins with" in one_line(result)


# --- YAML -------------------------------------------------------------------------------------------------------------


def _yaml(folder: Path, text: str) -> Any:
    path = folder / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


def test_aliases_are_refused_by_their_line(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    with pytest.raises(ValueError, match="line 2 has an alias"):
        _yaml(tmp_path, "\n".join(levels))
    with pytest.raises(ValueError, match="line 2 has an alias"):
        _yaml(tmp_path, "base: &b {x: 1}\nmore: {<<: *b}")
    assert _yaml(tmp_path, "base: &b {x: 1}\nnext: 2") == {"base": {"x": 1}, "next": 2}


@pytest.mark.parametrize(
    "text",
    ["a: !!timestamp x", "a: !!int ''", "a: !!bool x", "a: !!python/object/apply:os.system [x]", "a: [", "{[1]: 2}: 3",
     "[" * 5000, "a: 2001-99-99", "a: !!binary x", "a: !!float ''"],
)  # fmt: skip
def test_what_pyyaml_breaks_on_is_an_error_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^.+$"):
        _yaml(tmp_path, text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(100), deadline=None)
@given(st.text("ab:&*!{}[]-<|>'\"\n 01.~?,#%@", max_size=40))
def test_any_yaml_is_a_value_or_a_value_error(tmp_path: Path, text: str) -> None:
    try:
        _yaml(tmp_path, text)
    except ValueError:
        return


def test_gzip_is_bounded_when_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LARGEST_UNPACKED", 1 << 20)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b"0" * (8 << 20)))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        read_gzipped_json(path)


def test_arenas_that_never_return_are_refused() -> None:
    with pytest.raises(UsageError, match="initial_growth_chunk_size_bytes is 0"):
        ArenaConfig(initial_growth_chunk_size_bytes=0)


@pytest.mark.parametrize("encoding", _ENCODINGS)
def test_a_load_is_read_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "load.csv"
    path.write_bytes("timestamp,prompt,output\n5,3,4\n7,5,6\n".encode(encoding))
    assert loads.read(path) == (Request(0.0, 3, 4), Request(2.0, 5, 6))


def test_a_column_of_a_load_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_text("timestamp,prompt,prompt,output\n0,3,9999,4\n")
    with pytest.raises(SourceError, match="line 1: 2 columns 'prompt'"):
        loads.read(path)
