"""``graphmem run`` of any command line: what is followed, what is refused by name, what comes through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
if not sys.platform.startswith("linux"):
    pytest.skip("other programs are started in Linux's sandboxes alone", allow_module_level=True)

from graphmem.cli.command_line import Launch, program_or_command
from graphmem.errors import UsageError
from graphmem.following.words import PythonLine, launched_options, rank_of
from graphmem.trace import to_json
from graphmem.training.program import Program
from tests.support.examples import first_quick

TRAIN = """
import sys, torch
from torch import nn
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100_000):
    optimizer.zero_grad()
    model(torch.randn(int(sys.argv[1]), 64, device="cuda")).sum().backward()
    optimizer.step()
"""
#: Environments of ours that would change what a child does.
_OWN = ("GRAPHMEM_FOLLOW", "GRAPHMEM_CAPTURED", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and stderr of ``graphmem run`` in ``folder``."""
    report = folder.parent / f"{folder.name}.json"
    report.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in _OWN}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    command = [sys.executable, "-m", "graphmem", "run", "--gpu", "T4", "--format", "json", "-o", str(report), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    document = json.loads(report.read_text()) if report.exists() else {}
    return done.returncode, document, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    (place / "train.py").write_text(TRAIN, encoding="utf-8")
    return place


def peaks(document: dict[str, Any]) -> tuple[int, int]:
    return document["peak"]["allocated_bytes"], document["peak"]["reserved_bytes"]


@pytest.mark.slow
def test_a_script_of_the_shell_is_as_its_program(folder: Path) -> None:
    """Every process of it is followed, the fullest is shown; its output, files and exit codes are the script's own."""
    script = 'python train.py 4096 && python -c "print(40 + 2)" > answer\npython train.py 16\ncat answer\nexit 7'
    (folder / "train.sh").write_text(script)
    _, direct, _ = run(folder, "train.py", "4096")
    code, followed, words = run(folder, "bash", "train.sh")
    assert peaks(followed) == peaks(direct)
    assert [one["words"] for one in followed["details"]["followed"]["processes"]] == [
        "train.py 4096",
        "train.py 16",
    ]
    assert followed["details"]["followed"]["fullest"] == 0
    assert (code, followed["details"]["program"]["code"]) == (1, 7)
    assert "42\n" in words
    assert "the command ended with exit code 7" in words.splitlines()[-1]
    assert not (folder / "answer").exists()
    assert [one["path"] for one in followed["details"]["sandbox"]["files"]["written"]] == [str(folder / "answer")]


@pytest.mark.slow
def test_torchrun_starts_one_process_for_all_nodes(folder: Path) -> None:
    source = "import os, torch.distributed as dist\ndist.init_process_group('nccl')\n" + TRAIN.replace(
        "nn.Linear(64, 64).cuda()",
        "nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(f\"cuda:{os.environ['LOCAL_RANK']}\"))",
    ).replace('device="cuda"', "device=f\"cuda:{os.environ['LOCAL_RANK']}\"")
    (folder / "train.py").write_text(source + "print('rank', dist.get_rank(), torch.cuda.device_count())")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "4", "--nnodes", "2", "train.py", "16")
    code, followed, words = run(folder, "--rank", "5", *launcher)
    assert code == 0, words
    assert followed["details"]["processes"] == {"world_size": 8, "rank": 5, "nproc_per_node": 4, "groups": [8]}
    assert "rank 5 4\n" in words
    _, direct, _ = run(folder, "--nproc-per-node", "4", "--nnodes", "2", "--rank", "5", "train.py", "16")
    assert peaks(followed) == peaks(direct)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_starts_as_many_processes_as_it_is_told(folder: Path) -> None:
    (folder / "train.py").write_text("from accelerate import Accelerator\nAccelerator()\n" + TRAIN)
    code, followed, words = run(folder, "accelerate", "launch", "--num_processes", "2", "train.py", "16")
    assert code == 0, words
    assert followed["details"]["processes"]["world_size"] == 2


