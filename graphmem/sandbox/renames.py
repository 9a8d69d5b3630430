"""``os.rename`` where one real file system is shown as several overlays.

The kernel renames neither between two of them nor, in a user namespace, a folder that is real (``redirect_dir`` needs
the machine's root): it gives EXDEV, where the real tree would have renamed. Then it is copied, and the old one removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from functools import wraps

from graphmem.base.environment import having
from graphmem.sandbox.copies import StrOrBytesPath, check_replaced, copy_tree, device_of
from graphmem.sandbox.guard import own

_Rename = Callable[..., None]


def renames_by_copies(real: Callable[[str], str]) -> contextlib.AbstractContextManager[None]:
    """Until the end of this context, renamings that only the overlays refuse are done. ``real`` gives the path by which
    a file of the real tree is reached."""
    return having(os, rename=_retried(os.rename, real), replace=_retried(os.replace, real))


def _retried(original: _Rename, real: Callable[[str], str]) -> _Rename:
    """``os.rename`` that moves by copying where the sandbox alone makes it fail (``EXDEV``)."""

    @wraps(original)
    def rename(
        src: StrOrBytesPath, dst: StrOrBytesPath, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        try:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as refused:
            if refused.errno != errno.EXDEV:
                raise
            source, target = _absolute(src, src_dir_fd), _absolute(dst, dst_dir_fd)
            if device_of(source, real) != device_of(target, real):
                raise
            try:
                with own():
                    _move(original, source, target)
            except OSError as found:
                found.filename, found.filename2 = src, dst
                raise found from None

    return rename


def _absolute(path: StrOrBytesPath, folder: int | None) -> str:
    start = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.join(start, os.fsdecode(path))


def _move(rename: _Rename, source: str, target: str) -> None:
    moves_folder = stat.S_ISDIR(os.lstat(source).st_mode)
    if os.path.lexists(target):
        check_replaced(moves_folder, target, (source, target))
        if moves_folder:
            os.rmdir(target)  # raises where it is not empty, as rename does
    beside = os.path.join(os.path.dirname(target), f".graphmem-{os.getpid()}-{os.path.basename(target)[:100]}")
    copy_tree(source, beside)
    rename(beside, target)
    if moves_folder:
        shutil.rmtree(source)
    else:
        os.unlink(source)
