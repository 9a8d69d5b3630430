"""Files that somebody else wrote: opened without waiting for ever, read with limits, and held against the types of the
values they become.

A path may lead to a device without end, a pipe that nobody writes to or a file of terabytes; a document may be
truncated, nested deeper than the parser's stack, hold numbers of thousands of digits, or be a few bytes that unpack to
gigabytes. Each of these is an ``OSError`` or a ``ValueError`` here, which the caller turns into an error that names the
file.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import select
import stat
import time
import types
import typing
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

#: Bytes that a document may have, and one that was compressed.
LARGEST_DOCUMENT = 1 << 30
LARGEST_UNPACKED = 1 << 28
#: Bytes that a configuration written by hand may have.
LARGEST_CONFIGURATION = 1 << 16
#: Whole numbers beyond this are no sizes, counts or addresses of anything.
LARGEST_NUMBER = 2**63 - 1


#: Seconds that a pipe may take until somebody writes to it.
_WRITER_PATIENCE = 2.0


class _Pipe(io.RawIOBase):
    """The reading end of a pipe. One that nobody writes to is an :class:`OSError` after :data:`_WRITER_PATIENCE`; a
    writer that is there may be as slow as it likes, as that of ``graphmem replay <(ssh host cat snapshot)`` is."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._until = time.monotonic() + _WRITER_PATIENCE
        self._began = False

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer``; 0 at the end."""
        while True:
            try:
                count = os.readv(self._descriptor, [buffer])
            except BlockingIOError:  # somebody has it open to write
                select.select([self._descriptor], [], [], 1.0)
                continue
            if count or self._began:
                self._began = True
                return count
            if time.monotonic() > self._until:
                raise OSError(errno.EPIPE, "nothing came out of this pipe")
            time.sleep(0.02)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def open_file(path: str | os.PathLike[str], *, pipes: bool = True) -> io.BufferedReader:
    """The file or pipe at ``path``, to be read; ``pipes`` is False where the reader has to seek.

    Raises :class:`OSError` for anything else (a device, a folder, a socket), beside the errors of ``open``.
    """
    text = os.fspath(path)
    _check_kind(os.stat(text).st_mode, text, pipes)  # before it is opened: opening a device may do something
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(text, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        _check_kind(mode, text, pipes)
        return io.BufferedReader(_Pipe(descriptor)) if stat.S_ISFIFO(mode) else os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(mode: int, path: str, pipes: bool) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if stat.S_ISFIFO(mode) and not pipes:
        raise OSError(errno.ESPIPE, "it is a pipe, and has to be a file", path)
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise OSError(errno.EINVAL, "it is a device and not a file", path)


def read_bounded(file: typing.BinaryIO | io.BufferedReader | gzip.GzipFile, limit: int = LARGEST_DOCUMENT) -> bytes:
    """The bytes left in ``file``. Raises :class:`ValueError` for more than ``limit`` bytes, of a file on the disk
    before anything is read."""
    if not isinstance(file, gzip.GzipFile) and os.fstat(file.fileno()).st_size > limit:
        raise ValueError(f"it has more than {_mebibytes(limit)}")
    content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {_mebibytes(limit)}")
    return content


def _mebibytes(limit: int) -> str:
    return f"{limit >> 20} MiB" if limit >> 20 else f"{limit >> 10} KiB"


def read_content(path: Path, limit: int = LARGEST_DOCUMENT) -> bytes:
    """The bytes of a file or a pipe. Raises :class:`ValueError` for more than ``limit``, and as :func:`open_file`."""
    with open_file(path) as file:
        return read_bounded(file, limit)


def read_lines(path: Path, longest: int) -> Iterator[str]:
    """The lines of a text file, with their ends. Raises :class:`ValueError` for one of more than ``longest``
    characters, and as :func:`open_file` and :func:`text_of`."""
    with open_file(path) as file, io.TextIOWrapper(file, json.detect_encoding(file.peek(4)[:4]), newline="") as text:
        number = 0
        try:
            while line := text.readline(longest + 1):
                number += 1
                if len(line) > longest:
                    raise ValueError(f"line {number} has more than {longest:,} characters")
                yield line
        except UnicodeDecodeError as error:
            raise ValueError(_not_text(error)) from None


def text_of(data: bytes) -> str:
    """``data`` as text: UTF-8, or UTF-16 or UTF-32 as Windows' programs write it, with or without a byte order mark.
    Raises :class:`ValueError`."""
    try:
        return data.decode(json.detect_encoding(data))
    except UnicodeDecodeError as error:
        raise ValueError(_not_text(error)) from None


def _not_text(error: UnicodeDecodeError) -> str:
    return f"it is not {error.encoding.upper()} text: {error.reason} at byte {error.start}"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises :class:`ValueError` with the reason in one line."""
    if isinstance(text, bytes):
        text = text_of(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    except ValueError:  # the interpreter's own limit on digits
        raise ValueError("it holds a number of too many digits") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises :class:`ValueError`, or :class:`OSError` for a file that cannot be read."""
    return parse_json(read_content(path))


def read_gzipped_json(path: Path) -> Any:
    """The value of a JSON file compressed by gzip. Raises as :func:`read_json`."""
    try:
        with open_file(path) as packed, gzip.open(packed) as file:
            content = read_bounded(file, LARGEST_UNPACKED)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"it is not a gzip file, or is cut off: {error}") from None
    return parse_json(content)


def read_yaml(path: Path) -> object:
    """The value of a YAML configuration of plain data. Raises as :func:`read_json`, and ``ImportError`` without PyYAML.

    Aliases are refused: a few hundred bytes of them unfold to gigabytes as soon as somebody writes the value out.
    """
    return _read_yaml(path, "load")


def read_yamls(path: Path) -> list[object]:
    """The values of the documents in a YAML file, as :func:`read_yaml`."""
    found: list[object] = _read_yaml(path, "load_all")
    return found


def _read_yaml(path: Path, load: str) -> Any:
    """What PyYAML's function of this name reads."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def compose_node(self, parent: object, index: object) -> object:
            if self.check_event(yaml.AliasEvent):
                where = self.peek_event().start_mark
                raise ValueError(f"line {where.line + 1} has an alias (*name); write the value out in its place")
            return super().compose_node(parent, index)

    text = text_of(read_content(path, LARGEST_CONFIGURATION))
    try:
        found = getattr(yaml, load)(text, Loader)
        return found if load == "load" else list(found)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from None
    except (LookupError, AttributeError, TypeError, OverflowError) as error:  # PyYAML's own, of values with a wrong tag
        raise ValueError(f"it holds a value that is not of its type: {type(error).__name__}: {error}") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_fields(kind: type, values: Mapping[str, Any]) -> None:
    """Hold ``values`` against the annotated types of the dataclass ``kind``. Raises :class:`ValueError` naming the
    first that does not fit; names that are missing, or are no field, are left to the constructor."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{shown(values)} is no {kind.__name__}")
    hints = _hints(kind)
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            raise ValueError(f"{name} is {shown(value)}")


def fits(value: object, hint: Any) -> bool:
    """True if ``value`` is of the annotated type. Whole numbers are of 64 bits; a truth value is none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if hint is Any or hint is object:
        return True
    if hint is None or hint is type(None):
        return value is None
    if hint is int:
        return type(value) is int and abs(value) <= LARGEST_NUMBER
    if hint is float:
        return fits(value, int) or type(value) is float
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        if len(inner) == 2 and inner[1] is Ellipsis:
            return all(fits(one, inner[0]) for one in value)
        return len(value) == len(inner) and all(fits(one, kind) for one, kind in zip(value, inner, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    return isinstance(value, hint)


def shown(value: object) -> str:
    """A value in an error: short, whatever it is."""
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return "a number of more than 64 bits"
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
