"""Libraries that open files in C, past Python's functions: they are given the paths of the overlay.

A row of :data:`_CALLS` is a function or method that takes a path: its module, its name, which argument the path is, and
whether it writes there (or a function of the other arguments that says so).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from graphmem.sandbox import guard as guards
from graphmem.sandbox.guard import Guard
from graphmem.sandbox.overlay import Overlay


@dataclass(frozen=True)
class _Call:
    module: str
    name: str
    argument: int
    keyword: str
    is_written: Callable[[str], bool]
    mode: int = 1  # the argument that says how it is opened


def _always(_: str) -> bool:
    return True


def _never(_: str) -> bool:
    return False


def _if_shared(shared: str) -> bool:
    return shared == "True"


def _by_mode(mode: str) -> bool:
    return mode not in ("r", "rb", "")


_CALLS = (
    _Call("h5py._hl.files", "make_fid", 0, "name", _by_mode),
    _Call("torch.storage", "UntypedStorage.from_file", 0, "filename", _if_shared),  # torch.load(mmap=True)
    _Call("tokenizers", "Tokenizer.save", 1, "path", _always),
    _Call("tokenizers", "Tokenizer.from_file", 0, "path", _never),
    _Call("tokenizers.models", "Model.save", 1, "folder", _always),
    _Call("sentencepiece", "SentencePieceProcessor.LoadFromFile", 1, "arg", _never),
    _Call("pyarrow", "memory_map", 0, "path", _by_mode),
    _Call("pyarrow", "OSFile", 0, "path", _by_mode),
    _Call("pyarrow", "create_memory_map", 0, "path", _always),
    _Call("_gdbm", "open", 0, "filename", _by_mode),
    _Call("_dbm", "open", 0, "filename", _by_mode),
    _Call("dbm.gnu", "open", 0, "filename", _by_mode),
    _Call("dbm.ndbm", "open", 0, "filename", _by_mode),
)


@contextlib.contextmanager
def libraries_over(overlay: Overlay, guard: Guard) -> Iterator[None]:
    """Until the end of this context, these libraries, and sqlite, open files of the overlay."""
    undo: list[Callable[[], None]] = []
    finder = _Finder(lambda module: _wrap(module, overlay, guard, undo))
    for name in {call.module for call in _CALLS} | set(_SQLITE):
        module = sys.modules.get(name)
        if module is not None:
            _wrap(module, overlay, guard, undo)
    sys.meta_path.insert(0, finder)
    _wrap_sockets(overlay, guard, undo)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for one in reversed(undo):
            one()


def _wrap(module: ModuleType, overlay: Overlay, guard: Guard, undo: list[Callable[[], None]]) -> None:
    for call in _CALLS:
        if call.module == module.__name__:
            owner: Any = module
            *owners, name = call.name.split(".")
            for one in owners:
                owner = getattr(owner, one, None)
            before = inspect.getattr_static(owner, name, None)
            if before is not None:
                with contextlib.suppress(TypeError):  # a type that cannot be changed
                    _set(owner, name, _given_place(call, before, overlay, guard), undo)
    if module.__name__ in _SQLITE and hasattr(module, "connect"):
        _set(module, "connect", _connecting(module.connect, overlay, guard), undo)


def _set(owner: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    before = vars(owner).get(name)  # None: a base class has it
    setattr(owner, name, value)
    undo.append(lambda: delattr(owner, name) if before is None else setattr(owner, name, before))


def _given_place(call: _Call, before: Any, overlay: Overlay, guard: Guard) -> Any:
    is_static = isinstance(before, staticmethod)
    original = before.__func__ if is_static else before

    def ours(*args: object, **kwargs: object) -> Any:
        if not _is_flying(guard):
            return original(*args, **kwargs)
        mode = kwargs.get("mode", kwargs.get("flags", args[call.mode] if len(args) > call.mode else ""))
        written = call.is_written(str(mode))
        with guard.own():
            if call.keyword in kwargs:
                kwargs[call.keyword] = _as_given(kwargs[call.keyword], overlay, written)
            elif len(args) > call.argument:
                place = _as_given(args[call.argument], overlay, written)
                args = (*args[: call.argument], place, *args[call.argument + 1 :])
            return original(*args, **kwargs)

    if isinstance(original, type):  # a class that is called keeps what it is asked for
        return type(original.__name__, (), {"__new__": lambda _, *args, **kwargs: ours(*args, **kwargs)})
    with contextlib.suppress(AttributeError, TypeError):
        ours = wraps(original)(ours)
    return staticmethod(ours) if is_static else ours


def _as_given(path: Any, overlay: Overlay, written: bool) -> Any:
    if not isinstance(path, (str, bytes, os.PathLike)):
        return path
    place = overlay.for_library(path, written)
    return os.fsencode(place) if isinstance(path, bytes) else place


def _is_flying(guard: Guard) -> bool:
    return guards.current() is guard and not guard.is_own and guard.applies()


# --- sqlite -----------------------------------------------------------------------------------------------------------

_SQLITE = ("sqlite3", "sqlite3.dbapi2", "_sqlite3")
#: What sqlite keeps beside a database (sqlite.org/tempfiles.html).
_BESIDE = ("-journal", "-wal", "-shm")


def _connecting(original: Any, overlay: Overlay, guard: Guard) -> Any:
    @wraps(original)
    def connect(database: Any, *args: object, **kwargs: object) -> Any:
        if not _is_flying(guard):
            return original(database, *args, **kwargs)
        with guard.own():
            return original(_database(database, bool(kwargs.get("uri")), overlay), *args, **kwargs)

    return connect


def _database(database: Any, is_uri: bool, overlay: Overlay) -> Any:
    name = os.fsdecode(database)
    if name in ("", ":memory:"):
        return database
    if not (is_uri and name.startswith("file:")):
        return _copied(name, overlay)
    path, mark, options = name.removeprefix("file:").partition("?")
    if path in ("", ":memory:") or "mode=memory" in options:
        return database
    place = _copied(unquote(path), overlay)
    return f"file:{place.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}{mark}{options}"


def _copied(path: str, overlay: Overlay) -> str:
    place = overlay.for_library(path, True)
    if not os.path.lexists(place):
        return place
    for end in _BESIDE:
        if overlay.found(overlay.resolve(path + end)):
            overlay.for_library(path + end, True)
    return place


# --- sockets in the file system ---------------------------------------------------------------------------------------

#: Bytes that a path of a socket may have (sun_path, sys/un.h).
_LONGEST_ADDRESS = 100


def _wrap_sockets(overlay: Overlay, guard: Guard, undo: list[Callable[[], None]]) -> None:
    """Let sockets that are bound to a path be among the changes, and be known by the path that the program gave."""
    kind: Any = socket.socket
    names: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
    originals = {name: getattr(kind, name) for name in ("bind", "connect", "connect_ex", "getsockname")}

    def placed(name: str) -> Callable[[Any, Any], Any]:
        def ours(self: Any, address: Any) -> Any:
            is_path = isinstance(address, (str, bytes)) and address and os.fsdecode(address)[0] != "\0"
            if not is_path or self.family != getattr(socket, "AF_UNIX", None) or not _is_flying(guard):
                return originals[name](self, address)
            with guard.own():
                place = overlay.for_library(address, True) if name == "bind" else overlay.reading(address)
                if name != "bind" and overlay.real(os.path.abspath(overlay.absolute(address))) is not None:
                    place = ""
            if not place:
                return originals[name](self, address)
            with guard.own(), _shortened(place) as short:
                result = originals[name](self, short)
                if name == "bind":
                    names[self] = address
            return result

        return ours

    for name in ("bind", "connect", "connect_ex"):
        setattr(kind, name, placed(name))
    kind.getsockname = lambda self: names[self] if self in names else originals["getsockname"](self)
    for name in originals:
        undo.append(partial(delattr, kind, name))


@contextlib.contextmanager
def _shortened(path: str) -> Iterator[str]:
    """A path that fits an address of a socket."""
    if len(os.fsencode(path)) < _LONGEST_ADDRESS or not os.path.isdir("/proc/self/fd"):
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


# --- libraries that are imported later --------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: of the modules of the table, what is found has ``wrap`` called when it is loaded."""

    def __init__(self, wrap: Callable[[ModuleType], None]) -> None:
        self._wrap = wrap
        self._names = {call.module for call in _CALLS} | set(_SQLITE)
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give, with a loader of ours around theirs."""
        if name not in self._names or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._wrap)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, wrap: Callable[[ModuleType], None]) -> None:
        self._loader, self._wrap = loader, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does, and then replace the calls."""
        self._loader.exec_module(module)
        self._wrap(module)
