"""Wrapped calls for the program, and Landlock for all that it starts, where namespaces are forbidden (containers).

Landlock (Documentation/userspace-api/landlock.rst of the kernel) takes rights from a process and its children for good:
here those to write, make and remove files outside of the temporary folder, and to connect by TCP to the numbered ports
of services. It does not know UDP, nor changes of permissions and times. Programs that are started read the real files;
where they write they get EACCES.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence

from graphmem.sandbox import linux
from graphmem.sandbox.changes import Tree
from graphmem.sandbox.copies import is_folder
from graphmem.sandbox.guard import Permissions
from graphmem.sandbox.wrapped import Wrapped

# asm-generic/unistd.h, linux/landlock.h
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_BENEATH, _PORT = 1, 2
_WRITE_FILE, _REFER, _TRUNCATE, _CONNECT = 1 << 1, 1 << 13, 1 << 14, 1 << 1
_WRITING = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # remove and make, of every kind
_ABSTRACT_SOCKETS = 1
#: Ports that the kernel gives to sockets which ask for none: the program's own servers have them.
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_SYSTEM = ("/dev", "/proc")


class Landlock(Wrapped):
    """Wrapped calls in a process that has lost the right to write elsewhere."""

    def __init__(self, folder: str, permissions: Permissions) -> None:
        super().__init__(permissions, folder, cannot_write=True)
        self._scratch = os.path.join(folder, "scratch")
        self._scratch_of = tempfile.gettempdir()

    def enter(self) -> None:
        """Give the rights away. Raises :class:`OSError` where the kernel has no Landlock."""
        allowed = self._permissions
        version = linux.syscall(_CREATE, None, 0, _VERSION)
        files = 0 if allowed.everywhere or allowed.processes else _WRITING
        files |= (_REFER if version >= 2 and files else 0) | (_TRUNCATE if version >= 3 and files else 0)
        ports = _CONNECT if version >= 4 and not allowed.network else 0
        scoped = _ABSTRACT_SOCKETS if version >= 6 and not allowed.network else 0
        rules = struct.pack("QQQ", files, ports, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
        os.makedirs(self._scratch)
        if not allowed.everywhere:
            os.environ["TMPDIR"] = self._scratch
            tempfile.tempdir = None
        if files or ports:
            _restrict(rules, files, (self.folder, *_SYSTEM, *allowed.writes), ports)

    def reset(self) -> None:
        """Forget all changes."""
        super().reset()
        for entry in list(os.scandir(self._scratch)):
            with contextlib.suppress(OSError):
                shutil.rmtree(entry.path) if is_folder(entry.path) else os.unlink(entry.path)

    def trees(self) -> list[Tree]:
        """The folder of the changes, and the one that stands for that of temporary files."""
        return [*super().trees(), Tree(self._scratch_of, os.path.join(self.folder, "none"), self._scratch)]


def _restrict(rules: bytes, files: int, folders: Sequence[str], ports: int) -> None:
    ruleset = linux.syscall(_CREATE, ctypes.create_string_buffer(rules, len(rules)), len(rules), 0)
    try:
        for folder in folders if files else ():
            opened = os.open(folder, os.O_PATH)
            try:
                _add(ruleset, _BENEATH, struct.pack("=Qi", files, opened))
            finally:
                os.close(opened)
        if ports:
            _add_ports(ruleset, ports)
        linux.call("prctl", linux.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        linux.syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, kind: int, rule: bytes) -> None:
    linux.syscall(_ADD, ruleset, kind, ctypes.create_string_buffer(rule, len(rule)), 0)


def _add_ports(ruleset: int, rights: int) -> None:
    """A rule for each of some 28,000 ports, so with as little Python between the calls as can be."""
    rule = (ctypes.c_uint64 * 2)(rights, 0)
    add, none = linux.function("syscall"), ctypes.c_long(0)
    arguments = [ctypes.c_long(_ADD), ctypes.c_long(ruleset), ctypes.c_long(_PORT), ctypes.byref(rule), none]
    for rule[1] in _own_ports():
        if add(*arguments) == -1:
            raise OSError(ctypes.get_errno(), "landlock_add_rule")


def _own_ports() -> Iterator[int]:
    first, last = 32768, 60999
    with contextlib.suppress(OSError, ValueError), open(_RANGE, encoding="ascii") as file:
        first, last = map(int, file.read().split())
    yield from range(first, last + 1)
