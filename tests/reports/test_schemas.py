"""Every answer is as its JSON Schema says, and the schemas are of all answers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given

from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.reports.schemas import DOCUMENTS, names, schema_of
from tests import places
from tests.reports.test_reports import estimates
from tests.support import onnx_samples
from tests.support.shapes import differences

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 500,
}  # fmt: skip
_PROJECT = """
[tool.graphmem.watch.fits]
model = "perceptron.onnx"
batch = 2
gpu = "T4"
budget = "1KiB"

[tool.graphmem.watch.fails]
model = "none.onnx"
"""
_JOBS = """
[[job]]
model = "perceptron.onnx"
batch = 2

[[job]]
memory = "90GiB"
"""
_LOG = """
vLLM API server version 0.32.0
non-default args: {'model': 'meta-llama/Llama-3.1-8B', 'max_model_len': 8192, 'enforce_eager': True}
GPU 0: NVIDIA L40S
Available KV cache memory: 23.50 GiB
"""
_SERVE = ("serve", "meta-llama/Llama-3.1-8B", "--gpu", "L40S", "--enforce-eager", "--max-model-len", "8192")
_LENGTHS = ("--lengths", "p50=800,p99=6000")
#: Command lines by the document that they write.
_ANSWERS: dict[str, list[tuple[str, ...]]] = {
    "estimate": [("analyze", "perceptron.onnx", "-b", "2"), ("analyze", "perceptron.onnx", "-b", "9", "--gpu", "T4")],
    "fit": [
        ("fit", "perceptron.onnx", "--gpu", "T4", "--at-most", "4"),
        ("fit", "perceptron.onnx", "--gpu-memory", "100MiB"),
    ],
    "advice": [("advise", "perceptron.onnx", "-b", "2", "--gpu", "T4")],
    "sweep": [("sweep", "perceptron.onnx", "--vary", "batch=1,2", "--vary", "dtype=fp32,bf16")],
    "comparison": [("compare", "before.json", "after.json")],
    "check": [("check",), ("check", "--update", "fits"), ("check", "fits")],
    "serving": [
        (*_SERVE, *_LENGTHS, "--load", "64"),
        (*_SERVE, "--no-advice", "--find", "max-num-seqs", *_LENGTHS),
        (*_SERVE[:3], "T4", "--dtype", "half", "--no-advice"),
        (*_SERVE, "--no-advice", "--arrivals", "2/s", *_LENGTHS, "--output-lengths", "p50=200", "--duration", "30s"),
    ],
    "serving_log": [("serve", "--from-log", "engine.log")],
    "plan": [("plan", "hf:config.json", "--gpus", "2xT4", "--global-batch", "4", "-s", "32", "--frameworks", "ddp")],
    "pack": [("pack", "jobs.toml", "--gpus", "1xT4")],
    "gpus": [("gpus",), ("gpus", "T4")],
    "zoo": [("zoo",)],
    "doctor": [("doctor",)],
    "cache": [("cache",)],
    "operators": [("explain", "aten.index_put_")],
    "trace": [("export", "perceptron.onnx", "-b", "2")],
    "measured": [("measure", "--runtime", "onnxruntime", "perceptron.onnx", "-b", "2")],
}
#: Documents of which no command here writes one; tests of what writes them hold them against their description.
_ELSEWHERE = {"oom", "watched", "verification", "calibration", "accuracy"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    onnx_samples.save(onnx_samples.perceptron(), folder).rename(folder / "perceptron.onnx")
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "jobs.toml").write_text(_JOBS)
    (folder / "engine.log").write_text(_LOG)
    return folder


def _document(*words: str) -> Any:
    result = CliRunner().invoke(cli, [words[0], "--format", "json", *words[1:]], prog_name="graphmem")
    assert result.stdout.startswith("{"), result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in _ELSEWHERE])
def test_answers_are_as_described(name: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    if needed := {"plan": "transformers", "operators": "transformers", "measured": "onnxruntime"}.get(name):
        pytest.importorskip(needed)
    if name == "comparison":
        for file, batch in (("before.json", "1"), ("after.json", "2")):
            Path(file).write_text(json.dumps(_document("analyze", "perceptron.onnx", "-b", batch)))
    for words in _ANSWERS[name]:
        document = _document(*words)
        assert document["schema"] == f"graphmem.{name}/1"
        assert differences(document) == [], words
        _validate(document, schema_of(name))


_PROGRAM = """
import contextlib, socket, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    model(torch.zeros(4, 64, device="cuda")).sum().backward()
    optimizer.step()
