"""Measuring runs: without a GPU, and on the stub driver.

Set GRAPHMEM_CUDA_PYTHON to the interpreter of an environment with a CUDA build of PyTorch, and GRAPHMEM_STUB_DRIVER to
the library to preload there, to measure for real.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch

from graphmem.accuracy.case import Case, case_of, zoo_cases
from graphmem.accuracy.compare import Comparison, compare, predict
from graphmem.accuracy.divergence import Changes, changes_of, describe_divergence, measured_changes
from graphmem.accuracy.measure import Plan, machine_here, measure
from graphmem.accuracy.record import FAILED, OK, STUB_DRIVER, Machine, Measured, Record, append, read_records
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.training import Inference, Training
from tests import places
from tests.support import platforms
from tests.support.examples import first_quick
from tests.support.shapes import differences

ROOT = places.ROOT
CUDA_PYTHON, STUB = os.environ.get("GRAPHMEM_CUDA_PYTHON"), os.environ.get("GRAPHMEM_STUB_DRIVER")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
on_stub = pytest.mark.skipif(not (CUDA_PYTHON and STUB), reason="needs a CUDA build of PyTorch and a stub driver")


@no_gpu
@pytest.mark.parametrize("command", first_quick([["calibrate"], ["measure", "zoo:mlp"], ["verify", "zoo:mlp"]], 2))
def test_without_a_gpu_it_says_so_in_one_line(command: list[str]) -> None:
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert result.stderr.startswith("graphmem: no CUDA GPU to measure on")
    assert len(result.stderr.strip().splitlines()) == 1


def test_measuring_nothing_is_refused() -> None:
    result = CliRunner().invoke(cli, ["measure"])
    assert result.exit_code == 1
    assert "name the models to measure, or give --zoo" in result.stderr


# --- a measuring process that is not there ----------------------------------------------------------------------------


def _fake_python(folder: Path, body: str) -> str:
    """An interpreter that answers every request with ``body``."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, json, time\nrequest = json.load(sys.stdin)\n{body}\n")
    path.chmod(0o755)
    return str(path)


def _cases(*batches: int) -> list[Case]:
    return [case_of("zoo:mlp", Inference(), batch) for batch in batches]


@platforms.SCRIPTS
def test_a_process_that_dies_becomes_a_record(tmp_path: Path) -> None:
    python = _fake_python(tmp_path, "sys.exit('the driver is gone')")
    (record,) = measure(_cases(1), Plan(python=python))
    assert (record.status, record.error) == (FAILED, "exit code 1: the driver is gone")
    with pytest.raises(UsageError, match="the driver is gone"):
        machine_here(Plan(python=python))


@platforms.SCRIPTS
def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    python = _fake_python(tmp_path, "time.sleep(60)")
    (record,) = measure(_cases(1), Plan(python=python, case_seconds=0.5))
    assert record.error == "took longer than 0 s"


@platforms.SCRIPTS
def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    output = tmp_path / "measured.jsonl"
    append(output, [Record(_cases(1)[0], OK), Record(_cases(2)[0], FAILED)])
    python = _fake_python(tmp_path, "print(json.dumps({'status': 'out of memory'}))")
    done = list(measure(_cases(1, 2, 3), Plan(output=output, python=python)))
    assert [record.case.batch for record in done] == [2, 3]  # what failed is tried again
    assert len(read_records(output)) == 4
    assert list(measure(_cases(1, 2, 3), Plan(output=output, python=python))) == []


@platforms.SCRIPTS
def test_a_budget_ends_the_run_between_cases(tmp_path: Path) -> None:
    python = _fake_python(tmp_path, "time.sleep(0.3); print(json.dumps({'status': 'ok'}))")
    done = list(measure(_cases(1, 2, 3), Plan(python=python, budget_seconds=0.2)))
    assert len(done) == 1


@platforms.SCRIPTS
def test_the_allocator_of_the_caller_does_not_reach_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:20")
    body = "import os; print(json.dumps({'status': 'ok', 'error': os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '-')}))"
    python = _fake_python(tmp_path, body)
    cases = [case_of("zoo:mlp", Inference()), case_of("zoo:mlp", Inference(), alloc_conf="expandable_segments:True")]
    assert [record.error for record in measure(cases, Plan(python=python))] == ["-", "expandable_segments:True"]


