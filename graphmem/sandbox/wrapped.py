"""The mechanism that every machine has: Python's own functions for files are an overlay, and nothing else may write.

Every function of ``os`` that takes a path, ``open``, and the libraries of :mod:`graphmem.sandbox.libraries` that open
files themselves go to :class:`graphmem.sandbox.overlay.Overlay`. Python's audit events are the net below: a write to a
real file past these is refused by name, and so are other programs.

Every place where a module keeps one of these functions (``from os import remove``) is replaced while a program runs.
A replacement that somebody keeps for longer, or another thread calls, is the original.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType, ModuleType, SimpleNamespace
from typing import IO, Any

from graphmem.sandbox import guard as guards
from graphmem.sandbox.changes import Tree
from graphmem.sandbox.copies import FileDescriptorOrPath, StrOrBytesPath
from graphmem.sandbox.guard import Guard, Permissions
from graphmem.sandbox.libraries import libraries_over
from graphmem.sandbox.overlay import Overlay, native, writes
from graphmem.sandbox.processes import watched_processes, workers_over

#: Functions of ``os`` that ask; those that do not follow links.
_READING = ("stat", "access", "statvfs", "pathconf", "getxattr", "listxattr")
_READING_LINKS = ("lstat", "readlink")
#: Functions of ``os`` that change what is there; those that do not follow links; those that make it.
_CHANGING = ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr", "chflags")
_CHANGING_LINKS = ("lchmod", "lchown", "lchflags")
_MAKING = ("mkfifo", "mknod")
#: Those that :class:`Overlay` has by their names.
_OWN = (
    "open", "mkdir", "rmdir", "unlink", "rename", "link", "symlink", "listdir", "scandir", "chdir", "getcwd", "getcwdb",
)  # fmt: skip
_SAME = {"remove": "unlink", "replace": "rename"}
_OF_TWO = ("rename", "replace", "link", "symlink")
#: Functions that give the same while nothing is changed.
_ASKING = frozenset((*_READING, *_READING_LINKS, "listdir", "scandir", "chdir", "getcwd", "getcwdb"))
_MARKS = ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids")


class Wrapped:
    """Wrapped calls of this process. ``folder`` holds the changes; without one, a temporary folder of its own.

    ``cannot_write``: other programs may be started, as something else keeps them from writing.
    """

    def __init__(self, permissions: Permissions, folder: str | None = None, cannot_write: bool = False) -> None:
        self._permissions = permissions
        self._own = None if folder is not None else tempfile.TemporaryDirectory(prefix="graphmem-run-")
        self.folder = os.path.realpath(folder or (self._own.name if self._own is not None else ""))
        self._cannot_write = cannot_write
        self.overlay = Overlay(self.folder, permissions.writes, permissions.everywhere)

    def enter(self) -> None:
        """Nothing lasts beyond an attempt."""

    def reset(self) -> None:
        """Forget all changes."""
        self.overlay.reset()

    def trees(self) -> list[Tree]:
        """The folder of the changes."""
        return self.overlay.trees()

    @contextlib.contextmanager
    def attempt(self, applies: Callable[[], bool]) -> Iterator[Guard]:
        """One run of the program: its calls are wrapped."""
        guard = _Net(self.overlay, self._permissions.network, applies)
        if not self._permissions.processes:
            guard.handlers.update(watched_processes(guard, self._cannot_write))
        with wrapped_calls(self.overlay, guard), workers_over(self.folder, self._permissions):
            yield guard


#: Audit events of what writes to one path.
_WRITING = ("remove", "rmdir", "mkdir", "truncate", "chmod", "chown", "utime", "setxattr", "removexattr")


class _Net(Guard):
    """Refuses writes past the wrapped calls, and connections to ports of other processes."""

    def __init__(self, overlay: Overlay, has_network: bool, applies: Callable[[], bool]) -> None:
        super().__init__(has_network, applies, overlay.real)
        self._overlay = overlay
        self.handlers |= {"open": self._check_open, "os.rename": self._check_two, "os.link": self._check_two}
        self.handlers |= {f"os.{event}": self._check_written for event in _WRITING}
        self.handlers["os.symlink"] = lambda _, target, *__: self._check_written(target)

    def is_own_port(self, port: int) -> bool:
        """True if the program itself listens there."""
        return port in self.bound_ports()

    def _check_open(self, path: FileDescriptorOrPath, _: object, flags: int) -> None:
        if isinstance(path, (str, bytes)) and writes(flags or 0):
            self._check_written(path)

    def _check_two(self, source: FileDescriptorOrPath, target: FileDescriptorOrPath, *_: object) -> None:
        self._check_written(source)
        self._check_written(target)

    def _check_written(self, path: FileDescriptorOrPath, *_: object) -> None:
        if isinstance(path, int):
            return
        at = self._overlay.absolute(path)
        if not self._overlay.is_free(os.path.realpath(at)):
            raise self.refuse("change", os.fsdecode(path), errno.EACCES, "--allow-writes")


@contextlib.contextmanager
def wrapped_calls(overlay: Overlay, guard: Guard) -> Iterator[None]:
    """Until the end of this context, the functions that take paths go to the overlay for the guard's threads."""
    replaced = dict(_replacements(overlay, guard))
    new_of = {id(old): new for old, new in replaced.values()}
    marks = [getattr(os, name) for name in _MARKS]
    with contextlib.ExitStack() as undo:
        for mark in marks:
            undo.callback(mark.difference_update, list(new_of.values()))
            mark.update(new for old, new in replaced.values() if old in mark)
        _replace_everywhere(new_of, undo)
        _replace_defaults(tempfile, new_of, undo)
        if hasattr(shutil, "_winapi"):  # CopyFile2 opens both files itself
            _set(shutil, "_winapi", SimpleNamespace(), undo)
        if os.name == "nt":
            _ask_by_stat(undo)
        _redirect_imports({name: new for name, (_, new) in replaced.items()}, undo)
        undo.enter_context(libraries_over(overlay, guard))
        yield


