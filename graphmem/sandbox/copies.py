"""Copies of files that keep their holes: a checkpoint that was saved without its data has nothing but one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

_PART = 1 << 24


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
    """(begin, end) of the next data; all the rest on systems that do not tell of holes."""
    if not hasattr(os, "SEEK_DATA"):
        return position, size
    try:
        start = os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (position, size)
    return start, os.lseek(descriptor, start, os.SEEK_HOLE)


def copy_tree(source: str, target: str) -> None:
    """Copy a file, a link, or a folder with all below it, to where nothing is. Raises :class:`OSError`."""
    if os.path.islink(source) or not os.path.isdir(source):
        copy_file(source, target)
        return
    os.mkdir(target)
    with os.scandir(source) as entries:
        for entry in entries:
            copy_tree(entry.path, os.path.join(target, entry.name))
    with contextlib.suppress(OSError):
        shutil.copystat(source, target)
