"""Runs a program as Python does: ``__main__``, ``sys.argv``, ``sys.path``, the launcher's environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType

from graphmem.base.documents import read_content
from graphmem.capture.program.asking import Loops
from graphmem.capture.program.jobs import one_job
from graphmem.capture.program.leaving import Leaving, Left
from graphmem.capture.program.library_loops import loops_opened
from graphmem.capture.program.loops import compiled, rewritten_loops
from graphmem.capture.program.notebooks import cells, cells_of_kernel
from graphmem.capture.program.stand_ins import stand_ins
from graphmem.capture.program.started import started_processes
from graphmem.errors import SourceError, first_line, said
from graphmem.training.program import Ending, Program


def run_program(program: Program, leaving: Leaving) -> Ending:
    """Run the program until it ends or is left. What it raises otherwise comes through.

    Raises :class:`SourceError` for a file that Python cannot read or compile.
    """
    leaving.epochs.limit(program.epoch)
    is_file = not program.is_module and not program.is_code
    folder = _script(program).resolve().parent if is_file else Path.cwd()
    with (
        _environment(program),
        _restored(),
        rewritten_loops(Loops(leaving), folder),
        loops_opened(leaving.opens),
        cells_of_kernel(),
        started_processes(leaving.recorder.storages),
        stand_ins(program.vocab, program.dataset, lambda found: leaving.recorder.assumed.update([found])),
        one_job(program.job) as jobs,
    ):
        sys.path.insert(0, "" if program.is_code else str(folder))
        module, parts = _found(program)
        sys.argv = [str(getattr(module, "__file__", "-c")), *program.arguments]
        sys.modules["__main__"] = module
        try:
            for code in parts:
                exec(code, vars(module))
            how = "shortened" if leaving.is_ending else "itself"
            ending = Ending(how, leaving.steps, more=leaving.why_more)
        except Left:
            ending = Ending("left", leaving.steps)
        except SystemExit as error:
            ending = _exit(error.code, leaving.steps)
        return replace(ending, jobs=tuple(jobs))


def _exit(code: object, steps: int) -> Ending:
    """The ending by ``sys.exit`` with this argument, as Python has it."""
    if code is None or isinstance(code, int):
        return Ending("exit", steps, code or 0)
    return Ending("exit", steps, 1, str(code))


# --- what is run ------------------------------------------------------------------------------------------------------


def _found(program: Program) -> tuple[ModuleType, Iterable[CodeType]]:
    """The program's module, and its code in the order in which it runs."""
    if program.is_code:
        return ModuleType("__main__"), [_compiled(program.target, "<string>", "-c")]
    if program.is_module:
        return _of_module(program)
    return _of_file(program)


def _script(program: Program) -> Path:
    path = Path(program.target)
    return path / "__main__.py" if path.is_dir() else path


def _of_file(program: Program) -> tuple[ModuleType, Iterable[CodeType]]:
    path = _script(program)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    content = _content(path)
    if path.suffix == ".ipynb":
        vars(module)["display"] = lambda *_, **__: None  # of IPython, which has it everywhere
        return module, [_compiled(text, name, str(path)) for name, text in cells(path, content)]
    return module, [_compiled(content, str(path), str(path))]


def _of_module(program: Program) -> tuple[ModuleType, Iterable[CodeType]]:
    """As ``runpy`` finds it: of a package, its ``__main__``."""
    try:
        spec = importlib.util.find_spec(program.target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{program.target}.__main__")
    except ImportError as error:
        if error.name and f"{program.target}.".startswith(f"{error.name}."):
            reason = f"no Python module {error.name!r}; for a file, write graphmem run path/to/file.py"
        else:
            reason = f"{program.target} cannot be imported: {said(error)}"
        raise SourceError(reason) from None
    if spec is None or spec.loader is None or spec.origin is None:
        raise SourceError(f"{program.target} is no module that can be run; for a file, write its path")
    module = ModuleType("__main__")
    module.__file__, module.__spec__, module.__package__ = spec.origin, spec, spec.parent
    return module, [_compiled(_content(Path(spec.origin)), spec.origin, program.target)]


def _content(path: Path) -> bytes:
    try:
        return read_content(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be run: {type(error).__name__}: {first_line(error)}") from None


def _compiled(source: str | bytes, file: str, name: str) -> CodeType:
    """The code of a part of a program. Raises :class:`SourceError`, which ``name`` is in."""
    try:
        return compiled(source, file)
    except (SyntaxError, ValueError) as error:
        where = f"{error.filename}:{error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise SourceError(f"{name} cannot be run: {where}{type(error).__name__}: {first_line(error)}") from None


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
