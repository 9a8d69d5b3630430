"""The words after ``graphmem run``: a program that runs in this process, or a command whose processes are followed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from graphmem.cli.launch import Launch
from graphmem.errors import UsageError
from graphmem.following.words import PythonLine
from graphmem.sources.hints import refuse_keras
from graphmem.training.program import Program

_PYTHON = re.compile(r"python[\d.]*(\.exe)?")
_NONE = "no program given; write graphmem run train.py, graphmem run -m package.module, or any command line"


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
        if found is None:
            return tuple(words)
        line = found
    if line.is_launcher or line.kind == "none":
        return (sys.executable, *line.flags, *(["-m"] if line.kind == "module" else []), line.target, *line.arguments)
    if line.kind == "file":
        _refuse_other_files(Path(line.target))
    return Program(
        line.target, tuple(line.arguments), line.kind == "module", launch.environment, launch.words, line.kind == "code"
    )


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


def _refuse_other_files(path: Path) -> None:
    if path.suffix in (".onnx", ".pt2"):
        raise UsageError(f"{path} is a model and no program; write graphmem analyze {path}")
    refuse_keras(path)
