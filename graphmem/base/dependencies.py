"""What a computation of this process depended on: the files, folders and environment variables that it looked at.

Python tells its audit hooks (PEP 578) of every file that is opened, every folder that is listed and every module that
is looked for, those of libraries included. ``os.stat`` and ``os.environ`` tell nobody and are watched by functions in
their place. What is found out so is written down with its state, and compared with the state that it has later. What
asks beyond that, another process or a network, cannot be written down.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graphmem.base.imports import library_folder

#: Events of audit hooks after which an answer depends on more than files and variables.
_BEYOND = frozenset(
    (
        "subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
        "os.startfile", "pty.spawn", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto",
        "urllib.Request", "sqlite3.connect",
    )
)  # fmt: skip
#: What the machine says of itself, and the folder of PyTorch's compiler, which comes and goes.
_OF_THE_MACHINE = ("/proc/", "/sys/", "/dev/", os.path.join(tempfile.gettempdir(), "torchinductor_"))
#: The libraries that Linux's loader knows, by which ``ctypes.util`` finds one: in it, or where nothing is there, by
#: compilers, which look into the same folders.
_LIBRARIES = "/etc/ld.so.cache"
#: Files up to this many bytes are compared by what they hold, larger ones, and those of installed packages, by their
#: size and times.
_READ_BYTES = 2**22
#: How far behind the clock the times of a file system may be (a tick of Linux's is up to 10 ms).
_TICK_SECONDS = 0.02
#: Python's own finders, which list folders to find modules and packages in them; :func:`importable` stands for that.
_FINDERS = ("<frozen importlib._bootstrap_external>", importlib.metadata.__file__)
#: Variables of a shell and its terminal, which differ from command to command; who copies the environment reads them.
_OF_THE_SHELL = frozenset(
    ("_", "STY", "SHLVL", "OLDPWD", "PWD", "TERM", "COLUMNS", "LINES", "WINDOWID", "TERM_SESSION_ID", "TMUX",
     "TMUX_PANE", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID",
     "DBUS_SESSION_BUS_ADDRESS", "GRAPHMEM_CACHE", "GRAPHMEM_CACHE_LIMIT")
)  # fmt: skip

#: The state of dependencies, for JSON.
Written = dict[str, Any]


class CannotTell(Exception):
    """An answer depends on something that cannot be written down: the message says on what."""


class Watch:
    """Notes the dependencies of what runs while it is on. One serves a process, as hooks stay until its end: what was
    imported for one computation is there for the next, which depends on it too.

    ``apart`` are folders of this process alone, which nothing depends on. ``programs``: a process that is started
    depends on its program's file alone, as one does that tells its version.
    """

    def __init__(self, apart: Iterable[str] = (), *, programs: bool = False) -> None:
        self._apart = (*_OF_THE_MACHINE, *apart)
        self._programs = programs
        self._environment = dict(os.environ)
        self._is_on = False
        self._is_installed = False
        self._files: set[str] = set()
        self._folders: set[str] = set()
        self._searched: set[str] = set()
        self._variables: set[str] = set()
        self._beyond = ""
        self._began = 0.0
        self._allowed: tuple[str, ...] = ()

    @contextlib.contextmanager
    def on(self, allowed: Iterable[str] = ()) -> Iterator[None]:
        """Note until the end. ``allowed``: the command line of a process that may be started, as it answers by files
        that :meth:`add` names."""
        self._install()
        self._allowed = tuple(allowed)
        self._began = self._began or time.time()
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def add(self, *files: str) -> None:
        """Files that something else than Python reads."""
        self._files.update(files)

    def written(self) -> Written:
        """All dependencies with the state that they have now. Raises :class:`CannotTell`, also where one has changed
        since the beginning: an earlier state may have been read."""
        if self._beyond:
            raise CannotTell(self._beyond)
        modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        files = self._files | {file for file in modules if isinstance(file, str)}
        files = {file for file in files if not file.startswith(self._apart)}
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                found = os.stat(file)
                if stat.S_ISREG(found.st_mode) and _changed_at(found) >= self._began - _TICK_SECONDS:
                    raise CannotTell(f"{file} changed meanwhile")
        read = {file: state for file in files if (state := _content(file)) is not None}
        others = sorted(files - set(read))
        folders = {path for path in self._folders if not path.startswith(self._apart) and not _is_installed(path)}
        return {
            "read": read,
            "others": others,
            "states": _states(others),
            "folders": {path: _listed(path) for path in sorted(folders)},
            "searched": {path: importable(path) for path in sorted(self._searched | set(sys.path))},
            "variables": {name: self._environment.get(name) for name in sorted(self._variables - _OF_THE_SHELL)},
        }

    def _install(self) -> None:
        if self._is_installed:
            return
        self._is_installed = True
        sys.addaudithook(self._hook())
        noting = self._noting_stat(os.stat)
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if os.stat in able:
                able.add(noting)
        os.stat = noting
        kind: Any = type(os.environ)
        kind.__getitem__ = self._noting_variable(kind.__getitem__)

    def _hook(self) -> Callable[[str, Any], None]:
        """The audit hook. Every other step of a compiler is an event: a function that looks its name up takes a third
        of the time of a method, on which Python looks for an attribute in vain."""
        acts: dict[str, Callable[[str, Any], None]] = dict.fromkeys(_BEYOND, self._asked_beyond) | {
            "open": self._opened, "import": self._imported, "os.listdir": self._listed, "os.scandir": self._listed,
            "ctypes.dlopen": self._loaded,
        }  # fmt: skip

        def heard(event: str, arguments: Any) -> None:
            act = acts.get(event)
            if act is not None and self._is_on:
                act(event, arguments)

        return heard

    def _imported(self, _: str, arguments: Any) -> None:
        if arguments[2] is not None:
            self._searched.update(path for path in arguments[2] if isinstance(path, str))

    def _listed(self, _: str, arguments: Any) -> None:
        path = _text(arguments[0] if arguments[0] is not None else ".")
        if path is not None and sys._getframe(2).f_code.co_filename not in _FINDERS:
            self._folders.add(path)

    def _loaded(self, _: str, arguments: Any) -> None:
        path = _text(arguments[0])
        if path and os.path.isabs(path):
            self._files.add(path)

    def _asked_beyond(self, event: str, arguments: Any) -> None:
        if not self._is_allowed(event, arguments):
            self._beyond = self._beyond or f"it calls {event}"

    def _opened(self, _: str, arguments: Any) -> None:
        path, _mode, flags = arguments
        text = _text(path)
        is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) == os.O_WRONLY
        if text is not None and not is_written and not text.endswith(".pyc"):
            self._files.add(text)

    def _is_allowed(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it is the process that may be started, or one that looks for a library (``find_library``)."""
        if event == "subprocess.Popen" and self._allowed and tuple(arguments[1]) == self._allowed:
            return True
        if event == "subprocess.Popen" and self._programs:
            program = _text(arguments[0]) or ""
            self._files.add(shutil.which(program) or program)
            return True
        looking, frame = getattr(sys.modules.get("ctypes.util"), "__file__", ""), sys._getframe(3)
        while frame is not None and frame.f_code.co_filename != looking:
            frame = frame.f_back  # type: ignore[assignment]
        self._files.update(() if frame is None else (_LIBRARIES,))
        return frame is not None

    def _noting_stat(self, original: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
            if self._is_on and (text := _text(path)) is not None:
                self._files.add(text)
            return original(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

        return stat

    def _noting_variable(self, original: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
        def getitem(environment: Any, name: str) -> str:
            if self._is_on and isinstance(name, str):
                self._variables.add(name)
            return original(environment, name)

        return getitem


def still_holds(written: Written) -> bool:
    """Whether all dependencies have the state that :meth:`Watch.written` found. Raises what reading a damaged one comes
    to, as :class:`KeyError`."""
    return (
        all(os.environ.get(name) == value for name, value in written["variables"].items())
        and _states(written["others"]) == written["states"]
        and all(_content(file) == state for file, state in written["read"].items())
        and all(importable(path) == names for path, names in written["searched"].items())
        and all(_listed(path) == names for path, names in written["folders"].items())
    )


def state_of_folder(folder: str) -> str:
    """A digest of the sizes and times of all files below a folder, compiled Python left out."""
    files = (
        os.path.join(where, name)
        for where, inside, names in os.walk(folder)
        if not (inside.sort() or where.endswith("__pycache__"))
        for name in sorted(names)
    )
    return _states(files)


def importable(folder: str) -> str:
    """A digest of the names in a folder of Python's search path by which an import may find something else: modules,
    folders that may be packages, and what is installed."""
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = sorted(entry.name for entry in entries if _may_be_imported(entry))
    except OSError:
        names = ["absent"]
    return _digest(names)


def _may_be_imported(entry: os.DirEntry[str]) -> bool:
    stem, dot, _ = entry.name.partition(".")
    if entry.name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")):
        return True
    if dot:
        return entry.name.endswith((".py", ".pyc", ".so", ".pyd", ".zip"))
    return stem.isidentifier() and stem != "__pycache__" and entry.is_dir()


def _content(file: str) -> str | None:
    """A digest of what a file holds, where it is a small one of no installed package; None for others."""
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _READ_BYTES or _is_installed(file):
            return None
        with open(file, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except (OSError, ValueError):
        return None


def _states(files: Iterable[str]) -> str:
    """A digest of the sizes and times of files, in their order; those that are absent included."""
    return _digest(map(_state, files))


def _state(file: str) -> str:
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return f"{file} absent"
    if not stat.S_ISREG(found.st_mode):
        return f"{file} {stat.S_IFMT(found.st_mode)}"
    return f"{file} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _changed_at(found: os.stat_result) -> float:
    """When a file changed last; where ``st_ctime`` is its birth (Windows) that is no later."""
    return max(found.st_mtime, found.st_ctime)


def _listed(folder: str) -> str:
    try:
        return _digest(sorted(os.listdir(folder)))
    except OSError:
        return "absent"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def _is_installed(file: str) -> bool:
    """Whether a file is part of Python or of an installed package."""
    return file.startswith(_OF_PYTHON) or bool(library_folder(file))


_OF_PYTHON = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def _text(path: object) -> str | None:
    """The path as text; None for a descriptor, which was opened by its name before."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None
