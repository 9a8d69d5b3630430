"""A flight simulator: a program runs, and nothing of the user's is changed.

The writes, deletions and renamings of a program go to a temporary folder, and its reads go through that; connections to
the outside are refused. Three mechanisms do it, from the strongest to the one that every machine has:

===========  ==========================  =====================================================================
name         where                       other programs that are started, and extensions in C
===========  ==========================  =====================================================================
namespace    Linux                       see and write the same overlay as the program
landlock     Linux without namespaces    run, but cannot write outside of the temporary folder
wrapped      everywhere, in one process  are not started; extensions that open files themselves are known by name
===========  ==========================  =====================================================================

``graphmem run`` is in the strongest that the machine permits; ``GRAPHMEM_SANDBOX`` names one for tests.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from graphmem.errors import UsageError
from graphmem.sandbox.changes import Tree, changes_of, count_of
from graphmem.sandbox.guard import Guard, guarded
from graphmem.sandbox.guard import Permissions as Permissions

#: The environment variable that names a mechanism.
VARIABLE = "GRAPHMEM_SANDBOX"
MECHANISMS = ("namespace", "landlock", "wrapped")


class Mechanism(Protocol):
    """One way to keep a program from changing files."""

    def enter(self) -> None:
        """Send writes to the temporary folder from now on. Raises :class:`OSError` where that is forbidden."""

    def reset(self) -> None:
        """From now on the files are again as they really are."""

    def trees(self) -> list[Tree]:
        """The folders that hold the changed files."""

    def attempt(self, applies: Callable[[], bool]) -> contextlib.AbstractContextManager[Guard]:
        """One run of the program; gives the guard to be asked."""


@dataclass
class Sandbox:
    """A mechanism that was entered. ``name`` is one of :data:`MECHANISMS`, ``refused``: why stronger ones were
    not taken (name -> reason). ``is_alone``: all threads of this process are the program's. ``is_shared``: other
    processes run programs in it, so that changes stay from one run to the next."""

    name: str
    mechanism: Mechanism
    permissions: Permissions = field(default_factory=Permissions)
    refused: Mapping[str, str] = field(default_factory=dict)
    is_alone: bool = False
    is_shared: bool = False
    _is_used: bool = False

    @contextlib.contextmanager
    def attempt(self, applies: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """One run of the program, which finds the files as they really are.

        ``applies``: whether the calling thread is the program's. The yielded dictionary is filled at the end with the
        run's record: the value of ``details["sandbox"]`` of an estimate.
        """
        if self._is_used and not self.is_shared:
            self.mechanism.reset()
            importlib.invalidate_caches()
        self._is_used = True
        here = os.getcwd()
        happened: dict[str, Any] = {}
        with self.mechanism.attempt(applies if not self.is_alone else lambda: True) as guard, guarded(guard):
            try:
                yield happened
            finally:
                with guard.own():
                    changes = changes_of(self.mechanism.trees(), here, guard.renames)
                    happened.update(
                        mechanism=self.name,
                        folder=here,
                        allowed=list(self.permissions.writes),
                        unavailable=dict(self.refused),
                        files=changes.as_json(),
                        refused=count_of(guard.refused),
                        started=dict(guard.started),
                    )
        with contextlib.suppress(OSError):
            os.chdir(here)


_current: Sandbox | None = None
_is_free = False


@contextlib.contextmanager
def entered(permissions: Permissions, *, own_process: bool) -> Iterator[None]:
    """In this context the process runs programs in the strongest mechanism that the machine permits.

    ``own_process``: the process is a command of ours that nobody else shares, and can be forked: everything after this
    call happens in a child, whose exit code the process ends with. Raises :class:`UsageError` for a mechanism that was
    named in :data:`VARIABLE` and is not to be had.
    """
    global _current, _is_free
    _is_free = permissions.everywhere and permissions.network
    if not _is_free:
        _enter_strongest(permissions, own_process)
    try:
        yield
    finally:
        _current, _is_free = None, False


def _enter_strongest(permissions: Permissions, own_process: bool) -> None:
    forced = os.environ.get(VARIABLE, "")
    if forced and forced not in MECHANISMS:
        raise UsageError(f"{VARIABLE} is one of {', '.join(MECHANISMS)}, not {forced!r}")
    refused: dict[str, str] = {}
    for name in (forced,) if forced else MECHANISMS:
        reason = _enter(name, permissions, refused, own_process)
        if reason is None:
            return
        refused[name] = reason
    raise UsageError(f"{VARIABLE}={forced}: {refused[forced]}")


def _enter(name: str, permissions: Permissions, refused: dict[str, str], own_process: bool) -> str | None:
    """None once the mechanism is entered, else why it cannot be."""
    global _current
    if name == "wrapped":
        from graphmem.sandbox.wrapped import Wrapped

        _current = Sandbox(name, Wrapped(permissions), permissions, refused, own_process)
        return None
    if sys.platform != "linux":
        return "for Linux only"
    if not own_process:
        return "for the graphmem command only, which has a process of its own"
    from graphmem.sandbox.landlock import Landlock
    from graphmem.sandbox.namespace import Namespace
    from graphmem.sandbox.supervised import fly

    made: list[Mechanism] = []

    def begin(folder: str) -> None:
        made.append((Landlock if name == "landlock" else Namespace)(folder, permissions))
        made[0].enter()

    reason = fly(begin)
    if reason is None:
        _current = Sandbox(name, made[0], permissions, refused, is_alone=True)
    return reason


@contextlib.contextmanager
def attempt(applies: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """One run of a program in the sandbox of this process, as :meth:`Sandbox.attempt`; without one, in calls that are
    wrapped for the threads that ``applies`` is true for."""
    if _is_free:
        yield {}
        return
    if _current is not None:
        with _current.attempt(applies) as happened:
            yield happened
        return
    from graphmem.sandbox.wrapped import Wrapped

    with Sandbox("wrapped", Wrapped(Permissions())).attempt(applies) as happened:
        yield happened


def worker() -> tuple[str, tuple[Any, ...], bool] | None:
    """The arguments of :func:`graphmem.sandbox.processes.begin_worker` for a process that has to enter the sandbox of
    this one by itself; None where the kernel puts it there, or there is none."""
    if _current is None or _current.name == "namespace":
        return None
    folder: str = getattr(_current.mechanism, "folder")  # noqa: B009 - the other mechanisms are kinds of Wrapped
    return folder, astuple(_current.permissions), _current.name == "landlock"


@contextlib.contextmanager
def joined(worker: tuple[str, Sequence[Any], bool] | None) -> Iterator[None]:
    """In this context the process runs programs in the sandbox of the process that started it; ``worker`` as
    :func:`worker` gave it there."""
    global _current, _is_free
    if worker is None:
        _is_free = True
    else:
        from graphmem.sandbox.wrapped import Wrapped

        folder, permissions, cannot_write = worker
        allowed = Permissions(*permissions)
        _current = Sandbox("wrapped", Wrapped(allowed, folder, cannot_write), allowed, is_alone=True, is_shared=True)
    try:
        yield
    finally:
        _current, _is_free = None, False


def folder_of(text: str) -> str:
    """The real path of a folder that may be written. Raises :class:`UsageError` where it is none."""
    path = Path(text)
    if not path.is_dir():
        raise UsageError(f"--allow-writes={text}: there is no such folder")
    return str(path.resolve())
