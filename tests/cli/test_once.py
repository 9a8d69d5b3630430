"""An option that takes one value is given once, and a switch one way: nothing is dropped unsaid."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import graphmem
from graphmem.cli.main import cli

_FACTORY = "import torch\ndef build(batch):\n    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(_FACTORY)
    return f"{tmp_path / 'net.py'}:build"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--gpu T4 --gpu L4", 2, "--gpu is given more than once; give it once (graphmem sweep --vary gpu=V1,V2"),
        ("-b 4 --batch-size 8", 2, "--batch is given more than once"),
        ("--budget 1GiB --budget 1GiB", 2, "--budget is given more than once; give it once\n"),
        ("--inference --training", 2, "--training and --inference are both given; give one of them"),
        ("--dim a=1 --dim a=2", 1, "--dim a is given more than once; give it once"),
        ("--optimizer-arg lr=1 --optimizer-arg lr=2", 1, "--optimizer-arg lr is given more than once"),
    ],
)
def test_what_is_given_twice_is_one_message(model: str, words: str, code: int, said: str) -> None:
    done = CliRunner().invoke(cli, ["analyze", model, *words.split()], prog_name="graphmem")
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr


def test_options_of_the_program_are_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("import sys, torch\ntorch.zeros(len(sys.argv), device='cuda')\n")
    words = ["run", "--gpu", "T4", str(tmp_path / "train.py"), "--size", "1", "--size", "2", "--gpu", "L4"]
    done = CliRunner().invoke(cli, words, prog_name="graphmem")
    assert done.exit_code == 0, done.stderr


def test_a_number_of_processes_that_share_nothing_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(graphmem.GraphmemError, match=r"a world_size of 4 alone changes nothing; say too how"):
        graphmem.analyze("zoo:resnet18", batch=1, training=graphmem.Training(world_size=4))
