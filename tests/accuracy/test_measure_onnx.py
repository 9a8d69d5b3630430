"""Measured sessions of the installed onnxruntime on the CPU: no GPU is needed, so they are run for real."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import helper

from graphmem.accuracy.compare import compare
from graphmem.accuracy.record import OK, ONNXRUNTIME_CPU, read_folder, read_records
from graphmem.accuracy.report import section
from graphmem.cli.main import cli
from tests.support.onnx_samples import constant, model, save, value

pytestmark = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")
WIDTH = 256


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products with a ReLU between, 256 wide, for a batch of any size; equal weights would be packed once."""
    weights = [constant(f"w{number}", np.full((WIDTH, WIDTH), number), np.float32) for number in (1, 2)]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["y"]),
    ]
    x, y = (value(name, ["batch", WIDTH]) for name in "xy")
    return save(model(nodes, [x], [y], weights), tmp_path_factory.mktemp("onnx"), "network.onnx")


def _measure(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["measure", "--runtime", "onnxruntime", *map(str, arguments)])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_a_measured_session_is_what_is_predicted(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "measured.jsonl"
    _measure(network, "--shapes", "batch=1;batch=64;batch=64", "--graphs", tmp_path / "graphs", "-o", output)
    _measure(network, "-b", "8", "--iterations", "2", "--alloc-conf", "enable_mem_pattern:0", "-o", output)
    kept = tmp_path / "graphs" / "network.onnx"
    assert kept.stat().st_size < 1000  # the weights of 512 KiB are left out
    first, second = read_folder(tmp_path)
    assert (first.status, first.case.model, second.case.model) == (OK, str(kept), str(network))
    assert first.measured is not None
    assert first.measured.iterations[-1]["reserved_peak_bytes"] == first.measured.reserved_bytes > 0
    assert len(first.measured.iterations) == 3
    found = section(ONNXRUNTIME_CPU, compare([first, second]))
    assert [(group.name, group.summary.exact) for group in found.levels] == [("allocated", 2), ("reserved", 2)]
    assert [name for name, _ in found.groups] == ["model", "graph level", "sizes", "machine"]


def test_a_measured_session_is_not_run_again(network: Path, tmp_path: Path) -> None:
    output = tmp_path / "measured.jsonl"
    for graphs in ("here", "there"):
        _measure(network, "-b", "2", "--iterations", "1", "--graphs", tmp_path / graphs, "-o", output)
    (record,) = read_records(output)
    assert record.case.model == "here/network.onnx"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zoo:mlp"], "zoo:mlp is no .onnx file"),
        (["{network}"], "batch"),  # nothing says how large it is
        (["{network}", "-b", "1", "--optimizer", "sgd"], "measures inference"),
        (["{network}", "-b", "1", "--cap"], "not for --runtime onnxruntime"),
        (["{network}", "-b", "1", "--alloc-conf", "gpu_mem_limit:1GiB"], "takes provider:cpu"),
        (["{network}", "-b", "1", "--alloc-conf", "provider:cuda"], "takes provider:cpu|is given after"),
        (["{network}", "--shapes", "nonsense"], "cannot read"),
    ],
)
def test_what_cannot_be_measured_says_why(network: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    given = [argument.format(network=network) for argument in arguments]
    result = CliRunner().invoke(cli, ["measure", "--runtime", "onnxruntime", *given, "-o", str(tmp_path / "m.jsonl")])
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "m.jsonl").exists()


def test_a_session_that_fails_is_a_record(network: Path, tmp_path: Path) -> None:
    """The weights are not there, so that the session cannot be made."""
    folder = tmp_path / "graphs"
    _measure(network, "-b", "1", "--graphs", folder, "-o", tmp_path / "a.jsonl")
    assert "failed: exit code 1" in _measure(folder / "network.onnx", "-b", "1", "-o", tmp_path / "b.jsonl")


def test_options_of_sessions_are_for_sessions() -> None:
    result = CliRunner().invoke(cli, ["measure", "zoo:mlp", "--shapes", "batch=1"])
    assert result.exit_code == 1
    assert "--shapes is for --runtime onnxruntime" in result.stderr
