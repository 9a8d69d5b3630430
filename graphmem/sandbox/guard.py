"""Python's audit events while a program flies: connections are refused in one line, and unredirected writes.

One hook is added to the interpreter, for good (PEP 578), and asks nothing while no program flies. A refusal is an
:class:`OSError`, as a machine without network gives, so that a program that copes with that does here as well.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from graphmem.sandbox.copies import FileDescriptorOrPath, StrOrBytesPath

Handler = Callable[..., None]
#: A socket's address: a path (bytes of any kind), or host, port and more.
Address = str | bytes | tuple[Any, ...]


@dataclass(frozen=True)
class Permissions:
    """Rights of a program. ``writes``: folders below which it may write, or ``everywhere``."""

    writes: tuple[str, ...] = ()
    everywhere: bool = False
    network: bool = False
    processes: bool = False


class Guard:
    """The handlers of audit events during one flight, and records of it.

    ``applies``: whether the calling thread is the program's; ``real`` gives the path by which a real file is reached,
    by the program's path, and None for a file of the program's own. ``refused`` counts (action, target), ``renames``
    are renamed files in their order, ``started`` counts other programs that were let start and could write nothing.
    """

    def __init__(
        self,
        has_network: bool,
        applies: Callable[[], bool] = lambda: True,
        real: Callable[[str], str | None] = lambda path: path,
    ) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self.renames: list[tuple[str, str]] = []
        self.started: Counter[str] = Counter()
        self.applies = applies
        self._real = real
        self.handlers: dict[str, Handler] = {"os.rename": self._see_renamed}
        self._listening: WeakSet[socket.socket] = WeakSet()
        self._own = threading.local()
        if not has_network:
            self.handlers |= {
                "socket.connect": self._check_address,
                "socket.sendto": self._check_address,
                "socket.sendmsg": self._check_address,
                "socket.bind": self._see_bound,
                "socket.getaddrinfo": self._check_name,
                "socket.gethostbyname": self._check_name,
            }

    @contextlib.contextmanager
    def own(self, is_own: bool = True) -> Iterator[None]:
        """In this context this thread works for graphmem itself, and nothing is asked; with False, inside of it, for
        the program."""
        before = self.is_own
        self._own.value = is_own
        try:
            yield
        finally:
            self._own.value = before

    @property
    def is_own(self) -> bool:
        """True if the thread is in :meth:`own`."""
        return getattr(self._own, "value", False)

    def refuse(self, what: str, to: str, number: int, option: str) -> OSError:
        """Note a refusal, say the first of each kind on stderr, and give the error to raise."""
        first = all(kind != what for kind, _ in self.refused)
        self.refused[what, to] += 1
        line = f"graphmem run refuses to {what} {to}; {option} allows it"
        if first:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                print(line, file=sys.__stderr__)
        return OSError(number, line)

    # --- the network --------------------------------------------------------------------------------------------------

    def _check_address(self, sock: socket.socket, address: Address | None = None, *_: object) -> None:
        if address is None or (family := sock.family) == getattr(socket, "AF_NETLINK", None):
            return
        if family == getattr(socket, "AF_UNIX", None):
            if not isinstance(address, tuple) and not self.is_own_socket(address):
                raise self.refuse("connect to", os.fsdecode(address), errno.ENETUNREACH, "--allow-network")
        elif isinstance(address, tuple) and not self._is_loopback(address):
            raise self.refuse("connect to", f"{address[0]}:{address[1]}", errno.ENETUNREACH, "--allow-network")

    def is_own_socket(self, address: str | bytes) -> bool:
        """True if a socket in the file system is one that the program made: no real one has its name."""
        path = os.fsdecode(address)
        if path.startswith("\0"):  # of the network's, which is the program's own where it can be
            return any(self._address_of(one) == address for one in self._listening)
        real = self._real(os.path.abspath(path))
        return path == "" or real is None or not os.path.exists(real)

    def is_own_port(self, port: int) -> bool:
        """True if the program itself listens at a port of the loopback; in a network of its own nobody else does."""
        return True

    def _is_loopback(self, address: tuple[Any, ...]) -> bool:
        host = address[0]
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(host.partition("%")[0]).is_loopback and self.is_own_port(address[1])
        return _is_own_name(host) and self.is_own_port(address[1])

    def _see_bound(self, sock: socket.socket, *_: object) -> None:
        self._listening.add(sock)

    @staticmethod
    def _address_of(sock: socket.socket) -> Address | None:
        with contextlib.suppress(OSError):
            return sock.getsockname()  # type: ignore[no-any-return]
        return None

    def bound_ports(self) -> set[int]:
        """Ports that sockets of this process are bound to."""
        found = [self._address_of(one) for one in self._listening]
        return {one[1] for one in found if isinstance(one, tuple)}

    def _check_name(self, host: str | bytes | None, *_: object) -> None:
        name = host.decode("ascii", "replace") if isinstance(host, bytes) else host
        if name in (None, "") or _is_own_name(name):
            return
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.partition("%")[0])
            return
        refusal = self.refuse("look up", name, errno.ENETUNREACH, "--allow-network")
        raise socket.gaierror(socket.EAI_AGAIN, refusal.strerror)

    # --- files --------------------------------------------------------------------------------------------------------

    def _see_renamed(self, source: FileDescriptorOrPath, target: StrOrBytesPath, *_: object) -> None:
        if not isinstance(source, int):
            self.renames.append((os.path.abspath(os.fsdecode(source)), os.path.abspath(os.fsdecode(target))))


def _is_own_name(name: str) -> bool:
    return name.lower() in ("localhost", "localhost.localdomain", "ip6-localhost", socket.gethostname().lower())


# --- the one hook -----------------------------------------------------------------------------------------------------

_active: Guard | None = None
_is_installed = False


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    guard = _active
    if guard is None:
        return
    handler = guard.handlers.get(event)
    if handler is not None and not guard.is_own and guard.applies():
        with guard.own():
            handler(*arguments)


@contextlib.contextmanager
def guarded(guard: Guard) -> Iterator[None]:
    """Until the end of this context the guard is asked."""
    global _active, _is_installed
    if not _is_installed:
        sys.addaudithook(_hook)
        _is_installed = True
    before, _active = _active, guard
    try:
        yield
    finally:
        _active = before


def own() -> contextlib.AbstractContextManager[None]:
    """In this context this thread works for graphmem itself, whether a program flies or not."""
    return contextlib.nullcontext() if _active is None else _active.own()


def current() -> Guard | None:
    """The guard that is asked now."""
    return _active
