"""``graphmem run``: what belongs to graphmem and what to the program; exit codes; two streams of output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

from graphmem.cli.main import cli
from graphmem.cli.run import run_command
from graphmem.training.program import Program

#: (the command line after ``graphmem run``, the program, its arguments, whether it is a module)
LINES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "train.py --lr 3 -- --gpu x": ("train.py", ("--lr", "3", "--", "--gpu", "x"), False),
    "--gpu T4 --iterations=2 train.py -m x": ("train.py", ("-m", "x"), False),
    "--quiet -- train.py --quiet": ("train.py", ("--quiet",), False),
    "-m json.tool --help": ("json.tool", ("--help",), True),
    "--gpu T4 --module json.tool -- -m x": ("json.tool", ("--", "-m", "x"), True),
    "--allow-writes train.py x": ("train.py", ("x",), False),
    "--allow-writes=. --allow-network train.py --allow-writes": ("train.py", ("--allow-writes",), False),
    "--details -m json.tool train.py": ("json.tool", ("train.py",), True),
}


@pytest.mark.parametrize("line", LINES)
def test_what_follows_the_program_is_its_own(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Program] = []

    def analyze(program: Program, **_: Any) -> None:
        asked.append(program)
        raise click.exceptions.Exit(0)

    class Stand:
        analyze: Any

    Stand.analyze = staticmethod(analyze)
    monkeypatch.setitem(sys.modules, "graphmem.analyze", Stand)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    result = CliRunner().invoke(cli, ["run", *line.split()], prog_name="graphmem")
    assert result.exit_code == 0, result.output
    target, arguments, is_module = LINES[line]
    assert (asked[0].target, asked[0].arguments, asked[0].is_module) == (target, arguments, is_module)


def program(folder: Path, body: str) -> str:
    path = folder / "train.py"
    lines = ["import sys, torch", "print('the program says')", "x = torch.zeros(1000, device='cuda')", body]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments], prog_name="graphmem")


def test_the_report_is_apart_from_what_the_program_prints(tmp_path: Path) -> None:
    result = run("--format", "json", program(tmp_path, "sys.exit(0)"))
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["details"]["program"]["how"] == "exit"
    assert result.stderr == "the program says\n"
    assert run("--quiet", program(tmp_path, "")).stderr == ""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no such luck')", "train.py:4: RuntimeError: no such luck"),
        ("sys.exit(3)", "the program called sys.exit(3) after 0 optimizer steps"),
        ("sys.exit('no data')", "the program called sys.exit(...) after 0 optimizer steps: no data"),
    ],
)
def test_a_failed_program_is_reported_and_fails(body: str, said: str, tmp_path: Path) -> None:
    result = run("--quiet", "--gpu", "T4", program(tmp_path, body))
    assert result.exit_code == 1
    assert "FITS" not in result.stdout  # nobody knows what it would have done after
    assert "so far; whether it fits is not known" in " ".join(result.stdout.split())
    assert "the figures are of what it did until then" in " ".join(result.stdout[: result.stdout.index("Peak")].split())
    assert result.stderr.startswith("graphmem: ")
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_the_report_lists_files_that_were_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("kept")
    path = program(tmp_path, "import os; os.remove('kept.txt'); open('new.bin', 'wb').truncate(3 << 30)")
    screen = " ".join(run("--quiet", path).stdout.split())
    assert "Disk: 1 file, 3.00 GiB would be written, 1 file, 4 B deleted; none was changed." in screen
    result = run("--quiet", "--details", path)
    assert result.exit_code == 0, result.output
    assert sorted(one.name for one in tmp_path.iterdir()) == ["kept.txt", "train.py"]
    words = " ".join(result.stdout.split())
    assert "disk: 1 file, 3.00 GiB written, of which 1 new" in words
    assert "3.00 GiB written new.bin" in words
    assert "deleted: 1 file, 4 B" in words
    really = run("--quiet", "--allow-writes", "--allow-network", path)
    assert really.exit_code == 0, really.output
    assert "Files that" not in really.stdout
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new.bin", "train.py"]


def test_a_folder_that_may_be_written_must_exist(tmp_path: Path) -> None:
    result = run("--allow-writes=nowhere", program(tmp_path, ""))
    assert result.exit_code == 1
    assert "--allow-writes=nowhere: there is no such folder" in result.stderr


def test_nothing_given() -> None:
    result = run("--gpu", "T4")
    assert result.exit_code == 1
    assert "no program given" in result.stderr


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    path = program(tmp_path, "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)")
    command = [sys.executable, "-m", "graphmem", "run", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: list[str] = []
        while "ready\n" not in lines:
            lines.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.strip() == "graphmem: interrupted"


def test_options_are_those_of_analyze() -> None:
    """Those that both have are written alike."""
    names = ("analyze", "fit")
    known = {
        p.name: (p.opts, p.type.name)
        for name in names
        for p in cli.commands[name].params
        if isinstance(p, click.Option)
    }
    own = {
        "module", "quiet", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "config", "code",
        "cards", "rank", "ranks", "allow_writes", "allow_network", "allow_processes", "epoch", "vocab", "dataset",
        "largest",
    }  # fmt: skip
    for parameter in run_command.params:
        if isinstance(parameter, click.Option) and parameter.name not in own:
            assert known[parameter.name] == (parameter.opts, parameter.type.name)


def test_what_a_line_reads_can_be_told(tmp_path: Path) -> None:
    """A size that is data is named at the top, and taken from the command line if it is there."""
    body = "n = torch.randn(1 << 20, device='cuda').argmax().item(); torch.zeros(n, 256, device='cuda')"
    named = run("--gpu", "T4", "--quiet", program(tmp_path, f"import torch; {body}"))
    shown = "".join(named.stdout.split())  # long paths are broken anywhere
    assert "train.py:4:awholenumberistakentobe1" in shown
    assert shown.index("train.py:4") < shown.index("together")
    told = run("--quiet", "--format", "json", "--assume", "train.py:4=8192", program(tmp_path, f"import torch; {body}"))
    document = json.loads(told.stdout)
    assert not [said for said in document["diagnostics"] if said["kind"] == "assumed"]
    assert document["peak"]["requested_bytes"] == 4 * 1000 + 8192 * 256 * 4


@pytest.mark.parametrize(("at_most", "largest", "above"), [(1, 1, None), pytest.param(9, 3, 4, marks=pytest.mark.slow)])
def test_the_largest_number_that_fits(
    at_most: int, largest: int, above: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number is a run of its own: what one saves is not there for the next."""
    monkeypatch.chdir(tmp_path)
    body = (
        "import os; assert not os.path.exists('saved'); open('saved', 'w').close()\n"
        "batch = torch.zeros(int(sys.argv[2]), 256 << 20, device='cuda')"
    )
    line = (program(tmp_path, body), "--batch-size", "{}")
    result = run("--gpu-memory", "4GiB", "--largest", "--at-most", str(at_most), "--format", "json", *line)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["size"], found["largest"]) == ("batch-size", largest)
    assert (found["above"]["value"] or None) == above
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "T4", "train.py", "--bs", "8"), "write {} where the number stands"),
        (("train.py", "bs={}"), "which card?"),
        (("--gpu", "T4", "missing.py", "bs={}"), "missing.py"),
        (("--gpu", "T4", "--budget", "1GiB", "train.py", "bs={}"), "do not go with --largest"),
        (("--gpu", "T4", "--details", "train.py", "bs={}"), "do not go with --largest"),
        (("--gpu", "T4", "--multiple-of", "64", "--at-most", "10", "train.py", "bs={}"), "no multiple of 64"),
        (
            ("--gpu", "T4", "-c", "import argparse; argparse.ArgumentParser().parse_args()", "--bs={}"),
            "error: unrecognized arguments: --bs=1",
        ),
    ],
)
def test_a_search_that_cannot_begin(words: tuple[str, ...], said: str) -> None:
    result = run("--largest", *words)
    assert (result.exit_code, said in result.output) == (1, True), result.output


def test_limits_of_no_search() -> None:
    result = run("--gpu", "T4", "--multiple-of", "8", "train.py")
    assert (result.exit_code, "give --largest too" in result.output) == (1, True), result.output
