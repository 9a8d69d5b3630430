"""Libraries that open files in C, past Python's functions: they are given the paths of the overlay.

A row of :data:`_CALLS` is a function or method that takes a path: its module, its name, which argument the path is, and
with which modes it only reads there.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import ClassMethodDescriptorType, ModuleType
from typing import Any
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from graphmem.base.imports import watched_imports
from graphmem.sandbox import guard as guards
from graphmem.sandbox.copies import StrOrBytesPath
from graphmem.sandbox.guard import Guard
from graphmem.sandbox.overlay import Overlay

_READING = ("r", "rb", "")


@dataclass(frozen=True)
class _Call:
    module: str
    name: str
    argument: int
    keyword: str
    #: Values of the argument ``mode`` with which nothing is written; None: it is never.
    reading: tuple[str, ...] | None = _READING
    mode: int = 1
    #: Other paths: their arguments.
    more: tuple[tuple[int, str], ...] = ()


_CALLS = (
    _Call("h5py._hl.files", "make_fid", 0, "name"),
    _Call("torch.storage", "UntypedStorage.from_file", 0, "filename", ("False", "")),  # torch.load(mmap=True)
    _Call("tokenizers", "Tokenizer.save", 1, "path", ()),
    _Call("tokenizers", "Tokenizer.from_file", 0, "path", None),
    _Call("tokenizers.models", "Model.save", 1, "folder", ()),
    *(
        _Call("tokenizers.models", name, 0, "vocab", None, more=((1, "merges"),) if model == "BPE" else ())
        for model in ("BPE", "WordLevel", "WordPiece")
        for name in (f"{model}.from_file", f"{model}.read_file", model)
    ),
    _Call("sentencepiece", "SentencePieceProcessor.LoadFromFile", 1, "arg", None),
    _Call("pyarrow", "memory_map", 0, "path"),
    _Call("pyarrow", "OSFile", 0, "path"),
    _Call("pyarrow", "create_memory_map", 0, "path", ()),
    _Call("_gdbm", "open", 0, "filename"),
    _Call("_dbm", "open", 0, "filename"),
    _Call("dbm.gnu", "open", 0, "filename"),
    _Call("dbm.ndbm", "open", 0, "filename"),
)


@contextlib.contextmanager
def libraries_over(overlay: Overlay, guard: Guard) -> Iterator[None]:
    """Until the end of this context, these libraries, and sqlite, open files of the overlay."""
    names = {call.module for call in _CALLS} | set(_SQLITE)
    with contextlib.ExitStack() as undo:

        def execute(module: ModuleType, run: Callable[[], None]) -> None:
            run()
            _wrap(module, overlay, guard, undo)

        for module in filter(None, map(sys.modules.get, names)):
            _wrap(module, overlay, guard, undo)
        _wrap_sockets(overlay, guard, undo)
        with watched_imports(dict.fromkeys(names, execute)):
            yield


def _wrap(module: ModuleType, overlay: Overlay, guard: Guard, undo: contextlib.ExitStack) -> None:
    for call in _CALLS:
        if call.module == module.__name__:
            owner: Any = module
            *owners, name = call.name.split(".")
            for one in owners:
                owner = getattr(owner, one, None)
            before = inspect.getattr_static(owner, name, None)
            if before is not None:
                with contextlib.suppress(TypeError):  # a type that cannot be changed
                    _set(owner, name, _given_place(call, before, owner, overlay, guard), undo)
    if module.__name__ in _SQLITE and hasattr(module, "connect"):
        _set(module, "connect", _connecting(module.connect, overlay, guard), undo)


def _set(owner: object, name: str, value: object, undo: contextlib.ExitStack) -> None:
    """Raises :class:`TypeError` for a type that cannot be changed."""
    before = vars(owner).get(name)  # None: a base class has it
    setattr(owner, name, value)
    if before is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)


def _given_place(call: _Call, before: Any, owner: Any, overlay: Overlay, guard: Guard) -> object:
    is_static = isinstance(before, (staticmethod, ClassMethodDescriptorType))
    original = before.__get__(None, owner) if is_static else before

    def ours(*args: Any, **kwargs: object) -> Any:
        if not _is_flying(guard):
            return original(*args, **kwargs)
        mode = kwargs.get("mode", kwargs.get("flags", args[call.mode] if len(args) > call.mode else ""))
        written = call.reading is not None and str(mode) not in call.reading
        with guard.own():
            for argument, keyword in ((call.argument, call.keyword), *call.more):
                if keyword in kwargs:
                    kwargs[keyword] = _as_given(kwargs[keyword], overlay, written)
                elif len(args) > argument:
                    args = (*args[:argument], _as_given(args[argument], overlay, written), *args[argument + 1 :])
            return original(*args, **kwargs)

    if isinstance(original, type):
        return _StandIn(original.__name__, (), {"original": original, "make": staticmethod(ours)})
    with contextlib.suppress(AttributeError, TypeError):
        ours = wraps(original)(ours)
    return staticmethod(ours) if is_static else ours


class _StandIn(type):
    """Stands for a class of C's, whose ``__new__`` cannot be put back (``update_one_slot``, Objects/typeobject.c)."""

    original: type
    make: Callable[..., Any]

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def _as_given(path: object, overlay: Overlay, written: bool) -> object:
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


def _connecting(original: Callable[..., object], overlay: Overlay, guard: Guard) -> Callable[..., object]:
    @wraps(original)
    def connect(database: StrOrBytesPath, *args: object, **kwargs: object) -> object:
        if not _is_flying(guard):
            return original(database, *args, **kwargs)
        with guard.own():
            return original(_database(database, bool(kwargs.get("uri")), overlay), *args, **kwargs)

    return connect


def _database(database: StrOrBytesPath, is_uri: bool, overlay: Overlay) -> StrOrBytesPath:
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


def _wrap_sockets(overlay: Overlay, guard: Guard, undo: contextlib.ExitStack) -> None:
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
        _set(kind, name, placed(name), undo)
    _set(kind, "getsockname", lambda self: names[self] if self in names else originals["getsockname"](self), undo)


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
