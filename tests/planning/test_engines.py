"""Engines: every part has one result, whatever becomes of the workers; and sweeps by them, kept in a file."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import graphmem
from graphmem.errors import GraphmemError, SourceError, TraceError, UsageError
from graphmem.workers.crew import ENGINES, Crew, Loss, Opened

_COUNT = 9


class _Dies(Exception):
    pass


class _Threads:
    """Workers that die of what is asked of them: of one part always, or all at once, the first times."""

    name, takes_address = "threads", True

    def __init__(self, closings: int = 0) -> None:
        self.opened, self._closings = 0, closings

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Opened]:
        self.opened += 1
        with ThreadPoolExecutor(jobs) as executor:
            yield Opened(_Closing() if self.opened <= self._closings else executor, lambda: jobs)

    def loss(self, error: BaseException) -> Loss:
        return Loss.TASK if isinstance(error, _Dies) else Loss.NONE


class _Closing(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        future.set_running_or_notify_cancel()
        return future


def _square(number: int) -> int:
    if number == 4:
        raise _Dies("killed. More about it.")
    return number * number


def _all(function: Callable[[int], Any], engine: Any, jobs: int = 2) -> dict[int, Any]:
    with Crew(engine, jobs) as crew:
        listed = list(crew.results(function, range(_COUNT)))
    assert len(dict(listed)) == len(listed)  # each once
    return dict(listed)


def test_a_part_that_kills_its_workers_is_an_error_and_the_others_are_done() -> None:
    found = _all(_square, _Threads(), jobs=3)
    assert {number: value for number, value in found.items() if number != 4} == {
        number: number * number for number in range(_COUNT) if number != 4
    }
    assert str(found[4]) == "its worker died 2 times, perhaps for lack of memory: killed"


def test_workers_that_are_gone_are_asked_for_again_a_few_times() -> None:
    engine = _Threads(closings=3)
    assert _all(abs, engine) == {number: number for number in range(_COUNT)}
    assert engine.opened == 4
    with pytest.raises(SourceError, match="the workers of the engine threads were lost 5 times"):
        _all(abs, _Threads(closings=100))


def test_what_a_part_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        _all(lambda number: 1 // number, _Threads(), jobs=1)


def _killed_by_four(number: int) -> int:
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    return number * number


@pytest.mark.parametrize(
    "name", ["processes", pytest.param("dask", marks=pytest.mark.slow), pytest.param("ray", marks=pytest.mark.slow)]
)
def test_real_workers_that_are_killed(name: str) -> None:
    pytest.importorskip({"processes": "joblib", "dask": "distributed", "ray": "ray"}[name])
    found = _all(_killed_by_four, ENGINES.named(name))
    assert str(found.pop(4)).startswith("its worker died 2 times")
    assert found == {number: number * number for number in range(_COUNT) if number != 4}


def test_engines_are_named() -> None:
    with pytest.raises(UsageError, match="unknown engine 'spark'; accepted: processes, dask, ray"):
        graphmem.sweep("zoo:gpt2", vary={"batch": [1]}, engine="spark")
    with pytest.raises(UsageError, match="--scheduler is of an engine with workers elsewhere"):
        graphmem.sweep("zoo:gpt2", vary={"batch": [1]}, scheduler="tcp://127.0.0.1:1", engine="processes")


# --- a store ----------------------------------------------------------------------------------------------------------


def _model() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Linear(64, 64), torch.zeros(4, 64)


_VARY: dict[str, Any] = {"alloc_conf": ["", "max_split_size_mb:64"], "device": ["T4", "L4"]}


def _figures(rows: Any) -> list[Any]:
    return [(row.words, row.figures) for row in rows]


def test_a_sweep_goes_on_from_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, example = _model()
    store = tmp_path / "rows.jsonl"
    options: dict[str, Any] = {"vary": _VARY, "training": False}
    whole = graphmem.sweep(model, example, **options)
    stored = graphmem.sweep(model, example, store=store, **options)
    assert _figures(stored) == _figures(whole)
    lines = store.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    assert json.loads(lines[0])["schema"] == "graphmem.sweep_store/1"
    store.write_text("".join(lines[:3]) + lines[3][:20])  # it died while it wrote the third row
    asked: list[int] = []
    monkeypatch.setattr("graphmem.planning.sweep._one_by_one", _counted(asked))
    again = graphmem.sweep(model, example, store=store, **options)
    assert _figures(again) == _figures(whole)
    assert asked == [2]
    assert sorted(store.read_text().splitlines(keepends=True)) == sorted(lines)
    assert again.to_dict()["rows"][0]["figures"] == whole[0].figures


def _counted(asked: list[int]) -> Callable[..., Any]:
    from graphmem.planning.sweep import _one_by_one

    def counted(request: Any, chosen: Any, families: Any, report: Any, **options: Any) -> Any:
        asked.append(sum(len(group) for cards, _ in families for groups in cards for group in groups))
        return _one_by_one(request, chosen, families, report, **options)

    return counted


def test_a_store_of_another_sweep_is_refused(tmp_path: Path) -> None:
    model, example = _model()
    store = tmp_path / "rows.jsonl"
    graphmem.sweep(model, example, vary=_VARY, store=store, training=False)
    kept = store.read_bytes()
    with pytest.raises(UsageError, match="has the rows of another sweep; name another file"):
        graphmem.sweep(model, example, vary=_VARY, store=store, training=True)
    for content, error in ((b"no json\n", TraceError), (b'{"a": 1}\n', TraceError), (b"[1]\n", TraceError)):
        store.write_bytes(content)
        with pytest.raises(error, match="is no file of a sweep's rows"):
            graphmem.sweep(model, example, vary=_VARY, store=store, training=False)
        assert store.read_bytes() == content
    with pytest.raises(GraphmemError, match="Is a directory"):
        graphmem.sweep(model, example, vary=_VARY, store=tmp_path, training=False)
    assert kept