torch.save(model.state_dict(), "model.pt")
with contextlib.suppress(OSError):
    socket.create_connection(("203.0.113.1", 80))
"""


@pytest.mark.parametrize(
    ("words", "details"),
    [
        (("run", "--quiet", "--gpu", "T4", "train.py"), {"program", "sandbox"}),
        (("analyze", "train.py:build", "--ddp", "--world-size", "4", "--gpu", "T4"), {"processes", "loop", "formulas"}),
        (("analyze", "train.py:build", "--runtime", "tensorflow", "--gpu", "T4"), {"loop", "memory_limit_bytes"}),
    ],
)
def test_details_are_as_described(
    words: tuple[str, ...], details: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    built = "import torch\ndef build():\n    return torch.nn.Linear(64, 64), torch.zeros(4, 64)\n"
    (tmp_path / "train.py").write_text(_PROGRAM if words[0] == "run" else built)
    document = _document(*words)
    assert details <= set(document["details"])
    assert differences(document) == []
    _validate(document, schema_of("estimate"))


@given(estimates)
def test_any_estimate_is_as_described(estimate: Estimate) -> None:
    assert differences(json.loads(estimate.to_json())) == []


def test_a_document_that_is_another_is_told() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = _document("gpus")
    document["gpus"][0]["capacity_bytes"] = "much"
    assert differences(document) == ["gpus.gpus[0].capacity_bytes: 'much' is no size"]
    with pytest.raises(jsonschema.ValidationError, match="much"):
        _validate(document, schema_of("gpus"))


def test_a_row_has_its_places() -> None:
    """A trace's storages have five places, or six where there are private pools; versions of traces are five."""
    empty: dict[str, list[int]] = {name: [] for name in ("kind", "subject", "operator", "stream")}
    trace = {"schema": "graphmem.trace/4", "source": "", "notes": {}, "phases": [], "operators": [], "events": empty}
    row = [512, "INPUT", 0, "DEVICE", ""]
    document = {**trace, "storages": [row, [*row, 1]]}
    assert differences(document) == []
    _validate(document, schema_of("trace"))
    assert differences({**trace, "storages": [row[:4]]}) == ["trace.storages[0]: 4 places"]
    jsonschema = pytest.importorskip("jsonschema")
    for wrong in ({**trace, "storages": [row[:4]]}, {**document, "schema": "graphmem.trace/6"}):
        with pytest.raises(jsonschema.ValidationError):
            _validate(wrong, schema_of("trace"))


def test_the_schema_of_a_document_has_what_it_refers_to() -> None:
    assert schema_of("graphmem.fit/1") == json.loads(CliRunner().invoke(cli, ["schema", "fit"]).stdout)
    assert schema_of("fit")["properties"]["schema"] == {"const": "graphmem.fit/1"}
    assert {"estimate", "moment", "cause"} <= schema_of("fit")["$defs"].keys()
    with pytest.raises(UsageError, match="no document 'nothing'; accepted: estimate, fit"):
        schema_of("nothing")


def test_the_pages_name_every_document() -> None:
    page = (places.ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8")
    assert [name for name in DOCUMENTS if f"`graphmem.{name}/1`" not in page] == []
    assert CliRunner().invoke(cli, ["schema"]).stdout.split() == names()


def _validate(document: Any, schema: Any) -> None:
    """By a library where it is installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return
    jsonschema: Any = importlib.import_module("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, jsonschema.Draft202012Validator)
