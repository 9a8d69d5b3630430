"""Launchers by options: the environment that torchrun and accelerate give a program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

from graphmem.cli.command_line import Launch, launch_of, program_or_command
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.training.program import Program

PROGRAM = """
import os, torch
import torch.distributed as dist
dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")))
print(dist.get_rank(), dist.get_world_size(), os.environ.get("ACCELERATE_MIXED_PRECISION"))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).to(f"cuda:{local}"), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100_000):
    model(torch.zeros(8, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", "--format", "json", *arguments], prog_name="graphmem")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node 8", ["0 0 8 8 29500", "0 8 None"]),
        ("--nproc_per_node=4 --nnodes 2 --node_rank 1 --master-port 1234", ["4 0 8 4 1234", "4 8 None"]),
        pytest.param("--nproc-per-node 4 --nnodes 2 --rank 6", ["6 2 8 4 29500", "6 8 None"], marks=pytest.mark.slow),
    ],
)
def test_torchrun(options: str, said: list[str], program: str) -> None:
    pytest.importorskip("torch")
    result = run(*options.split(), program)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[:2] == said
    document = json.loads(result.stdout)
    # Buckets are built anew after the first step, which the second shows; the fourth is as the third.
    begin, _, end = document["step"].partition(" (more than 3: its steps differ)")
    assert begin == "whole program, 4 optimizer steps"
    assert re.match(r", rank \d of 8 processes", end)
    assert document["breakdown"]["COMMUNICATION"] >= 512 * 512 * 4


def test_accelerate(program: str, tmp_path: Path) -> None:
    """The program's environment is that of ``accelerate launch``, which starts it."""
    pytest.importorskip("accelerate")
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\nnum_machines: 2\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "graphmem", "run", "--format", "json", "--config", str(path), program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"0 0 4 2 29500", "0 4 bf16"} <= set(done.stderr.splitlines())
    assert "of 4 processes" in json.loads(done.stdout)["step"]


def test_what_accelerate_starts() -> None:
    launch = Launch(config="config.yaml")
    words = program_or_command(("train.py", "x"), None, None, launch)
    assert isinstance(words, tuple)
    assert words[1:] == ("-m", "accelerate.commands.launch", "--config_file", "config.yaml", "train.py", "x")
    words = program_or_command(("x",), "package.train", None, launch)
    assert isinstance(words, tuple)
    assert words[-3:] == ("--module", "package.train", "x")
    with pytest.raises(UsageError, match="no program text"):
        program_or_command((), None, "pass", launch)
    with pytest.raises(UsageError, match="--config starts a Python program, not bash"):
        program_or_command(("bash", "train.sh"), None, None, launch)


def test_an_option_of_ours_behind_the_program_is_told(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = program_or_command((program, "--gpu=T4", "--lr", "1"), None, None, Launch())
    assert isinstance(line, Program)
    assert line.arguments == ("--gpu=T4", "--lr", "1")
    assert "--gpu=T4 stands behind" in capsys.readouterr().err
    program_or_command((program, "--lr", "1"), None, None, Launch())
    assert not capsys.readouterr().err


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="need --nproc-per-node"):
        launch_of(None, 2, None, None, None, None)
    with pytest.raises(UsageError, match="--config says how many"):
        launch_of(2, None, None, None, None, "config.yaml")
    with pytest.raises(UsageError, match="--node-rank 3 of 2 nodes"):
        launch_of(8, 2, 3, None, None, None)
    with pytest.raises(UsageError, match="No such file"):
        launch_of(None, None, None, None, None, "not_there.yaml")
