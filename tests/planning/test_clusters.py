"""Sweeps on a real Dask and a real Ray cluster of two workers that lose what clusters lose: nothing is lost, nothing is
there twice, and the rows are those of one process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import graphmem
from graphmem.units import GIB
from graphmem.workers.crew import ENGINES, Crew
from tests import places

pytestmark = pytest.mark.slow

_COUNT = 12
_SECONDS = 120


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class _Dask:
    """A scheduler and two workers, each with a nanny, as processes of their own. ``memory``: of a worker."""

    def __init__(self, folder: Path, memory: str = "0") -> None:
        self._folder, self._memory = folder, memory
        self._port = _free_port()
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Dask:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._begin("scheduler", "--host", "127.0.0.1", "--port", str(self._port), "--no-dashboard")
        for _ in range(2):
            self._begin("worker", self.address, "--nthreads", "1", "--memory-limit", self._memory, "--no-dashboard")

    def stop(self) -> None:
        for one in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        self._running = []

    def _begin(self, what: str, *arguments: str) -> None:
        paths = os.pathsep.join(filter(None, (str(places.ROOT), os.environ.get("PYTHONPATH", ""))))
        command = [sys.executable, "-m", "distributed.cli.dask_" + what, *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        environment = {**os.environ, "PYTHONPATH": paths}
        self._running.append(subprocess.Popen(command, cwd=self._folder, env=environment, **quiet))  # type: ignore[call-overload]


@pytest.fixture
def dask_of(tmp_path: Path) -> Iterator[Callable[..., _Dask]]:
    pytest.importorskip("distributed")
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(_Dask(tmp_path, **options))


def _square(task: tuple[int, str]) -> int:
    """Squares a number. The first worker that does 4 dies of it; each that does 7 fills its memory, where asked to."""
    number, folder = task
    if number == 4 and not (Path(folder) / "died").exists():
        (Path(folder) / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 7 and (Path(folder) / "fills").exists():
        held = bytearray(int((Path(folder) / "fills").read_text()))
        held[::4096] = b"x" * len(held[::4096])
        time.sleep(_SECONDS)
    time.sleep(0.1)
    return number * number


def _all(
    engine: str, folder: Path, address: str | None = None, meanwhile: Callable[[int], None] = lambda _: None
) -> Any:
    tasks = [(number, str(folder)) for number in range(_COUNT)]
    found: dict[int, Any] = {}
    with Crew(ENGINES.named(engine), 2, address) as crew:
        for number, result in crew.results(_square, tasks):
            assert number not in found
            found[number] = result
            meanwhile(len(found))
    return found


_EXPECTED = {number: number * number for number in range(_COUNT)}


def test_a_worker_of_dask_that_is_killed_in_the_middle(dask_of: Callable[..., _Dask], tmp_path: Path) -> None:
    assert _all("dask", tmp_path, dask_of().address) == _EXPECTED


def test_a_scheduler_of_dask_that_is_started_again(dask_of: Callable[..., _Dask], tmp_path: Path) -> None:
    cluster = dask_of()

    def meanwhile(done: int) -> None:
        if done == 3:
            cluster.stop()
            cluster.start()

    (tmp_path / "died").touch()
    assert _all("dask", tmp_path, cluster.address, meanwhile) == _EXPECTED


def test_a_worker_of_dask_that_is_out_of_memory(dask_of: Callable[..., _Dask], tmp_path: Path) -> None:
    (tmp_path / "died").touch()
    (tmp_path / "fills").write_text(str(GIB))
    _expect_all_but_seven(_all("dask", tmp_path, dask_of(memory="700MB").address))


def _expect_all_but_seven(found: dict[int, Any]) -> None:
    assert str(found.pop(7)).startswith("its worker died 2 times, perhaps for lack of memory")
    assert found == {number: square for number, square in _EXPECTED.items() if number != 7}


def test_a_worker_of_ray_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert _all("ray", tmp_path) == _EXPECTED


def test_a_worker_of_ray_that_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends workers where more of the machine's memory is in use than it allows."""
    pytest.importorskip("ray")
    psutil = pytest.importorskip("psutil")
    memory = psutil.virtual_memory()
    if memory.available < 6 * GIB:
        pytest.skip("takes 4 GiB of memory")
    most = (memory.total - memory.available + 3 * GIB) / memory.total
    monkeypatch.setenv("RAY_memory_usage_threshold", f"{most:.3f}")
    (tmp_path / "died").touch()
    (tmp_path / "fills").write_text(str(4 * GIB))
    _expect_all_but_seven(_all("ray", tmp_path))


def _raylets() -> list[int]:
    """Processes of Ray's nodes that this one began."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"raylet/raylet" in (folder / "cmdline").read_bytes().split(b"\0")[0]:
                found.append(int(folder.name))
    return found


def test_a_node_of_ray_that_is_gone_in_the_middle(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    killed: list[int] = []

    def meanwhile(done: int) -> None:
        if done == 3:
            killed.extend(_raylets())
            for one in killed:
                os.kill(one, signal.SIGKILL)

    (tmp_path / "died").touch()
    assert _all("ray", tmp_path, meanwhile=meanwhile) == _EXPECTED
    assert killed


def test_rows_of_a_cluster_that_loses_all_are_those_of_one_process(
    dask_of: Callable[..., _Dask], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    cluster, store = dask_of(), tmp_path / "rows.jsonl"
    vary: dict[str, Any] = {"optimizer": ["sgd", "adam", "adamw"], "device": ["T4", "H200"], "batch": [2, 3]}
    serial = graphmem.sweep("zoo:mlp", vary=vary, store=tmp_path / "serial.jsonl")
    heard: list[str] = []

    def say(words: str) -> None:
        heard.append(words)
        if words.startswith("4 of 12"):
            cluster.stop()
            cluster.start()

    found = graphmem.sweep("zoo:mlp", vary=vary, store=store, engine="dask", scheduler=cluster.address, say=say)
    assert [row.figures for row in found] == [row.figures for row in serial]
    assert sorted(store.read_bytes().splitlines()) == sorted((tmp_path / "serial.jsonl").read_bytes().splitlines())
    assert [words.partition(",")[0] for words in heard[:2]] == ["0 of 12 done", "4 of 12 done"]
    assert heard[-1].startswith("12 of 12")
