"""What holds for every engine: the protocol, the waterfall, options by its own names, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import graphmem
from graphmem.cli.main import cli
from graphmem.devices import device_named
from graphmem.serving import BUILT_IN, engine_named
from graphmem.serving.base import BASES, Engine, Question, Served
from graphmem.serving.configurations import model_named
from tests.support import gguf

LLAMA = "meta-llama/Llama-3.1-8B"
#: A setting that every engine's answer has; how long a request is.
_LENGTH = 4096


def _model(name: str, folder: Path) -> str:
    if name != "llamacpp":
        return LLAMA
    path = folder / "model.gguf"
    path.write_bytes(gguf.llama(32, 4096, 32, 8, 14336, 128256, context=131072))
    return str(path)


def _served(name: str, folder: Path, gpu: str = "H100", **options: Any) -> Served:
    question = Question(model_named(_model(name, folder)), device_named(gpu), max_model_len=_LENGTH, **options)
    return engine_named(name).serve(question)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_protocol(name: str) -> None:
    engine = engine_named(name)
    assert isinstance(engine, Engine)
    assert engine.name == name
    assert name.isalnum()
    assert name == name.lower()
    assert all(part.isdigit() for part in engine.newest.split("."))
    assert engine.newest.count(".") == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_answer_sums_and_serves(name: str, tmp_path: Path) -> None:
    served = _served(name, tmp_path)
    cache = served.kv_cache
    assert served.refusal is None
    assert sum(part.bytes for part in served.parts) + cache.available_bytes == served.total_bytes
    assert all(part.bytes >= 0 for part in served.parts)
    assert 0 < cache.blocks * cache.block_bytes <= cache.available_bytes
    assert served.settings["max_model_len"] == _LENGTH
    assert "max_num_seqs" in served.settings
    assert cache.tokens >= _LENGTH
    assert cache.longest >= _LENGTH
    assert served.basis in BASES
    assert 1 <= served.request_blocks(1) <= served.request_blocks(1000) <= served.request_blocks(_LENGTH)
    json.dumps(dict(served.settings))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_smaller_card_holds_less_and_too_small_a_one_is_refused(name: str, tmp_path: Path) -> None:
    large, small = (_served(name, tmp_path, gpu).kv_cache.available_bytes for gpu in ("H100", "L40S"))
    assert small < large
    question = Question(model_named(_model(name, tmp_path)), device_named("RTX-3050"), dtype="half")
    if name == "llamacpp":
        question = question.with_(dtype="auto")
    refusal = engine_named(name).serve(question).refusal
    assert refusal is not None
    assert "\n" not in refusal


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_option_that_is_none_is_one_line(name: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["serve", _model(name, tmp_path), "--engine", name, "--no-such-option", "7"])
    assert result.exit_code == 1
    assert "no-such-option" in result.output.replace("_", "-")
    assert result.output.partition("nearest: ")[2].count("--") == 3
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_report_says_what_it_stands_on(name: str, tmp_path: Path) -> None:
    model = _model(name, tmp_path)
    report = graphmem.serve(model, gpu="H100", engine=name, max_model_len=_LENGTH, advice=False)
    assert report.to_dict()["basis"] == report.served.basis
    result = CliRunner().invoke(cli, ["serve", model, "--engine", name, "--gpu", "H100", "--no-advice"])
    assert result.exit_code == 0, result.output
    assert f"from {BASES[report.served.basis]}" in " ".join(result.output.split())
    page = CliRunner().invoke(
        cli, ["serve", model, "--engine", name, "--gpu", "H100", "--no-advice", "--format", "html"]
    )
    assert "graphmem-serving" in page.output
