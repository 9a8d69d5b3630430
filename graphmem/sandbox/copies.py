"""Copies of files that keep their holes: a checkpoint that was saved without its data has nothing but one. Also the
checks of both ends for a renaming that becomes a copy."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable

_PART = 1 << 24

#: A file as Python's functions take it: its path, or the number of an open one.
StrOrBytesPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
FileDescriptorOrPath = int | StrOrBytesPath


def error(number: int, path: FileDescriptorOrPath, other: str | None = None) -> OSError:
    """An error as the operating system raises it."""
    return OSError(number, os.strerror(number), path, None, other)


def is_folder(path: str) -> bool:
    """True if it is a folder, and no link to one."""
    return os.path.isdir(path) and not os.path.islink(path)


def check_replaced(moves_folder: bool, new: str, names: tuple[str, str]) -> None:
    """Raise the operating system's error where a folder would replace a file, or a file the folder ``new``."""
    if moves_folder != is_folder(new):
        raise error(errno.ENOTDIR if moves_folder else errno.EISDIR, *names)


def device_of(path: str, real: Callable[[str], str] = lambda path: path) -> int:
    """The file system that a file would be on; ``real`` gives the path by which the real tree is reached."""
    path = os.path.dirname(os.path.abspath(path))
    while True:
        try:
            return os.stat(real(path)).st_dev
        except OSError:
            path = os.path.dirname(path)


def copy_file(source: str, target: str) -> None:
    """Copy data, permissions and times of a file, or a symbolic link itself. Raises :class:`OSError`."""
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    else:
        with open(source, "rb", buffering=0) as old, open(target, "wb", buffering=0) as new:
            _copy_data(old.fileno(), new.fileno())
    with contextlib.suppress(OSError):
        shutil.copystat(source, target, follow_symlinks=False)


def _copy_data(old: int, new: int) -> None:
    size = os.fstat(old).st_size
    os.ftruncate(new, size)
    position = 0
    while position < size:
        start, position = _data_after(old, position, size)
        if start >= size:
            return
        os.lseek(old, start, os.SEEK_SET)
        os.lseek(new, start, os.SEEK_SET)
        while start < position:
            part = os.read(old, min(_PART, position - start))
            if not part:  # it was cut meanwhile
                return
            os.write(new, part)
            start += len(part)


def _data_after(descriptor: int, position: int, size: int) -> tuple[int, int]:
    """(begin, end) of the next data; all the rest on systems that do not know holes."""
    if not hasattr(os, "SEEK_DATA"):
        return position, size
    try:
        start = os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (position, size)
    return start, os.lseek(descriptor, start, os.SEEK_HOLE)


def copy_tree(source: str, target: str) -> None:
    """Copy a file, a link, or a folder with all below it, to where nothing is. Raises :class:`OSError`."""
    if not is_folder(source):
        copy_file(source, target)
        return
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            copy_tree(entry.path, os.path.join(target, entry.name))
    with contextlib.suppress(OSError):
        shutil.copystat(source, target)