def _replacements(overlay: Overlay, guard: Guard) -> Iterator[tuple[str, tuple[object, object]]]:
    """name of ``os`` -> (the original, its replacement)."""
    for names, make in (
        (_READING, lambda one: overlay.read_with(one)),
        (_READING_LINKS, lambda one: overlay.read_with(one, follows=False)),
        (_CHANGING, lambda one: overlay.change_with(one)),
        (_CHANGING_LINKS, lambda one: overlay.change_with(one, follows=False)),
        (_MAKING, overlay.make_with),
        (_OWN, lambda one: getattr(overlay, one.__name__)),
        (_SAME, lambda one: getattr(overlay, _SAME[one.__name__])),
    ):
        for name in names:
            original = getattr(native, name, None)
            if original is not None:
                yield name, (original, _either(original, make(original), overlay, guard, name in _ASKING))
    opened = _opening(overlay, guard)
    yield "io.open", (io.open, _either(io.open, opened, overlay, guard, False))


def _either(
    original: Callable[..., Any], ours: Callable[..., Any], overlay: Overlay, guard: Guard, asks: bool
) -> Callable[..., Any]:
    """``ours`` for the program, ``original`` for everybody else."""
    changes = not asks and original is not io.open and original is not native.open

    @wraps(original)
    def call(*args: Any, **kwargs: object) -> object:
        if guards.current() is not guard or guard.is_own or not guard.applies():
            return original(*args, **kwargs)
        if not overlay.has_changes and asks:
            return original(*args, **kwargs)
        with guard.own():
            try:
                result = ours(*args, **kwargs)
                if changes:
                    overlay.note_change()
            except OSError as error:
                _name_as_given(error, args[: 2 if original.__name__ in _OF_TWO else 1])
                raise
        if original in (native.rename, native.replace):
            guard.renames.append((overlay.absolute(args[0]), overlay.absolute(args[1])))
        return result

    return call


