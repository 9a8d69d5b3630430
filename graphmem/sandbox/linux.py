"""The system calls of Linux that Python has no function for, through ctypes."""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from typing import Any

# linux/mount.h, linux/sched.h, linux/prctl.h, linux/capability.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 0x20, 0x400, 0x800, 0x1000, 0x4000
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CAPABILITY_VERSION = 0x20080522
_ALL_CAPABILITIES = 0xFFFFFFFF
#: Flags of statvfs that a mount in a user namespace has to keep -> those of mount.
_KEPT = {2: MS_NOSUID, 4: MS_NODEV, 8: MS_NOEXEC, 1024: MS_NOATIME, 2048: MS_NODIRATIME, 4096: MS_RELATIME}


@cache
def _libc() -> object:
    return ctypes.CDLL(None, use_errno=True)


def function(name: str) -> Any:
    """A function of the C library, which keeps its error in ``ctypes.get_errno``."""
    return getattr(_libc(), name)


def call(name: str, *arguments: object) -> int:
    """A function of the C library by name. Raises :class:`OSError` where it returns -1."""
    result: int = function(name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """A system call by number; integers are passed as 64 bits. Raises :class:`OSError`."""
    return call(
        "syscall", ctypes.c_long(number), *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    )


def unshare(flags: int) -> None:
    """Leave the namespaces that ``flags`` name for new ones. Raises :class:`OSError`."""
    call("unshare", flags)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    """``mount(2)``. Raises :class:`OSError`."""
    encoded = [None if one is None else os.fsencode(one) for one in (source, target, kind, options)]
    call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])


def bind(source: str, target: str, read_only: bool = False) -> None:
    """Show ``source`` and all that is mounted in it at ``target`` too. Raises :class:`OSError`."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        flags = os.statvfs(target).f_flag
        kept = sum(ours for theirs, ours in _KEPT.items() if flags & theirs)
        mount(None, target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def set_effective_capabilities(wanted: bool) -> None:
    """Use the capabilities that a user namespace gave to its maker, or act without them as its own user does."""
    bits = _ALL_CAPABILITIES if wanted else 0
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(struct.pack("6I", *[0] * 6))
    call("capget", ctypes.create_string_buffer(header), held)
    words = list(struct.unpack("6I", held.raw[:24]))
    for part in (0, 3):
        words[part] = words[part + 1] & bits
    call("capset", ctypes.create_string_buffer(header), struct.pack("6I", *words))
