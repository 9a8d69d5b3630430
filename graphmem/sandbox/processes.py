"""Other programs that a program starts, and worker processes of its own.

In wrapped calls a started program would change real files, so it is refused by name. Workers of ``multiprocessing``
are the program itself: forked ones have the wrapped calls already, spawned ones begin with them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

from graphmem.sandbox.copies import StrOrBytesPath
from graphmem.sandbox.guard import Guard, Handler, Permissions, guarded

#: Programs of operating systems that print something and write nothing, and where these have them.
_ONLY_PRINT = frozenset((
    "arch", "getconf", "id", "ldconfig", "lsb_release", "lscpu", "nproc", "nvidia-smi", "sw_vers", "uname", "which",
    "who",
))  # fmt: skip
_SHELL = "sh" if os.name == "posix" else "cmd"
_SYSTEM = ("", "/bin", "/sbin", "/usr/bin", "/usr/sbin")
#: Characters of a command line that are shown.
_LONGEST = 200
_PRELUDE = "import graphmem.sandbox.processes as p; p.begin_worker({!r}, {!r}); "


def watched_processes(guard: Guard, cannot_write: bool) -> dict[str, Handler]:
    """The audit events of starting a program: it is refused, or noted if it ``cannot_write`` anything."""

    def start(name: str, words: str) -> None:
        if _only_prints(name, words) or shutil.which(name) is None:  # else the start fails by itself
            return
        if not cannot_write:
            raise guard.refuse("start", words, errno.EACCES, "--allow-processes")
        guard.started[words] += 1

    return _starting(start)


def _only_prints(name: str, words: str) -> bool:
    if os.path.basename(name) in _ONLY_PRINT and os.path.dirname(name) in _SYSTEM:
        return True
    return words.split(" ")[1:] in (["--version"], ["--help"]) and name != _SHELL


def _starting(asked: Callable[[str, str], None]) -> dict[str, Handler]:
    """``asked`` is given the name of the program and its command line."""

    def start(program: StrOrBytesPath | None, arguments: object = (), *_: object) -> None:
        words = arguments if isinstance(arguments, (list, tuple)) else [arguments]
        texts = [os.fsdecode(one) for one in words if isinstance(one, (str, bytes, os.PathLike))]
        name = os.path.basename(os.fsdecode(program or (texts[0].split(" ")[0] if texts else "")))
        asked(os.fsdecode(program or name), " ".join(texts)[:_LONGEST] or name)

    def start_line(line: StrOrBytesPath, *_: object) -> None:
        asked(_SHELL, os.fsdecode(line)[:_LONGEST])

    def spawn(_: int, program: StrOrBytesPath, arguments: object = (), *__: object) -> None:
        start(program, arguments)

    return {
        "subprocess.Popen": start,
        "os.exec": start,
        "os.posix_spawn": start,
        "os.spawn": spawn,
        "os.system": start_line,
        "os.startfile": start_line,
    }


@contextlib.contextmanager
def workers_over(folder: str, permissions: Permissions) -> Iterator[None]:
    """Until the end of this context, processes that ``multiprocessing`` spawns begin in the same overlay."""
    from multiprocessing import spawn, util

    prelude = _PRELUDE.format(folder, astuple(permissions))

    def begin_with(words: Sequence[Any]) -> list[Any]:
        """Of an interpreter's command line, with the program that follows ``-c`` in the overlay."""
        found = [os.fsdecode(one) for one in words]
        if "-c" not in found or found[found.index("-c") + 1].startswith(_PRELUDE[:30]):
            return list(words)
        at = found.index("-c") + 1
        program = prelude + found[at]
        return [*words[:at], os.fsencode(program) if isinstance(words[at], bytes) else program, *words[at + 1 :]]

    line, start = spawn.get_command_line, getattr(util, "spawnv_passfds", None)
    spawn.get_command_line = lambda **options: begin_with(line(**options))
    if start is not None:
        util.spawnv_passfds = lambda path, args, passfds: start(path, begin_with(args), passfds)
    try:
        yield
    finally:
        spawn.get_command_line = line
        if start is not None:
            util.spawnv_passfds = start


_of_worker = contextlib.ExitStack()


def begin_worker(folder: str, permissions: Sequence[Any], cannot_write: bool = False) -> None:
    """Put this process, which the program has started, into the overlay of its parent until it ends.
    ``cannot_write``: it may start others, as something else keeps them from writing."""
    from graphmem.sandbox.wrapped import Wrapped

    guard = _of_worker.enter_context(Wrapped(Permissions(*permissions), folder, cannot_write).attempt(lambda: True))
    _of_worker.enter_context(guarded(guard))