def _name_as_given(error: OSError, given: tuple[object, ...]) -> None:
    """Let an error name the files as the program does."""
    for name, path in zip(("filename", "filename2"), given, strict=False):
        if error.filename is not None and isinstance(path, (str, bytes, os.PathLike)):
            setattr(error, name, os.fspath(path))


def _opening(overlay: Overlay, guard: Guard) -> Callable[..., object]:
    original = io.open

    def own_opener(path: StrOrBytesPath, flags: int) -> int:
        return overlay.open(path, flags, 0o666)

    def open_file(
        file: FileDescriptorOrPath, mode: str = "r", buffering: int = -1, encoding: str | None = None,
        errors: str | None = None, newline: str | None = None, closefd: bool = True,
        opener: Callable[[Any, int], int] | None = None,
    ) -> IO[Any]:  # fmt: skip
        def theirs(path: StrOrBytesPath, flags: int) -> int:
            with guard.own(False):
                return (opener or own_opener)(path, flags)

        given = None if isinstance(file, int) else own_opener if opener is None else theirs
        return original(file, mode, buffering, encoding, errors, newline, closefd, given)

    return open_file


# --- where functions are kept -----------------------------------------------------------------------------------------


def _set(owner: object, name: str, value: object, undo: contextlib.ExitStack) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _replace_everywhere(new_of: dict[int, object], undo: contextlib.ExitStack) -> None:
    """Put the replacements into every module that keeps one of the originals."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    kept = [one for one in modules if one is not native and not one.__name__.startswith("graphmem.sandbox")]
    for names in map(vars, kept):
        for name, value in list(names.items()):
            if id(value) in new_of:
                names[name] = new_of[id(value)]
                undo.callback(names.__setitem__, name, value)
    holder = getattr(sys.modules.get("pathlib"), "_NormalAccessor", None)  # Python 3.10
    for name, value in list(vars(holder).items()) if holder is not None else ():
        new = new_of.get(id(getattr(value, "__func__", value)))
        if new is not None:
            undo.callback(setattr, holder, name, value)
            setattr(holder, name, staticmethod(new))  # type: ignore[arg-type]


def _ask_by_stat(undo: contextlib.ExitStack) -> None:
    """Some functions ask Windows without ``os.stat``."""
    import genericpath
    import ntpath

    for name in ("exists", "isdir", "isfile", "lexists"):
        _set(ntpath, name, getattr(genericpath, name, genericpath.exists), undo)


def _replace_defaults(module: ModuleType, new_of: dict[int, object], undo: contextlib.ExitStack) -> None:
    """The defaults of parameters are functions too: ``def close(self, unlink=os.unlink)``."""
    for owner in [one for one in vars(module).values() if isinstance(one, type)]:
        for function in [one for one in vars(owner).values() if isinstance(one, FunctionType)]:
            before = function.__defaults__
            if before and any(id(one) in new_of for one in before):
                _set(function, "__defaults__", tuple(new_of.get(id(one), one) for one in before), undo)


def _redirect_imports(replaced: dict[str, Any], undo: contextlib.ExitStack) -> None:
    """Let the program import modules that it wrote: the machinery of imports has names of its own."""
    own = "importlib._bootstrap_external"
    machinery: Any = sys.modules[own if own in sys.modules else "_frozen_importlib_external"]
    real_io, opened = machinery._io, replaced["io.open"]

    def read_only_file(path: FileDescriptorOrPath, mode: str = "r", *args: Any, **kwargs: Any) -> io.IOBase:
        if isinstance(path, int):
            return real_io.FileIO(path, mode, *args, **kwargs)  # type: ignore[no-any-return]
        return opened(path, mode.rstrip("b") + "b", 0)  # type: ignore[no-any-return]

    files = {"open_code": lambda path: opened(path, "rb"), "FileIO": read_only_file, "open": opened}
    of_os = {name: new for name, new in replaced.items() if "." not in name}
    _set(machinery, "_os", SimpleNamespace(**{**vars(machinery._os), **of_os}), undo)
    _set(machinery, "_io", SimpleNamespace(**{**vars(real_io), **files}), undo)