@pytest.mark.parametrize(
    ("options", "cards"),
    [("--num_processes 8 --num_machines=2", 4), ("--num-processes=2", 2), ("--mixed_precision bf16", 1)],
)
def test_cards_that_a_launcher_asks_for(options: str, cards: int) -> None:
    assert PythonLine(["python", "-m", "accelerate.commands.launch", *options.split(), "train.py"]).cards == cards


def test_processes_out_of_sight_are_ended_and_named(folder: Path) -> None:
    code, document, words = run(folder, "bash", "-c", "python -I train.py 16; touch trained")
    assert (code, document) == (1, {})
    assert "python -I train.py 16 uses PyTorch where graphmem cannot look" in words.splitlines()[-1]


@pytest.mark.parametrize("method", first_quick(["spawn", "fork"], 1))
def test_workers_that_use_the_card_are_refused(method: str, folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def work(): torch.zeros(1 << 20, device='cuda')\n"
        f"if __name__ == '__main__':\n    mp.set_start_method('{method}')\n"
        "    one = mp.Process(target=work)\n    one.start()\n    one.join()\n    torch.zeros(8, device='cuda')\n"
    )
    code, document, words = run(folder, "train.py")
    assert (code, document) == (1, {})
    assert "write torch.multiprocessing.spawn" in words or "start processes by torch.multiprocessing.spawn" in words


def test_a_program_cannot_start_others_out_of_sight(folder: Path) -> None:
    (folder / "start.py").write_text("import subprocess\nsubprocess.run(['python', '-E', 'train.py', '16'])\n")
    code, document, words = run(folder, "start.py")
    assert (code, document) == (1, {})
    assert "python -E train.py 16 uses PyTorch where graphmem cannot look" in words.splitlines()[-1]


@pytest.mark.slow
def test_text_by_standard_input(folder: Path) -> None:
    (folder / "train.sh").write_text(f"python - 16 <<EOF\n{TRAIN}\nEOF\n")
    code, followed, words = run(folder, "CUDA_VISIBLE_DEVICES=0,1", "./train.sh")
    assert code == 0, words
    assert peaks(followed) == peaks(run(folder, "train.py", "16")[1])


def test_spawned_functions_run_here(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def work(rank, size): print('rank', rank, 'of', size); torch.zeros(size << 20, device='cuda')\n"
        "if __name__ == '__main__':\n    n = torch.cuda.device_count()\n    mp.spawn(work, args=(n,), nprocs=n)\n"
    )
    code, document, words = run(folder, "--cards", "3", "python", "train.py")
    assert code == 0, words
    assert document["peak"]["requested_bytes"] == 3 * 4 << 20
    assert words.count("rank 0 of 3\n") == 1


def test_a_program_may_start_itself_again(folder: Path) -> None:
    """As Lightning does for further cards: other ranks end at once, and a child that trains is followed."""
    (folder / "start.py").write_text(
        "import os, subprocess, sys\n"
        "for rank in (0, 1):\n"
        "    environment = {**os.environ, 'LOCAL_RANK': str(rank)}\n"
        "    subprocess.run([sys.executable, 'train.py', str(16 << rank)], env=environment, check=True)\n"
    )
    code, document, words = run(folder, "start.py")
    assert code == 0, words
    assert document["model"] == "train.py 16"
    assert "followed" not in document["details"]


@pytest.mark.slow
def test_notebooks_and_text(folder: Path) -> None:
    lines = TRAIN.replace("int(sys.argv[1])", "rows").strip().splitlines()
    cells = ["%matplotlib inline\n" + "\n".join(lines[:2]), "%%bash\nfalse", "!pip install x\nrows = 16\n" + lines[2]]
    cells += ["\n".join(lines[3:]), "display(model)"]
    document = {"cells": [{"cell_type": "code", "source": one} for one in cells], "nbformat": 4}
    (folder / "train.ipynb").write_text(json.dumps(document))
    _, direct, _ = run(folder, "train.py", "16")
    code, notebook, words = run(folder, "train.ipynb")
    assert code == 0, words
    code, text, words = run(folder, "-c", TRAIN, "16")
    assert code == 0, words
    assert peaks(notebook) == peaks(text) == peaks(direct)
    assert "train.ipynb[4]:" in notebook["moment"]["source"]


