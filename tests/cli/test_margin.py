"""``--margin`` and what becomes of the verdict, in every command that has one: words, JSON and exit codes agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphmem.analyze import replay_trace
from graphmem.cli.main import cli
from graphmem.devices import custom_device
from graphmem.trace import Category, TraceBuilder, to_json
from graphmem.units import GIB
from tests.support import onnx_samples


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="graphmem")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    builder = TraceBuilder("a run")
    builder.alloc(GIB, builder.operator("aten.mm", phase=builder.phase(1, "forward")), Category.ACTIVATION)
    path = tmp_path / "trace.json"
    path.write_text(to_json(builder.build()))
    return path


def capacity(trace: Path, share: float) -> str:
    """Memory of a card that this share of runs fits."""
    builder = TraceBuilder("a run")
    builder.alloc(GIB, builder.operator("aten.mm", phase=builder.phase(1, "forward")), Category.ACTIVATION)
    estimate = replay_trace(builder.build(), device=custom_device(40 * GIB, like="A100-40GB"), alloc_conf="")
    return str(estimate.device + estimate.doubts.at("device", share) + 4096)


COMMANDS = {
    "analyze": ("analyze", "zoo:mlp"),
    "fit": ("fit", "zoo:mlp", "--gpu", "T4"),
    "sweep": ("sweep", "zoo:mlp", "--vary", "batch=1,2"),
    "advise": ("advise", "zoo:mlp"),
    "replay": ("replay", "TRACE"),
    "run": ("run", "--margin", "MARGIN", "PROGRAM"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("margin", ["99", "p30", "p101", "p99 %", "likely"])
def test_a_margin_that_is_none_is_refused_in_one_line(command: str, margin: str, trace: Path) -> None:
    known = {"TRACE": str(trace), "MARGIN": margin, "PROGRAM": __file__}
    words = [known.get(word, word) for word in COMMANDS[command]]
    result = run(*words, *(() if "--margin" in words else ("--margin", margin)))
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert f"margin {margin!r} cannot be read" in line
    assert "p50 to p100" in line


@pytest.mark.parametrize(
    ("share", "margin", "code", "verdict"),
    [
        (0.8, None, 0, "likely"),
        (0.8, "p75", 0, "yes"),
        (0.8, "p95", 3, "likely"),
        (1.0, None, 0, "yes"),
        (1.0, "p99", 0, "yes"),
        (0.2, None, 3, "likely not"),
        (0.2, "p75", 3, "no"),
    ],
)
def test_words_json_and_exit_code_agree(trace: Path, share: float, margin: str | None, code: int, verdict: str) -> None:
    card = ("--gpu-memory", capacity(trace, share), "--gpu-like", "A100-40GB", "--alloc-conf", "")
    asked = ("replay", str(trace), *card, "--fail-on-oom", *(() if margin is None else ("--margin", margin)))
    result = run(*asked, "--format", "json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)["fits"]
    assert found["verdict"] == verdict
    assert found["margin"] == (None if margin is None else int(margin[1:]) / 100)
    assert found["probability"] == pytest.approx(share, abs=0.01)
    shown = run(*asked)
    assert shown.exit_code == code
    assert ("LIKELY" in shown.stdout) == verdict.startswith("likely")
    assert ("DOES NOT FIT" in shown.stdout) == (not found["fits"])
    assert "How sure: allocated and reserved exact" in shown.stdout
    assert (f" at {margin}" in " ".join(shown.stdout.split())) == (margin is not None)


def test_two_reports_show_both_verdicts(trace: Path, tmp_path: Path) -> None:
    reports = []
    for share in (1.0, 0.8):
        path = tmp_path / f"{share}.json"
        options = (
            "--gpu-memory",
            capacity(trace, share),
            "--gpu-like",
            "A100-40GB",
            "--format",
            "json",
            "-o",
            str(path),
        )
        assert run("replay", str(trace), "--alloc-conf", "", *options).exit_code == 0
        reports.append(str(path))
    compared = json.loads(run("compare", *reports, "--format", "json").stdout)
    before, after = compared["fits"]["before"], compared["fits"]["after"]
    assert before == "yes"
    assert after.startswith("likely, ")
    shown = " ".join(run("compare", *reports).stdout.split())
    assert f"fits yes -> {after}" in shown


@pytest.mark.parametrize("fits", ["yes", {"verdict": "maybe"}, {"verdict": "likely", "probability": 7, "margin": None}])
def test_a_verdict_that_no_report_has_is_refused(trace: Path, tmp_path: Path, fits: object) -> None:
    path = tmp_path / "report.json"
    assert run("replay", str(trace), "--format", "json", "-o", str(path)).exit_code == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "fits": fits}))
    result = run("compare", str(path), str(path))
    assert result.exit_code == 1
    assert "damaged" in result.stderr


def test_the_safe_size_is_the_one_of_the_margin(tmp_path: Path) -> None:
    """Of an option that is not followed no size is safe, and the search says why. Both providers were recorded."""
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    asked = ("fit", model, "--gpu-memory", "2GiB", "--gpu-like", "T4", "--at-most", "100000000")
    unbounded = run(*asked, "--margin", "p99", "--alloc-conf", "gpu_external_alloc:1")
    assert unbounded.exit_code == 3
    assert "nothing bounds: gpu_external_alloc" in " ".join(unbounded.stdout.split())
    known = (*asked, "--alloc-conf", "provider:cpu")
    safe = {}
    for margin in ("p60", "p99", None):
        result = run(*known, *(() if margin is None else ("--margin", margin)), "--format", "json")
        assert result.exit_code == 0, result.output
        safe[margin] = json.loads(result.stdout)["safe"]["value"]
    assert 0 < safe[None] <= safe["p99"] <= safe["p60"]
