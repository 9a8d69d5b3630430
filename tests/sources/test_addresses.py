"""An address of the network is answered with what to write instead, wherever a file or model is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli

_HUB = "https://huggingface.co/openai-community/gpt2"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["analyze", _HUB], "for this model of the Hub write hf:openai-community/gpt2"),
        (["analyze", f"hf:{_HUB}/tree/main"], "for this model of the Hub write hf:openai-community/gpt2"),
        (["fit", _HUB, "--gpu", "T4"], "for this model of the Hub write hf:openai-community/gpt2"),
        (["analyze", "https://example.com/model.onnx"], "save the file and give its path"),
        (["run", "https://example.com/train.py"], "save the file and give its path"),
        (["replay", "https://example.com/a.pickle"], "save the file and give its path"),
        (["compare", "https://example.com/a.json", "b.json"], "save the file and give its path"),
    ],
)
def test_an_address_is_one_message(words: list[str], instead: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, words, prog_name="graphmem")
    assert done.exit_code == 1
    assert "is an address, and graphmem uses no network; " + instead in done.stderr