def test_a_command_without_the_card(folder: Path) -> None:
    code, _, words = run(folder, "bash", "-c", "python -c 'import sys; sys.exit(3)'")
    assert code == 1
    assert "exit code 3, and no Python process of it put anything on the GPU" in words.splitlines()[-1]
    code, _, words = run(folder, "no-such-command", "train.py")
    assert code == 1
    assert words.startswith("graphmem: no-such-command is neither a file nor a command on PATH")


LINES: dict[str, tuple[str, str, list[str]]] = {
    "train.py a b": ("file", "train.py", ["a", "b"]),
    "-u -W ignore train.py -m x": ("file", "train.py", ["-m", "x"]),
    "-m pack.age a": ("module", "pack.age", ["a"]),
    "-um pack.age": ("module", "pack.age", []),
    "-mpack.age a": ("module", "pack.age", ["a"]),
    "-Xdev -Ic text a": ("code", "text", ["a"]),
    "-c text -m x": ("code", "text", ["-m", "x"]),
}


@pytest.mark.parametrize("line", LINES)
def test_command_lines_of_python(line: str) -> None:
    found = PythonLine(["python", *line.split()])
    assert (found.kind, found.target, found.arguments) == LINES[line]


def test_ranks_of_launchers() -> None:
    assert rank_of({"RANK": "9", "LOCAL_RANK": "1"}) == 9
    assert rank_of({"SLURM_PROCID": "3"}) == 3
    assert rank_of({"LOCAL_RANK": "2"}) == 2
    assert rank_of({}) is None
    several = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert launched_options(several) == ["--nproc-per-node", "8", "--nnodes", "2", "--rank", "9"]
    assert launched_options({"RANK": "0", "WORLD_SIZE": "1"}) == []


def test_programs_and_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "tool").write_text("#!/usr/bin/env python\n")
    (folder / "accelerate").mkdir()
    for words, is_program in {
        ("train.py", "x"): True,
        (sys.executable, "train.py"): True,
        (sys.executable, "-m", "json.tool"): True,
        (sys.executable, "-u", "train.py"): False,
        (sys.executable, "-m", "torch.distributed.run", "train.py"): False,
        ("./tool",): True,
        ("bash", "train.sh"): False,
        ("A=1", "bash"): False,
    }.items():
        assert isinstance(program_or_command(words, None, None, Launch()), Program) == is_program, words
    with pytest.raises(UsageError, match="any command line"):
        program_or_command((), None, None, Launch())


def test_a_process_hands_over_all_of_its_estimate(folder: Path) -> None:
    """As JSON: files in a temporary folder are data, and never run anything."""
    from graphmem.analyze import analyze
    from graphmem.following import handed

    program = Program(str(folder / "train.py"), ("64",))
    estimate = analyze(program, device="T4", margin="p99")
    again = handed.read(handed.written(estimate))
    assert again.to_json() == estimate.to_json()
    assert str(again) == str(estimate)
    assert (again.doubts, again.fit) == (estimate.doubts, estimate.fit)
    assert again.trace is not None
    assert estimate.trace is not None
    assert to_json(again.trace) == to_json(estimate.trace)
    assert again.timeline is not None
    assert estimate.timeline is not None
    assert again.timeline.reserved_bytes.tolist() == estimate.timeline.reserved_bytes.tolist()


def test_workers_that_are_sent_a_function_run_it_as_it_is_written(folder: Path) -> None:
    """joblib sends a program's function by its code, loops and all; its workers end with the program, in no five
    minutes."""
    pytest.importorskip("joblib")
    source = """
import torch
from joblib import Parallel, delayed
def work(n):
    total = 0
    for i in range(n):
        total += i
    while total > 100:
        total -= 1
    return total
print(Parallel(n_jobs=2)(delayed(work)(n) for n in (3, 30)))
torch.ones(9, device="cuda")
"""
    (folder / "joined.py").write_text(source, encoding="utf-8")
    code, document, words = run(folder, "joined.py")
    assert (code, document["peak"]["requested_bytes"]) == (0, 36)
    assert "[3, 100]" in words
