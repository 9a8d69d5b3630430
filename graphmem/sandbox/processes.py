"""Other programs that a program starts, and worker processes of its own.

In wrapped calls a started program would change real files, so it is refused by name. Workers of ``multiprocessing``
are the program itself: forked ones have the wrapped calls already, spawned ones begin with them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from graphmem.sandbox.guard import Guard, Handler, guarded

#: Programs of operating systems that print something and write nothing, and where these have them.
_ONLY_PRINT = frozenset(
    (
        "arch",
        "getconf",
        "id",
        "ldconfig",
        "lsb_release",
        "lscpu",
        "nproc",
        "nvidia-smi",
        "sw_vers",
        "uname",
        "which",
        "who",
    )
)
_SHELL = "sh" if os.name == "posix" else "cmd"
_SYSTEM = ("", "/bin", "/sbin", "/usr/bin", "/usr/sbin")
#: Characters of a command line that are told.
_LONGEST = 200
_PRELUDE = "import graphmem.sandbox.processes as p; p.begin_worker({!r}, {!r}); "


def checked_processes(guard: Guard) -> dict[str, Handler]:
    """What is asked when a program is about to be started: it is refused."""

    def check(name: str, words: str) -> None:
        if not _only_prints(name, words) and shutil.which(name) is not None:  # what is not there says so itself
            raise guard.refuse("start", words, errno.EACCES, "--allow-processes")

    return _starting(check)


def _only_prints(name: str, words: str) -> bool:
    if os.path.basename(name) in _ONLY_PRINT and os.path.dirname(name) in _SYSTEM:
        return True
    return words.split(" ")[1:] in (["--version"], ["--help"]) and name != _SHELL


def counted_processes(guard: Guard) -> dict[str, Handler]:
    """What is noted when a program is started that can write nothing."""

    def count(name: str, words: str) -> None:
        if not _only_prints(name, words) and shutil.which(name) is not None:
            guard.started[words] += 1

    return _starting(count)


def _starting(asked: Callable[[str, str], None]) -> dict[str, Handler]:
    """The audit events of starting a program; ``asked`` is given its name and its command line."""

    def start(program: Any, arguments: Any = (), *_: object) -> None:
        words = arguments if isinstance(arguments, (list, tuple)) else [arguments]
        texts = [os.fsdecode(one) for one in words if isinstance(one, (str, bytes, os.PathLike))]
        name = os.path.basename(os.fsdecode(program or (texts[0].split(" ")[0] if texts else "")))
        asked(os.fsdecode(program or name), " ".join(texts)[:_LONGEST] or name)

    def start_line(line: Any, *_: object) -> None:
        asked(_SHELL, os.fsdecode(line)[:_LONGEST])

    def spawn(_: Any, program: Any, arguments: Any = (), *__: object) -> None:
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
def workers_over(folder: str, permissions: Any) -> Iterator[None]:
    """Until the end of this context, processes that ``multiprocessing`` spawns begin in the same overlay."""
    from multiprocessing import spawn, util

    prelude = _PRELUDE.format(
        folder, (permissions.writes, permissions.everywhere, permissions.network, permissions.processes)
    )
    line, start = spawn.get_command_line, getattr(util, "spawnv_passfds", None)

    def begin_with(words: list[Any]) -> list[Any]:
        """Of an interpreter's command line, with the program that follows ``-c`` in the overlay."""
        found = [os.fsdecode(one) for one in words]
        if "-c" in found and not found[found.index("-c") + 1].startswith(_PRELUDE[:30]):
            at = found.index("-c") + 1
            program = prelude + found[at]
            return [*words[:at], os.fsencode(program) if isinstance(words[at], bytes) else program, *words[at + 1 :]]
        return words

    def get_command_line(**options: object) -> list[Any]:
        return begin_with(line(**options))

    def spawnv_passfds(path: Any, args: Any, passfds: Any) -> Any:
        return start(path, begin_with(list(args)), passfds)  # type: ignore[misc]

    spawn.get_command_line = get_command_line
    if start is not None:
        util.spawnv_passfds = spawnv_passfds
    try:
        yield
    finally:
        spawn.get_command_line = line
        if start is not None:
            util.spawnv_passfds = start


_kept: list[Any] = []


def begin_worker(folder: str, permissions: tuple[Any, ...]) -> None:
    """Put this process, which ``multiprocessing`` has spawned, into the overlay of its parent until it ends."""
    from graphmem.sandbox import Permissions
    from graphmem.sandbox.wrapped import Wrapped

    attempt: Callable[..., Any] = Wrapped(Permissions(*permissions), folder).attempt
    for context in (attempt(lambda: True),):
        guard = context.__enter__()
        inner = guarded(guard)
        inner.__enter__()
        _kept.extend((context, inner))
