"""The words after ``graphmem run``: a program that runs in this process, or a command whose processes are followed;
and its start by options, as ``torchrun`` and ``accelerate launch`` start it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from graphmem.errors import UsageError
from graphmem.following.words import PythonLine
from graphmem.sources.hints import refuse_keras
from graphmem.training.processes import Processes
from graphmem.training.program import Program

_PYTHON = re.compile(r"python[\d.]*(\.exe)?")
_NONE = "no program given; write graphmem run train.py, graphmem run -m package.module, or any command line"


@dataclass(frozen=True)
class Launch:
    """``environment``: the variables that ``torchrun`` sets beside the numbers of ``processes``, which are None where
    no launcher starts any; ``config``: the file by which ``accelerate launch`` starts the program."""

    environment: tuple[tuple[str, str], ...] = ()
    processes: Processes | None = None
    config: str | None = None


def launch_of(
    nproc_per_node: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    config: str | None,
) -> Launch:
    """The start that the options ask for. Raises :class:`UsageError`."""
    others = (nnodes, node_rank, master_addr, master_port)
    if config is not None:
        if (nproc_per_node, *others) != (None,) * 5:
            raise UsageError(
                "--config says how many processes there are; leave out the options of torchrun, or --config"
            )
        if not Path(config).is_file():
            raise UsageError(f"{config}: No such file")
        if importlib.util.find_spec("accelerate") is None:
            raise UsageError("--config starts the program by accelerate launch; install accelerate")
        return Launch(config=config)
    if nproc_per_node is None:
        if others != (None,) * 4:
            raise UsageError("--nnodes, --node-rank, --master-addr and --master-port need --nproc-per-node")
        return Launch()
    nodes, node = nnodes or 1, node_rank or 0
    if node >= nodes:
        raise UsageError(f"--node-rank {node} of {nodes} node{'s' * (nodes > 1)}; the first is 0")
    values = {
        "MASTER_ADDR": master_addr or "127.0.0.1", "MASTER_PORT": str(master_port or 29500),
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }  # fmt: skip
    return Launch(tuple(values.items()), Processes(nproc_per_node * nodes, nproc_per_node * node, nproc_per_node))


def program_or_command(
    words: Sequence[str], module: str | None, code: str | None, launch: Launch
) -> Program | tuple[str, ...]:
    """The program of a command line that starts this Python, else the words. Raises :class:`UsageError`."""
    if module is not None:
        line = PythonLine([sys.executable, "-m", module, *words])
    elif code is not None:
        line = PythonLine([sys.executable, "-c", code, *words])
    else:
        if not words:
            raise UsageError(_NONE)
        found = _python_line(words)
        if found is None and launch.config is not None:
            raise UsageError(f"--config starts a Python program, not {words[0]}")
        if found is None:
            return tuple(words)
        line = found
    if line.is_launcher or line.kind == "none":
        return (sys.executable, *line.flags, *(["-m"] if line.kind == "module" else []), line.target, *line.arguments)
    if line.kind == "file":
        _refuse_other_files(Path(line.target))
    _tell_of_options(line)
    if launch.config is not None:
        return _by_accelerate(line, launch.config)
    return Program(
        line.target, tuple(line.arguments), line.kind == "module", launch.environment, is_code=line.kind == "code"
    )


#: Options of this command that hardly any program has: behind the program's name they are the program's.
_OURS = frozenset(
    ("--gpu", "--gpu-memory", "--budget", "--fail-on-oom", "--alloc-conf", "--torch-version", "--margin", "--details",
     "--html")
)  # fmt: skip


def _tell_of_options(line: PythonLine) -> None:
    given = [one for one in line.arguments if one.partition("=")[0] in _OURS]
    if given:
        click.echo(
            f"graphmem: {given[0]} stands behind {line.target} and goes to it; for graphmem write it before: "
            f"graphmem run {given[0]} ... {line.target}",
            err=True,
        )


def _by_accelerate(line: PythonLine, config: str) -> tuple[str, ...]:
    """The command by which accelerate starts the program. Raises :class:`UsageError`."""
    if line.kind == "code":
        raise UsageError("--config starts a file or a module, and no program text")
    starts = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    return (*starts, *(["--module"] if line.kind == "module" else []), line.target, *line.arguments)


def _refuse_other_files(path: Path) -> None:
    if path.suffix in (".onnx", ".pt2"):
        raise UsageError(f"{path} is a model and no program; write graphmem analyze {path}")
    refuse_keras(path)


def _python_line(words: Sequence[str]) -> PythonLine | None:
    """The command line of this Python that the words are; None for any other program."""
    if _PYTHON.fullmatch(os.path.basename(words[0])):
        line = PythonLine(words)
        return line if _is_ours(words[0]) and not line.flags and line.kind in ("file", "module") else None
    return PythonLine([sys.executable, *words]) if _is_python_file(words[0]) else None


def _is_ours(python: str) -> bool:
    """True if a shell would start the Python of this process, or finds none."""
    found = shutil.which(python)
    return found is None or os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(sys.executable))


def _is_python_file(word: str) -> bool:
    """True for a file that Python reads, one that is not there included."""
    path = Path(word)
    if path.suffix in (".py", ".pyw", ".ipynb", ".pyc", ".onnx", ".pt2"):
        return True
    try:
        if path.is_dir():
            return shutil.which(word) is None
        with open(path, "rb") as file:
            first = file.readline(200)
    except OSError:
        return "=" not in word and os.sep in word and not path.exists()
    return b"python" in first if first.startswith(b"#!") else path.suffix == "" and b"\0" not in first
