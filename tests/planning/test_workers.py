"""One interface for every command that makes several captures: whoever makes them, the answer has the same bytes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphmem
from graphmem.accuracy.case import case_of
from graphmem.accuracy.compare import compare
from graphmem.accuracy.record import STUB_DRIVER, Machine, Record
from graphmem.accuracy.survey import survey
from graphmem.errors import NotModelledError, SourceError, UsageError
from graphmem.training import Inference, Training
from graphmem.workers import Workers
from graphmem.workers.crew import Loss, Opened
from tests.support.examples import first_quick

pytest.importorskip("torch")

FACTORY = """
import torch

def build(batch=8):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    return model, torch.zeros(batch, 64)
"""


class _Inline:
    """Workers of this process, which are sent everything as others are. ``dies``: number of the task that kills one."""

    name, takes_address = "inline", True

    def __init__(self, dies: int = -1) -> None:
        self.sent, self._dies = 0, dies

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Opened]:
        yield Opened(_Sending(self), lambda: jobs)

    def loss(self, error: BaseException) -> Loss:
        return Loss.TASK if isinstance(error, _Died) else Loss.NONE

    def one(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.sent += 1
        if self._dies in arguments:
            raise _Died("killed")
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        return pickle.loads(pickle.dumps(function(*arguments)))


class _Died(Exception):
    pass


class _Sending(Executor):
    def __init__(self, engine: _Inline) -> None:
        self._engine = engine

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._engine.one(fn, *args))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> _Inline:
    engine = _Inline()
    monkeypatch.setattr("graphmem.workers.crew.ENGINES", SimpleNamespace(named=lambda name: engine))
    return engine


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return "small.py:build"


def _text(answer: Any) -> str:
    return json.dumps(answer.to_dict(), sort_keys=True)


def _sweep(model: str, **where: Any) -> str:
    vary = {"optimizer": ["sgd", "adamw"], "device": ["T4", "H200"]}
    return _text(graphmem.sweep(model, vary=vary, **where))


def _advise(model: str, **where: Any) -> str:
    return _text(graphmem.advise(model, device="T4", **where))


def _plan(model: str, **where: Any) -> str:
    ask: dict[str, Any] = {"gpus": "2xT4", "global_batch": 8, "frameworks": ["ddp", "fsdp"], "confirm": 3}
    return _text(graphmem.plan(model, **ask, **where))


def _records() -> list[Record]:
    machine = Machine(STUB_DRIVER, "Tesla T4", (7, 5), 40, 1024, 15_843_721_216, {"torch": "2.13.0"})
    cases = [case_of("zoo:mlp", step, batch=batch) for step in (Training(), Inference()) for batch in (2, 4)]
    return [Record(case, "ok", machine, seconds=float(number)) for number, case in enumerate(cases)]


def _accuracy(_: str, **where: Any) -> str:
    return repr([found.predicted for found in compare(_records(), Workers(**where))])


ANSWERS: dict[str, Callable[..., str]] = {"sweep": _sweep, "plan": _plan, "advise": _advise, "accuracy": _accuracy}


@pytest.mark.parametrize("command", first_quick([*ANSWERS], 2))
def test_workers_give_the_bytes_of_this_process(command: str, model: str, inline: _Inline) -> None:
    alone = ANSWERS[command](model)
    assert inline.sent == 0
    assert ANSWERS[command](model, jobs=2) == alone
    assert inline.sent > 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "dask", "ray"])
def test_real_workers_do(engine: str, model: str) -> None:
    pytest.importorskip({"processes": "joblib", "dask": "distributed", "ray": "ray"}[engine])
    for answer in ANSWERS.values():
        assert answer(model, jobs=2, engine=engine) == answer(model)


def test_results_are_in_the_order_of_the_items_whoever_is_begun_first(inline: _Inline) -> None:
    workers = Workers(jobs=2)
    assert list(workers.map(abs, [-3, 1, -2], cost=abs)) == [3, 1, 2]
    assert list(Workers().map(abs, [-3, 1, -2])) == [3, 1, 2]
    inline._dies = 1
    three, error, two = workers.map(abs, [-3, 1, -2])
    assert (three, two, str(error)) == (3, 2, "its worker died 2 times, perhaps for lack of memory: killed")


def test_a_row_whose_workers_died_has_that_as_its_error(inline: _Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    records = _records()
    inline._dies = records[1]  # type: ignore[assignment]
    found = compare(records, Workers(jobs=2), predict_one=_predicted)
    assert [one.predicted.error[:20] for one in found] == ["", "its worker died 2 ti", "", ""]
    cases = [record.case for record in records]
    inline._dies = cases[0]  # type: ignore[assignment]
    assert [bool(one.error) for one in survey(cases[:2], workers=Workers(jobs=2))] == [True, False]


def _predicted(record: Record) -> Any:
    from graphmem.accuracy.compare import Predicted

    return Predicted()


def test_errors_with_values_of_their_own_are_sent() -> None:
    error = pickle.loads(pickle.dumps(NotModelledError("no such provider", "TPU", {"weights": 5})))
    assert (str(error), error.provider, error.known) == ("no such provider", "TPU", {"weights": 5})
    assert str(pickle.loads(pickle.dumps(SourceError("gone")))) == "gone"


def test_who_works_is_checked_before_anything_is_done() -> None:
    for options, words in (
        ({"jobs": 0}, "jobs is a whole number of at least 1, not 0"),
        ({"engine": "spark"}, "unknown engine 'spark'; accepted: processes, dask, ray"),
        ({"scheduler": "tcp://127.0.0.1:1"}, "--scheduler is of an engine with workers elsewhere"),
    ):
        for ask in (
            lambda where: graphmem.advise("zoo:none", **where),
            lambda where: graphmem.plan("zoo:none", gpus="2xT4", global_batch=2, **where),
            lambda where: graphmem.sweep("zoo:none", vary={"batch": [1]}, **where),
        ):
            with pytest.raises(UsageError, match=words):
                ask(options)


def test_as_many_as_cores_are_had_where_nobody_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("joblib")
    monkeypatch.setattr("os.cpu_count", lambda: 7)
    assert Workers().on_all_cores().jobs == 7
    assert Workers(jobs=1).on_all_cores().jobs == 1
    assert replace(Workers(), engine="dask").on_all_cores().jobs is None
    monkeypatch.setattr("graphmem.workers.find_spec", lambda name: None)
    assert Workers().on_all_cores().crew() is None