# --- the stub driver --------------------------------------------------------------------------------------------------


def _stub_plan(folder: Path) -> Plan:
    assert CUDA_PYTHON is not None
    assert STUB is not None
    environment = {"LD_PRELOAD": STUB, "FAKE_CUDA_TOTAL_MIB": "1000000", "PYTHONPATH": str(ROOT)}
    return Plan(output=folder / "measured.jsonl", traces=folder, python=CUDA_PYTHON, environment=environment)


@on_stub
def test_the_stub_driver_measures_what_is_predicted(tmp_path: Path) -> None:
    cases = [*zoo_cases(("mlp", "gcn"), ("training",)), case_of("zoo:mlp", Training(optimizer="sgd"), batch=4)]
    records = list(measure(cases, _stub_plan(tmp_path)))
    assert [record.status for record in records] == [OK] * 3, [record.error for record in records]
    assert {record.machine.source for record in records if record.machine} == {STUB_DRIVER}
    for compared in compare(records):
        assert (compared.error("allocated"), compared.error("reserved")) == (0, 0)


@on_stub
def test_a_measured_trace_is_lined_up_with_the_prediction(tmp_path: Path) -> None:
    (record,) = measure(zoo_cases(("gcn",), ("training",)), _stub_plan(tmp_path))
    assert record.machine is not None
    predicted = predict(record.case, record.machine, keep_trace=True)
    assert predicted.trace is not None
    measured = measured_changes(tmp_path / record.trace)
    assert changes_of(predicted.trace).allocations().sizes == measured.allocations().sizes
    (summary,) = describe_divergence(predicted.trace, measured, 5)
    assert summary.endswith("100.00% match in order")


@on_stub
def test_a_case_that_does_not_fit_its_cap_is_a_record(tmp_path: Path) -> None:
    plan = _stub_plan(tmp_path)
    capped = Plan(**{**vars(plan), "cap": lambda case: 100 << 20})
    (record,) = measure(zoo_cases(("mlp",), ("training",)), capped)
    assert (record.status, record.cap_bytes) == ("out of memory", 100 << 20)
    assert not Comparison(record, predict(record.case, record.machine)).is_comparable  # type: ignore[arg-type]


# --- a card that is not there -----------------------------------------------------------------------------------------

_MACHINE = Machine(
    STUB_DRIVER, "NVIDIA T4", (7, 5), 40, 1024, 16 << 30, {"torch": "2.13.0", "cuda": "13.0", "driver": ""}
)


def _written(*words: str) -> Any:
    """The document that a command writes, which is as its schema describes it."""
    result = CliRunner().invoke(cli, [*words, "--format", "json"])
    document = json.loads(result.stdout)
    assert differences(document) == []
    return document


def test_what_verify_writes_is_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(1 << 20, 2 << 20, 20 << 20, 0, None)
    record = Record(_cases(2)[0], OK, _MACHINE, measured, trace="t.json.gz")
    for name, value in (("machine_here", _MACHINE), ("measure_one", record)):
        monkeypatch.setattr(f"graphmem.accuracy.measure.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("graphmem.accuracy.divergence.measured_changes", lambda _: Changes((1 << 20,), (0,)))
    document = _written("verify", "zoo:mlp", "--inference", "-b", "2")
    assert document["levels"]["reserved"]["measured_bytes"] == 20 << 20


def test_what_calibrate_writes_is_as_described(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"context_bytes": 300 << 20, "meter": "nvml", "cublas_workspace_bytes": 8 << 20}
    answer = {"machine": json.loads(json.dumps(asdict(_MACHINE))), "calibration": found}
    monkeypatch.setattr("graphmem.accuracy.calibrate.ask", lambda *_: answer)
    monkeypatch.setattr("graphmem.cli.calibrate.write_user_row", lambda _: Path("cards.json"))
    assert _written("calibrate")["context_bytes"] == 300 << 20
