"""The strongest mechanism: a mount namespace of Linux in which every folder is an overlay, and a network without wires.

The process and all that it starts, in any language, read the real files and write to *upper* folders below one
temporary folder (overlayfs, Documentation/filesystems/overlayfs.rst of the kernel). The view is built beside the real
tree and entered by ``chroot``; the real root stays open in a descriptor, so that the view can be built once more.

Overlayfs asks two things that decide how the view is cut into overlays:

- an upper folder must not lie below a lower one: a folder that holds our temporary folder is shown as a *frame*, an
  own folder in which each subfolder is an overlay and each file a read-only mount;
- in a user namespace a folder with other mounts below it cannot be a lower one (``has_locked_children`` of
  fs/namespace.c): it is a frame too.

``os.rename`` between two overlays, and of a whole real folder in a user namespace, gives EXDEV where the real tree
would not; :mod:`graphmem.sandbox.renames` copies then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from graphmem.sandbox import linux
from graphmem.sandbox.changes import Tree
from graphmem.sandbox.guard import Guard, Permissions
from graphmem.sandbox.renames import renames_by_copies

#: File systems that hold no files of users, or whose files are devices; they are shown as they are.
_SYSTEM = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs"),
        "tracefs",
    )
)
_SHARED_MEMORY = "/dev/shm"
#: System files that root could change for the whole machine.
_SETTINGS = ("/sys", "/proc/sys", "/proc/sysrq-trigger")
#: linux/sockios.h, linux/if.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
#: Descriptors of ours are numbered high: programs close and reuse the low ones.
_HIGH = 200


@dataclass(frozen=True)
class _Mount:
    path: str
    kind: str
    is_read_only: bool


def _mounts() -> dict[str, _Mount]:
    """Mounts by their places (``/proc/self/mountinfo``, proc(5)); of several at one place the last."""
    found: dict[str, _Mount] = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, others = line.rstrip("\n").partition(" - ")
            words = fields.split(" ")
            path = words[4].encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")
            place, kind = os.fsdecode(path), others.split(" ")[0]
            found.pop(place, None)
            found[place] = _Mount(place, kind, "ro" in words[5].split(","))
    return found


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder.rstrip("/") + "/")


@dataclass
class Namespace:
    """A view of the file system in namespaces of its own, for this process and its children.

    ``folder`` is the temporary folder. Where everything may be written there is no view at all.
    """

    folder: str
    permissions: Permissions = field(default_factory=Permissions)
    _trees: list[Tree] = field(default_factory=list)
    _is_user: bool = False
    _views: int = 0
    _root: int = -1

    def enter(self) -> None:
        """Go into the view. The process must have one thread. Raises :class:`OSError` where it is not permitted."""
        flags = linux.CLONE_NEWNS | (0 if self.permissions.network else linux.CLONE_NEWNET)
        user, group = os.geteuid(), os.getegid()
        try:
            if user != 0:
                raise PermissionError
            linux.unshare(flags)
        except PermissionError:
            self._is_user = True
            linux.unshare(flags | linux.CLONE_NEWUSER)
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{user} {user} 1"),
                ("gid_map", f"{group} {group} 1"),
            ):
                with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                    file.write(text)
        if not self.permissions.network:
            _bring_up_loopback()
        if not self.permissions.everywhere:
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            if not can_hold(self.folder):
                linux.mount("graphmem", self.folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=700")
            self._check_owner()
            self._root = _high(os.open("/", os.O_RDONLY | os.O_DIRECTORY))
            self._show()
        if self._is_user:
            linux.set_effective_capabilities(False)

    def reset(self) -> None:
        """Show the files again as they really are, and forget all changes."""
        if self.permissions.everywhere:
            return
        if self._is_user:
            linux.set_effective_capabilities(True)
        try:
            self._show()
        finally:
            if self._is_user:
                linux.set_effective_capabilities(False)

    def trees(self) -> list[Tree]:
        """The changes, tree by tree, with paths by which this process can reach them."""
        return [Tree(one.place, self._real(one.real), self._real(one.upper), one.own) for one in self._trees]

    @contextlib.contextmanager
    def attempt(self, applies: Callable[[], bool]) -> Iterator[Guard]:
        """One run of the program, whose processes and threads all see the view."""
        del applies
        if self.permissions.everywhere:
            yield Guard(self.permissions.network)
            return
        with renames_by_copies(self._real):
            yield Guard(self.permissions.network, real=self._real)

    def _check_owner(self) -> None:
        """A user namespace knows one user and one group; files of others cannot be changed in it, though they could
        really be (a project's folder, by its group)."""
        here = os.stat(".")
        if self._is_user and os.access(".", os.W_OK) and (here.st_uid, here.st_gid) != (os.geteuid(), os.getegid()):
            raise PermissionError(errno.EPERM, f"{os.getcwd()} belongs to another user or group")

    def _real(self, path: str) -> str:
        return f"/proc/self/fd/{self._root}{path}"

    def _show(self) -> None:
        """Build a view of the real tree, and make it the root."""
        here = os.getcwd()
        os.fchdir(self._root)
        os.chroot(".")
        self._views += 1
        base = f"{self.folder}/{self._views}"
        os.mkdir(base)
        view = _View(base, self.folder, self.permissions.writes, self._is_user)
        view.show("/")
        view.protect_settings()
        self._trees = view.trees
        os.chroot(view.root)
        os.chdir("/")
        with contextlib.suppress(OSError):
            os.chdir(here)


class _View:
    """One view while it is built: folders are mounted below ``root``."""

    def __init__(self, base: str, temporary: str, writable: Sequence[str], is_user: bool) -> None:
        self.root = f"{base}/root"
        self.trees: list[Tree] = []
        self._base, self._temporary, self._is_user = base, temporary, is_user
        self._writable = frozenset(writable)
        self._mounts = {path: one for path, one in _mounts().items() if not _is_below(path, temporary)}
        os.mkdir(self.root)
        # Places to mount on are made faster in memory; nobody writes large files at the very top.
        linux.mount("graphmem", self.root, "tmpfs", 0, "mode=755")

    def show(self, path: str) -> None:
        """Mount the file or folder at ``path``, with all below it; its place in the view exists."""
        mounted = self._mounts.get(path)
        if path == _SHARED_MEMORY:
            self._show_shared_memory(path)
        elif mounted is not None and mounted.kind in _SYSTEM:
            linux.bind(path, self._at(path))
            if _is_below(_SHARED_MEMORY, path) and os.path.isdir(_SHARED_MEMORY):
                self.show(_SHARED_MEMORY)
        elif path in self._writable:
            linux.bind(path, self._at(path))
        elif not stat.S_ISDIR(os.lstat(path).st_mode):
            self._show_unchangeable(path)
        elif self._is_split(path):
            self._show_frame(path)
        else:
            self._show_overlay(path, mounted)

    def protect_settings(self) -> None:
        """Make the files by which root sets up the machine read-only."""
        for path in _SETTINGS:
            with contextlib.suppress(OSError):
                linux.bind(self._at(path), self._at(path), read_only=True)

    def _at(self, path: str) -> str:
        return self.root if path == "/" else self.root + path

    def _below(self, path: str) -> list[str]:
        """Mounts below a folder that are not below another of them."""
        found = sorted(one for one in (*self._mounts, *self._writable) if _is_below(one, path))
        return [one for one in found if not any(_is_below(one, other) for other in found)]

    def _is_split(self, path: str) -> bool:
        return _is_below(self._temporary, path) or (self._is_user and any(_is_below(one, path) for one in self._mounts))

    def _show_frame(self, path: str) -> None:
        at, made = self._at(path), set()
        if path != "/":
            linux.mount(self._frame_of(path), at, flags=linux.MS_BIND)
        for entry in sorted(os.scandir(path), key=lambda one: one.name):
            if entry.path == self._temporary:
                continue
            place = self._at(entry.path)
            with contextlib.suppress(FileNotFoundError):  # it may go meanwhile
                if entry.is_symlink():
                    os.symlink(os.readlink(entry.path), place)
                elif entry.is_dir():
                    os.mkdir(place)
                    self.show(entry.path)
                else:
                    os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
                    self.show(entry.path)
                made.add(entry.name)
        self.trees.append(Tree(path, path, self.root if path == "/" else self._frame_of(path), frozenset(made)))
        mode = stat.S_IMODE(os.stat(path).st_mode)
        os.chmod(at, mode if os.access(path, os.W_OK) else mode & ~0o222)

    def _frame_of(self, path: str) -> str:
        frame = f"{self._base}/frames{path}".replace("//", "/")
        os.makedirs(frame, exist_ok=True)
        return frame

    def _show_overlay(self, path: str, mounted: _Mount | None) -> None:
        if mounted is not None and mounted.is_read_only:
            linux.bind(path, self._at(path))
        else:
            number = len(self.trees)
            upper = f"{self._base}/upper/{number}"
            try:
                self._overlay(path, upper, f"{self._base}/work/{number}")
                self.trees.append(Tree(path, path, upper))
            except OSError as error:
                if error.errno == errno.EPERM or not self.trees:
                    raise
                self._show_unchangeable(path)
        for below in self._below(path):
            if os.path.lexists(self._at(below)):
                self.show(below)

    def _overlay(self, path: str, upper: str, work: str) -> None:
        os.makedirs(upper)
        os.makedirs(work)
        status = os.stat(path)
        os.chmod(upper, stat.S_IMODE(status.st_mode))
        if not self._is_user:
            os.chown(upper, status.st_uid, status.st_gid)
        lower = os.open(path, getattr(os, "O_PATH", 0) | os.O_DIRECTORY)
        kind = "userxattr" if self._is_user else "redirect_dir=on"
        options = f"lowerdir=/proc/self/fd/{lower},upperdir={upper},workdir={work},{kind}"
        try:
            try:
                linux.mount("graphmem", self._at(path), "overlay", 0, f"{options},volatile")
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                linux.mount("graphmem", self._at(path), "overlay", 0, options)
        finally:
            os.close(lower)

    def _show_unchangeable(self, path: str) -> None:
        with contextlib.suppress(OSError):  # a socket that goes meanwhile
            linux.bind(path, self._at(path), read_only=stat.S_ISREG(os.lstat(path).st_mode) or os.path.isdir(path))

    def _show_shared_memory(self, path: str) -> None:
        """Shared memory stays memory: its upper folder is a ``tmpfs``."""
        memory = f"{self._base}/memory"
        os.mkdir(memory)
        linux.mount("graphmem", memory, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)
        try:
            self._overlay(path, f"{memory}/upper", f"{memory}/work")
        except OSError:  # no extended attributes in a tmpfs before Linux 6.6
            linux.mount("graphmem", self._at(path), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV)
            os.chmod(self._at(path), 0o1777)


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(one, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _high(descriptor: int) -> int:
    try:
        number: int = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # fewer are allowed
        return descriptor
    os.close(descriptor)
    return number


def can_hold(folder: str) -> bool:
    """True if a folder's file system may hold upper folders: not one that is itself an overlay, or on a network."""
    kind = next(
        (one.kind for path, one in sorted(_mounts().items(), key=lambda item: -len(item[0]))
         if folder == path or _is_below(folder, path)), ""
    )  # fmt: skip
    return kind in ("ext4", "ext3", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs")


def remove_tree(folder: str) -> None:
    """Remove a temporary folder, with folders in it that overlayfs or a program has locked."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            with contextlib.suppress(OSError):
                if not os.path.islink(os.path.join(place, name)):
                    os.chmod(os.path.join(place, name), 0o700)
    shutil.rmtree(folder, ignore_errors=True)
