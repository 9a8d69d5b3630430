"""Runs a program as Python does: ``__main__``, ``sys.argv``, ``sys.path``, the launcher's environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from graphmem.base.documents import read_content
from graphmem.capture.program.asking import Loops
from graphmem.capture.program.leaving import Leaving, Left
from graphmem.capture.program.loops import compiled, rewritten_loops
from graphmem.errors import SourceError, first_line
from graphmem.training.program import Ending, Program


def run_program(program: Program, leaving: Leaving) -> Ending:
    """Run the program until it ends or is left. What it raises otherwise comes through.

    Raises :class:`SourceError` for a file that Python cannot read or compile.
    """
    leaving.epochs.limit(program.epoch)
    folder = Path.cwd() if program.is_module else _script(program).resolve().parent
    with _environment(program), _restored(), rewritten_loops(Loops(leaving), folder):
        sys.path.insert(0, str(folder))
        module, code = _of_module(program) if program.is_module else _of_file(program)
        sys.argv = [str(module.__file__), *program.arguments]
        sys.modules["__main__"] = module
        try:
            exec(code, vars(module))
        except Left:
            return Ending("left", leaving.steps)
        except SystemExit as error:
            return _exit(error.code, leaving.steps)
        return Ending("shortened" if leaving.is_ending else "itself", leaving.steps)


def _exit(code: object, steps: int) -> Ending:
    """The ending by ``sys.exit`` with this argument, as Python has it."""
    if code is None or isinstance(code, int):
        return Ending("exit", steps, code or 0)
    return Ending("exit", steps, 1, str(code))


# --- what is run ------------------------------------------------------------------------------------------------------


def _script(program: Program) -> Path:
    path = Path(program.target)
    return path / "__main__.py" if path.is_dir() else path


def _of_file(program: Program) -> tuple[ModuleType, Any]:
    path = _script(program)
    try:
        code = compiled(read_content(path), str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise SourceError(f"{path} cannot be run: {_where(error)}{type(error).__name__}: {first_line(error)}") from None
    module = ModuleType("__main__")
    module.__file__ = str(path)
    return module, code


def _of_module(program: Program) -> tuple[ModuleType, Any]:
    """As ``runpy`` finds it: of a package, its ``__main__``."""
    try:
        spec = importlib.util.find_spec(program.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program.target}.__main__")
    except ModuleNotFoundError as error:
        raise SourceError(f"no Python module {error.name!r}; for a file, write graphmem run path/to/file.py") from None
    if spec is None or spec.loader is None or spec.origin is None:
        raise SourceError(f"{program.target} is no module that can be run; for a file, write its path")
    module = ModuleType("__main__")
    module.__file__, module.__spec__, module.__package__ = spec.origin, spec, spec.parent
    try:
        code = compiled(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError) as error:
        raise SourceError(f"{program.target} cannot be run: {_where(error)}{first_line(error)}") from None
    return module, code


def _where(error: BaseException) -> str:
    return f"{error.filename}:{error.lineno}: " if isinstance(error, SyntaxError) else ""


# --- around it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """``sys.argv``, ``sys.path`` and ``__main__`` are the process's own again at the end."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _environment(program: Program) -> Iterator[None]:
    """The launcher's variables; what the program sets besides ends with it."""
    before = dict(os.environ)
    os.environ.update(dict(program.environment))
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
