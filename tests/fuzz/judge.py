"""One case: a command line is run in this process, and its answer is held against what every command promises."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner

#: Seconds of computing after which a case hangs, and seconds of waiting: other programs may want the machine too.
LIMIT, LONGEST_WAIT = 20.0, 90.0
#: The longest message that still is one.
LONGEST = 3000
BEFORE = b"what was there before"


@dataclass
class Case:
    """A command line, environment variables, and the file it was asked to write (complete JSON, or as it was)."""

    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    output: Path | None = None
    #: Bytes that a file may have at most, as on a full disk; None: no limit.
    disk: int | None = None
    #: Whether the figures of an accuracy report are drawn, which takes a second.
    drawn: bool = True


class Hang(BaseException):
    """The case took longer than :data:`LIMIT`."""


def problem_of(case: Case, scratch: Path) -> tuple[str, str, int]:
    """(what is wrong, more of it, exit code); the first two are empty for a right answer: done, or refused in one line.

    ``scratch`` is an empty folder for temporary files, which must be empty again afterwards.
    """
    from graphmem.cli import main

    messages: list[str] = []
    told = main._message

    def noted(error: BaseException, words: Sequence[str] = ()) -> str:
        message = told(error, words)
        messages.append(message)
        return message

    import graphmem.devices as devices

    devices._devices.cache_clear()
    devices._index.cache_clear()
    main._message = noted
    try:
        with _drawing(case), _limits(case, scratch):
            result = CliRunner().invoke(main.cli, case.arguments, prog_name="graphmem", env=dict(case.environment))
    except Hang:
        return "hang", f"longer than {LIMIT:.0f} s", -1
    finally:
        main._message = told
        devices._devices.cache_clear()
        devices._index.cache_clear()
    if isinstance(result.exception, Hang):
        return "hang", f"longer than {LIMIT:.0f} s", -1
    return *_judged(case, scratch, result, messages), result.exit_code


def _judged(case: Case, scratch: Path, result: Any, messages: list[str]) -> tuple[str, str]:
    said = result.stderr
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "traceback", repr(result.exception)
    if "Traceback" in said or "this is a bug in graphmem" in said:
        return "bug", said[-LONGEST:]
    if "not enough memory" in said:
        return "memory", said[-LONGEST:]
    if result.exit_code not in (0, 1, 2, 3):
        return "exit code", str(result.exit_code)
    if result.exit_code == 1 and case.arguments[:1] != ["sweep"]:  # which tells of its failures in its rows
        ours = [line for line in said.splitlines() if line.startswith("graphmem: ")]
        if len(ours) != 1 or len(ours[0]) > LONGEST:
            return "message", said[-LONGEST:]
    for message in messages:
        if len(message.splitlines()) != 1 or not message.isprintable():
            return "several lines", repr(message[:LONGEST])
    if re.search(r"/graphmem-[a-z0-9_]{8}|" + re.escape(str(scratch)), result.stdout + said):
        return "temporary path", (result.stdout + said)[-LONGEST:]
    left = list(scratch.iterdir())
    if left:
        return "temporary files left", ", ".join(path.name for path in left)
    return _output(case, result.exit_code)


def _output(case: Case, code: int) -> tuple[str, str]:
    """What is wrong with the file that was to be written."""
    if case.output is None:
        return "", ""
    beside = [path.name for path in case.output.parent.iterdir() if path.name.startswith(f".{case.output.name}")]
    if beside:
        return "temporary files left", ", ".join(beside)
    content = case.output.read_bytes() if case.output.exists() else None
    if content in (None, BEFORE):
        return ("no file", "") if code == 0 else ("", "")
    try:
        json.loads(content or b"")
    except ValueError as error:
        return "half a file", str(error)
    return "", ""


@contextlib.contextmanager
def _drawing(case: Case) -> Iterator[None]:
    if case.drawn:
        yield
        return
    from graphmem.accuracy import plots

    drawn: dict[str, Any] = {name: getattr(plots, name) for name in ("scatter_plot", "error_plot")}
    vars(plots).update(dict.fromkeys(drawn, lambda *arguments: "<svg/>"))
    try:
        yield
    finally:
        vars(plots).update(drawn)


@contextlib.contextmanager
def _limits(case: Case, scratch: Path) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before, folder = [signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)], tempfile.tempdir
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tempfile.tempdir = str(scratch)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_WAIT)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    if case.disk is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.disk, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)
        tempfile.tempdir = folder


def emptied(folder: Path) -> Path:
    """The folder, made or emptied."""
    import shutil

    if folder.exists():
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
