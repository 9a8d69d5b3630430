"""An overlay of files made in Python: each function of ``os`` that takes a path, over real files and changed ones.

Changed files are in the folder ``tree``, at their absolute path. A file named ``.wh.NAME`` in it hides the real
``NAME``, and ``.wh..wh..opq`` in a folder hides all that is real in it. All of the state is on the disk, so that
processes which the program forks share it.

Functions of ``os`` are called here as they are in the module ``posix`` or ``nt``, or by a thread that
:meth:`graphmem.sandbox.guard.Guard.own` lets through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from graphmem.sandbox.changes import DELETED, OPAQUE, Tree
from graphmem.sandbox.copies import (
    FileDescriptorOrPath,
    StrOrBytesPath,
    check_replaced,
    copy_file,
    device_of,
    error,
    is_folder,
)

#: The functions of the operating system themselves.
native: Any = import_module(os.name if os.name in ("posix", "nt") else "posix")

_MOST_LINKS = 40
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY = getattr(os, "O_TMPFILE", 0)
#: Devices, and the kernel's own: no files of the user's.
_SYSTEM = ("/dev", "/proc", "/sys")


def writes(flags: int) -> bool:
    """True if a file that is opened with these flags can be changed."""
    return bool(flags & _WRITING) or (_TEMPORARY != 0 and flags & _TEMPORARY == _TEMPORARY)


def _touch(path: str) -> None:
    """Have an empty file at a path."""
    native.close(native.open(path, os.O_CREAT | os.O_WRONLY, 0o600))


class Overlay:
    """Real files with changes in ``folder``; below the folders ``writable`` the real files themselves."""

    def __init__(self, folder: str, writable: Sequence[str] = (), everywhere: bool = False) -> None:
        self.tree = os.path.join(folder, "tree")
        self._free = (folder, *(_SYSTEM if os.name == "posix" else ()), *writable)
        self._everywhere = everywhere
        self._generation: int | None = None  # of the changes that the following is true of
        self._folders: dict[str, str] = {}  # a folder as it was named -> resolved
        self._untouched: set[str] = set()  # resolved folders with nothing changed in or above them

    @property
    def has_changes(self) -> bool:
        """True if anything differs from the real files. Asked first by every call, so of no call that is wrapped."""
        try:
            generation = native.lstat(self.tree).st_mtime_ns
        except FileNotFoundError:
            generation = None
        if generation != self._generation:
            self._forget(generation)
        return generation is not None

    def _forget(self, generation: int | None) -> None:
        self._generation = generation
        self._folders.clear()
        self._untouched.clear()

    def note_change(self) -> None:
        """Something was changed: stored answers, here and in other processes, may be wrong now."""
        with contextlib.suppress(FileNotFoundError):
            native.utime(self.tree)
        self._forget(None)

    def reset(self) -> None:
        """Forget all changes."""
        shutil.rmtree(self.tree, ignore_errors=True)

    def trees(self) -> list[Tree]:
        """The folder of the changes."""
        return [Tree(os.sep, os.sep, self.tree)] if os.name == "posix" else [
            Tree(f"{one}:{os.sep}", f"{one}:{os.sep}", os.path.join(self.tree, one)) for one in _names(self.tree)
        ]  # fmt: skip

    # --- paths --------------------------------------------------------------------------------------------------------

    def is_free(self, path: str) -> bool:
        """True if a path is not redirected."""
        return self._everywhere or any(path == one or path.startswith(one + os.sep) for one in self._free)

    def upper(self, path: str) -> str:
        """Where the changed file of a resolved path is; the path itself where it is free."""
        if self.is_free(path):
            return path
        drive, rest = os.path.splitdrive(path)
        return os.path.join(self.tree, drive.rstrip(":"), rest.lstrip(os.sep)).rstrip(os.sep)

    def place(self, path: str) -> str:
        """The path that the program knows, of one that may be in the tree of changes."""
        if path != self.tree and not path.startswith(self.tree + os.sep):
            return path
        rest = path[len(self.tree) :]
        if os.name == "posix":
            return rest or os.sep
        drive, _, below = rest.lstrip(os.sep).partition(os.sep)
        return f"{drive}:{os.sep}{below}"

    def absolute(self, path: StrOrBytesPath, folder: int | None = None) -> str:
        """A path from the root on, with its ``..`` and links; ``folder``: the value of ``dir_fd``."""
        start = native.getcwd() if folder is None else path_of(folder)
        return os.path.join(self.place(start), os.fsdecode(path))

    def resolve(self, path: StrOrBytesPath, follow: bool = True, folder: int | None = None) -> str:
        """The path without links, ``.`` and ``..``; the last link stays where it is not to ``follow``."""
        text = os.fsdecode(path)
        if text == "":
            raise error(errno.ENOENT, "")
        head, name = os.path.split(self.absolute(path, folder))
        if name in ("", ".", ".."):
            return self._walk(os.path.join(head, name), follow, text)
        at = self._folders.get(head)
        if at is None:
            at = self._walk(os.path.join(head, "."), True, text)
            found = self.found(at)
            if not os.path.isdir(found or ""):
                raise error(errno.ENOTDIR if found else errno.ENOENT, text)
            self._folders[head] = at
            if found == at and not self.is_free(at):
                self._untouched.add(at)
        at = os.path.join(at, name)
        if not follow or not os.path.islink(self.found(at) or ""):
            return at
        return self._walk(at, True, text)

    def _walk(self, path: str, follow: bool, given: str) -> str:
        """The path with its links and ``..`` resolved as the program sees them; ``follow``: the last part too. Raises
        :class:`OSError` that names the path ``given``."""
        drive, rest = os.path.splitdrive(path)
        at, links = drive + os.sep, 0
        left = _parts(rest)
        while left:
            part = left.pop()
            if part == "..":
                at = os.path.dirname(at)
                continue
            candidate = os.path.join(at, part)
            found = self.found(candidate) if left or follow else None
            if found is None or not os.path.islink(found):
                if left and not os.path.isdir(found or ""):
                    raise error(errno.ENOTDIR if found else errno.ENOENT, given)
                at = candidate
                continue
            links += 1
            if links > _MOST_LINKS:
                raise error(errno.ELOOP, given)
            target = native.readlink(found)
            if os.path.isabs(target):
                drive, target = os.path.splitdrive(target)
                at = drive + os.sep
            left.extend(_parts(target))
        return at

    def found(self, path: str) -> str | None:
        """Where a resolved path is read: among the changes, or really; None where there is nothing."""
        if os.path.dirname(path) in self._untouched:
            return path if os.path.lexists(path) else None
        upper = self.upper(path)
        if os.path.lexists(upper):
            return upper
        return path if self._is_shown(path) else None

    def real(self, path: str) -> str | None:
        """The real file that a path stands for; None for one that is the program's own."""
        found = self.found(self.resolve(path))
        return found if found == path and not found.startswith(self._free[0] + os.sep) else None

    def reading(self, path: StrOrBytesPath, follow: bool = True, folder: int | None = None) -> str:
        """Where a path is read; where there is nothing, a path that there is nothing at either."""
        resolved = self.resolve(path, follow, folder)
        return self.found(resolved) or self.upper(resolved)

    def _is_shown(self, path: str) -> bool:
        """True if there is a real file at a path, and nothing hides it."""
        return os.path.lexists(path) and not self._is_hidden(path)

    def _is_hidden(self, path: str) -> bool:
        if self.is_free(path) or os.path.dirname(path) in self._untouched:
            return False
        drive, rest = os.path.splitdrive(path)
        upper = self.upper(drive + os.sep)
        for part in reversed(_parts(rest)):
            if os.path.lexists(os.path.join(upper, OPAQUE)) or os.path.lexists(os.path.join(upper, DELETED + part)):
                return True
            if os.path.lexists(upper) and not os.path.isdir(upper):
                return True
            upper = os.path.join(upper, part)
            if not os.path.lexists(upper):
                return False  # below a folder without changes nothing is hidden
        return False

    # --- changes ------------------------------------------------------------------------------------------------------

    def _check_parent(self, path: str) -> None:
        """Raises the operating system's error for a new or deleted entry."""
        parent = os.path.dirname(path)
        found = self.found(parent)
        if found is None:
            raise error(errno.ENOENT, path)
        if not os.path.isdir(found):
            raise error(errno.ENOTDIR, path)
        if not os.access(parent if self._is_shown(parent) else found, os.W_OK | os.X_OK):
            raise error(errno.EACCES, path)

    def _make_folder(self, path: str) -> None:
        """Have a folder among the changes for one that is seen."""
        upper = self.upper(path)
        if os.path.lexists(upper):
            return
        if path == os.path.dirname(path):
            os.makedirs(upper, exist_ok=True)
            return
        self._make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            native.mkdir(upper)
        self.note_change()
        status = native.stat(path)
        native.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
        native.chmod(upper, stat.S_IMODE(status.st_mode) | 0o700)

    def _copy_up(self, path: str) -> str:
        """Have a seen file or folder among the changes; gives its place there."""
        upper = self.upper(path)
        if not os.path.lexists(upper):
            if is_folder(path):
                self._make_folder(path)
            else:
                self._make_folder(os.path.dirname(path))
                copy_file(path, upper)
        return upper

    def _copy_all_up(self, path: str) -> str:
        upper = self._copy_up(path)
        if is_folder(upper):
            for name in self.names(path):
                self._copy_all_up(os.path.join(path, name))
        return upper

    def _new(self, path: str) -> str:
        """The path, in the upper layer, of an entry to be made; its folder is made there."""
        self._check_parent(path)
        self._make_folder(os.path.dirname(path))
        self.note_change()
        return self.upper(path)

    def _show(self, path: str) -> bool:
        """An entry was made: remove the mark that hid the real one. True if there was one."""
        marker = os.path.join(os.path.dirname(self.upper(path)), DELETED + os.path.basename(path))
        with contextlib.suppress(FileNotFoundError):
            native.unlink(marker)
            return True
        return False

    def _hide(self, path: str) -> None:
        """Hide the real file."""
        if self.is_free(path) or not self._is_shown(path):
            return
        self._make_folder(os.path.dirname(path))
        marker = os.path.join(os.path.dirname(self.upper(path)), DELETED + os.path.basename(path))
        _touch(marker)

    def _remove_upper(self, path: str) -> None:
        upper = self.upper(path)
        if is_folder(upper):
            if not self.is_free(path):
                for name in (OPAQUE, *(one for one in _names(upper) if one.startswith(DELETED))):
                    with contextlib.suppress(FileNotFoundError):
                        native.unlink(os.path.join(upper, name))
            native.rmdir(upper)
        elif os.path.lexists(upper):
            native.unlink(upper)

    def names(self, path: str) -> list[str]:
        """The entries of a resolved folder as the program sees it."""
        upper = self.upper(path)
        if upper == path:
            return list(native.listdir(path))
        names = dict.fromkeys(native.listdir(path)) if self._shows_real_entries(path) else {}
        for name in _names(upper):
            if not name.startswith(DELETED):
                names[name] = None
            elif name != OPAQUE:
                names.pop(name.removeprefix(DELETED), None)
        return list(names)

    def _shows_real_entries(self, path: str) -> bool:
        upper = self.upper(path)
        if os.path.islink(upper) or (os.path.lexists(upper) and not os.path.isdir(upper)):
            return False
        return os.path.isdir(path) and not self._is_hidden(path) and not os.path.lexists(os.path.join(upper, OPAQUE))

    # --- functions of os ----------------------------------------------------------------------------------------------

    def open(self, path: StrOrBytesPath, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """``os.open``."""
        follow = not flags & getattr(os, "O_NOFOLLOW", 0) and flags & (os.O_CREAT | os.O_EXCL) != os.O_CREAT | os.O_EXCL
        at = self.resolve(path, follow, dir_fd)
        found = self.found(at)
        if not writes(flags) or self.is_free(at):
            return int(native.open(found or self.upper(at), flags, mode))
        upper = self.upper(at)
        if found is None:
            if not flags & os.O_CREAT:
                raise error(errno.ENOENT, os.fsdecode(path))
            opened = native.open(self._new(at), flags, mode)
            self._show(at)
            return int(opened)
        if _TEMPORARY and flags & _TEMPORARY == _TEMPORARY:
            self._make_folder(at)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise error(errno.EEXIST, os.fsdecode(path))
        elif os.path.isdir(found):
            raise error(errno.EISDIR, os.fsdecode(path))
        elif found != upper:
            if flags & (os.O_WRONLY | os.O_RDWR) and not os.access(found, os.W_OK):
                raise error(errno.EACCES, os.fsdecode(path))
            if flags & os.O_TRUNC:
                self._make_folder(os.path.dirname(at))
                _touch(upper)
                shutil.copymode(found, upper)
            else:
                self._copy_up(at)
        return int(native.open(upper, flags, mode))

    def mkdir(self, path: StrOrBytesPath, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """``os.mkdir``."""
        at = self._missing(path, dir_fd)
        native.mkdir(self._new(at), mode)
        if not self.is_free(at) and self._show(at):
            _touch(os.path.join(self.upper(at), OPAQUE))

    def rmdir(self, path: StrOrBytesPath, *, dir_fd: int | None = None) -> None:
        """``os.rmdir``."""
        at = self._existing(path, dir_fd)
        if not is_folder(self.found(at) or ""):
            raise error(errno.ENOTDIR, os.fsdecode(path))
        if self.names(at):
            raise error(errno.ENOTEMPTY, os.fsdecode(path))
        self._check_parent(at)
        self._delete(at)

    def unlink(self, path: StrOrBytesPath, *, dir_fd: int | None = None) -> None:
        """``os.unlink`` and ``os.remove``."""
        at = self._existing(path, dir_fd)
        if is_folder(self.found(at) or ""):
            raise error(errno.EISDIR if sys.platform == "linux" else errno.EPERM, os.fsdecode(path))
        self._check_parent(at)
        self._delete(at)

    def _existing(self, path: StrOrBytesPath, folder: int | None, follow: bool = False) -> str:
        at = self.resolve(path, follow, folder)
        if self.found(at) is None:
            raise error(errno.ENOENT, os.fsdecode(path))
        return at

    def _missing(self, path: StrOrBytesPath, folder: int | None, source: StrOrBytesPath | None = None) -> str:
        at = self.resolve(path, False, folder)
        if self.found(at) is not None:
            raise error(errno.EEXIST, *(os.fsdecode(one) for one in (source, path) if one is not None))
        return at

    def _delete(self, path: str) -> None:
        is_real = not self.is_free(path) and self._is_shown(path)
        self._remove_upper(path)
        if is_real:
            self._hide(path)

    def rename(
        self, src: StrOrBytesPath, dst: StrOrBytesPath, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """``os.rename`` and ``os.replace``."""
        source, target = self._existing(src, src_dir_fd), self.resolve(dst, False, dst_dir_fd)
        if source == target:
            return
        moves_folder = is_folder(self.found(source) or "")
        self._check_renamed(source, target, moves_folder, (os.fsdecode(src), os.fsdecode(dst)))
        is_replaced = self.found(target) is not None
        upper = self._copy_all_up(source) if not self.is_free(source) else source
        if is_replaced and (moves_folder or os.name == "nt"):
            self._remove_upper(target)
        self._make_folder(os.path.dirname(target))
        _replace(upper, self.upper(target))
        if not self.is_free(target):
            self._show(target)
            if moves_folder:
                _touch(os.path.join(self.upper(target), OPAQUE))
        self._hide(source)

    def _check_renamed(self, source: str, target: str, moves_folder: bool, names: tuple[str, str]) -> None:
        """Raises the operating system's error."""
        if target.startswith(source + os.sep):
            raise error(errno.EINVAL, *names)
        if source.startswith(target + os.sep):
            raise error(errno.ENOTEMPTY, *names)
        new = self.found(target)
        if new is not None:
            check_replaced(moves_folder, new, names)
            if moves_folder and self.names(target):
                raise error(errno.ENOTEMPTY, *names)
        for one in (source, target):
            self._check_parent(one)
        if device_of(source) != device_of(target) or (moves_folder and self.is_free(source) != self.is_free(target)):
            raise error(errno.EXDEV, *names)

    def link(
        self, src: StrOrBytesPath, dst: StrOrBytesPath, *, src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None, follow_symlinks: bool = True,
    ) -> None:  # fmt: skip
        """``os.link``."""
        source, target = self._existing(src, src_dir_fd), self._missing(dst, dst_dir_fd, src)
        native.link(self._copy_up(source), self._new(target), follow_symlinks=False)
        self._show(target)

    def symlink(
        self, src: StrOrBytesPath, dst: StrOrBytesPath, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        """``os.symlink``."""
        at = self._missing(dst, dir_fd, src)
        native.symlink(src, self._new(at), target_is_directory)
        self._show(at)

    def listdir(self, path: FileDescriptorOrPath | None = ".") -> list[str] | list[bytes]:
        """``os.listdir``."""
        at = self._folder(path)
        names = self.names(at)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: FileDescriptorOrPath | None = ".") -> Entries:
        """``os.scandir``."""
        at = self._folder(path)
        prefix = "" if path is None or isinstance(path, int) else os.fspath(path)
        return Entries(
            [
                Entry(
                    self,
                    os.path.join(prefix, os.fsencode(name))
                    if isinstance(prefix, bytes)
                    else os.path.join(prefix, name),
                    os.path.join(at, name),
                )
                for name in self.names(at)
            ]
        )

    def _folder(self, path: FileDescriptorOrPath | None) -> str:
        path = "." if path is None else path
        at = self.place(path_of(path)) if isinstance(path, int) else self.resolve(path)
        found = self.found(at)
        if found is None or not os.path.isdir(found):
            raise error(errno.ENOENT if found is None else errno.ENOTDIR, path)
        if not os.access(found, os.R_OK):
            raise error(errno.EACCES, path)
        return at

    def chdir(self, path: FileDescriptorOrPath) -> None:
        """``os.chdir``."""
        native.chdir(path if isinstance(path, int) else self.reading(path))

    def getcwd(self) -> str:
        """``os.getcwd``."""
        return self.place(native.getcwd())

    def getcwdb(self) -> bytes:
        """``os.getcwdb``."""
        return os.fsencode(self.getcwd())

    def read_with(self, function: Callable[..., object], follows: bool = True) -> Callable[..., object]:
        """A function of ``os`` that asks about a path, here."""
        return _on_place(function, self.reading, follows)

    def change_with(self, function: Callable[..., object], follows: bool = True) -> Callable[..., object]:
        """A function of ``os`` that changes the file at a path, here."""

        def copied(path: StrOrBytesPath, follow: bool, folder: int | None) -> str:
            at = self._existing(path, folder, follow)
            found = self.found(at) or at
            if found != self.upper(at) and function is native.truncate and not os.access(found, os.W_OK):
                raise error(errno.EACCES, os.fsdecode(path))
            return self._copy_up(at)

        return _on_place(function, copied, follows)

    def make_with(self, function: Callable[..., object]) -> Callable[..., None]:
        """A function of ``os`` that makes a file of another kind, here."""

        def make(path: StrOrBytesPath, *args: object, dir_fd: int | None = None, **kwargs: object) -> None:
            at = self._missing(path, dir_fd)
            function(self._new(at), *args, **kwargs)
            self._show(at)

        return make

    def for_library(self, path: StrOrBytesPath, is_changed: bool) -> str:
        """The path to give to a library that opens the file itself: where it is read, or where it is written."""
        if not is_changed:
            return self.reading(path)
        at = self.resolve(path)
        if self.found(at) is None:
            upper = self._new(at)
            self._show(at)
            return upper
        return self._copy_up(at)


def _on_place(
    function: Callable[..., object], place: Callable[[StrOrBytesPath, bool, int | None], str], follows: bool
) -> Callable[..., object]:
    """A function of ``os``, called with the ``place`` of the path that it is given."""

    def call(
        path: FileDescriptorOrPath, *args: object, dir_fd: int | None = None, follow_symlinks: bool = follows,
        **kwargs: object,
    ) -> object:  # fmt: skip
        if isinstance(path, int):
            return function(path, *args, **kwargs)
        if not follow_symlinks and follows:
            kwargs["follow_symlinks"] = False
        return function(place(path, follow_symlinks, dir_fd), *args, **kwargs)

    return call


def _replace(source: str, target: str) -> None:
    """``os.replace``, by a copy where the two are on different file systems."""
    try:
        native.replace(source, target)
    except OSError as refused:
        if refused.errno != errno.EXDEV:
            raise
        with contextlib.suppress(FileNotFoundError):
            native.unlink(target)
        copy_file(source, target)
        native.unlink(source)


class Entry:
    """As :class:`os.DirEntry`: ``path`` is the program's, the resolved path where it is."""

    def __init__(self, overlay: Overlay, path: str | bytes, resolved: str) -> None:
        self.path, self.name = path, os.path.basename(path)
        self._overlay, self._resolved = overlay, resolved
        self._known: dict[bool, os.stat_result] = {}

    def __fspath__(self) -> str | bytes:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """The status of the file, or of the link."""
        if follow_symlinks not in self._known:
            where = self._overlay.reading(self._resolved, follow_symlinks)
            self._known[follow_symlinks] = native.stat(where, follow_symlinks=follow_symlinks)
        return self._known[follow_symlinks]

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """True if it is a folder."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """True if it is a regular file."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """True if it is a symbolic link."""
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        """True if it is a junction of Windows."""
        return False

    def inode(self) -> int:
        """The number of the file."""
        return self.stat(follow_symlinks=False).st_ino


class Entries:
    """The iterator of ``os.scandir``, which can be closed."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Entry]:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give no more."""
        self._entries = iter(())


def path_of(descriptor: int) -> str:
    """The path of an open folder. Raises :class:`OSError`."""
    if sys.platform == "darwin":
        import fcntl

        return os.fsdecode(fcntl.fcntl(descriptor, 50, bytes(1024)).rstrip(b"\0"))  # F_GETPATH, sys/fcntl.h
    return str(native.readlink(f"/proc/self/fd/{descriptor}"))


def _parts(path: str) -> list[str]:
    """The parts of a path, the last first."""
    if os.altsep:
        path = path.replace(os.altsep, os.sep)
    return [part for part in reversed(path.split(os.sep)) if part not in ("", ".")]


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return list(native.listdir(folder))
    return []
