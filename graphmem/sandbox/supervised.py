"""A process that flies in a sandbox, and its parent, which stays outside of it.

The parent waits, passes signals on, writes the files that graphmem itself was asked for (``-o FILE``), and removes the
temporary folder however the child ends. Processes that the program leaves behind end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphmem.base import files
from graphmem.errors import GraphmemError
from graphmem.sandbox import linux
from graphmem.sandbox.namespace import can_hold, remove_tree

_PREFIX = "graphmem-run-"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
_BY_KERNEL = 0x80  # SI_KERNEL, asm-generic/siginfo.h: the terminal sent it, to the child as well
#: Seconds that processes which the program left behind have to end.
_GRACE = 0.5


def fly(enter: Callable[[str], None]) -> str | None:
    """Fork; in the child call ``enter(folder)`` and return None. The parent does not come back: it ends with
    the child's exit code. Only where ``enter`` raises :class:`OSError` it returns, with the reason in words.

    The process must be the program's own.
    """
    if threading.active_count() > 1:
        return "other threads of this process run"
    folder = _temporary_folder()
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of numpy's, which do not run Python
        child = os.fork()
    if child == 0:
        ours.close()
        _begin(parent, theirs, folder, enter)
        return None
    theirs.close()
    reason = _receive(ours)
    if reason is None or reason["failed"] is None:
        code = _attend(child, ours)
        remove_tree(folder)
        os._exit(code)
    os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_PASSED_ON, signal.SIGCHLD})
    ours.close()
    remove_tree(folder)
    return str(reason["failed"])


def _temporary_folder() -> str:
    """A new folder on a disk that is large; folders left there by killed runs are removed."""
    here = os.getcwd() + os.sep
    wanted = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir()]
    found = [one for one in wanted if one and os.access(one, os.W_OK) and os.path.isdir(one)]
    found.sort(key=lambda one: (not can_hold(os.path.realpath(one)), here.startswith(f"{os.path.realpath(one)}/")))
    parent = os.path.realpath(found[0] if found else tempfile.gettempdir())
    for name in os.listdir(parent):
        number = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and number.isdigit() and not os.path.exists(f"/proc/{number}"):
            remove_tree(os.path.join(parent, name))
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)


# --- the child --------------------------------------------------------------------------------------------------------


def _begin(parent: int, channel: socket.socket, folder: str, enter: Callable[[str], None]) -> None:
    """In the supervised process, before the program: enter its folder, tell the supervisor whether that worked, and let
    files be handed over for it to write. The process ends where it fails."""
    try:
        enter(folder)
        linux.call("prctl", linux.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    except OSError as error:
        _send(channel, {"failed": f"{error.strerror or error}"})
        os._exit(1)
    except BaseException as error:
        _send(channel, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    _send(channel, {"failed": None})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_PASSED_ON, signal.SIGCHLD})
    own = os.getpid()

    def hand_over(path: Path, data: bytes) -> None:
        if os.getpid() != own:  # a process of the program's has no business here
            return
        _send(channel, {"path": os.fspath(path)}, data)
        answer = _receive(channel)
        if answer is None or answer["error"]:
            raise GraphmemError(answer["error"] if answer else f"cannot write {path}: the writing process has ended")

    files.hand_over = hand_over


# --- the parent -------------------------------------------------------------------------------------------------------


def _attend(child: int, channel: socket.socket) -> int:
    """The exit code of the child, after it and all that it left behind has ended."""
    linux.call("prctl", linux.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=_write_for, args=(channel,), daemon=True).start()
    status = None
    while status is None:
        status = _status_of(child)
        if status is None:
            came = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
            if came.si_signo != signal.SIGCHLD and came.si_code != _BY_KERNEL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, came.si_signo)
    _end_orphans()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    with contextlib.suppress(OSError):
        print(f"graphmem: the analysis was ended by signal {-code} ({signal.strsignal(-code)})", file=sys.stderr)
    return 128 - code


def _status_of(child: int) -> int | None:
    """The status of the child if it has ended; others that have are forgotten."""
    while True:
        try:
            number, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1 << 8
        if number == 0:
            return None
        if number == child:
            return status


def _end_orphans() -> None:
    """End the processes that the program started and left: their files are about to go."""
    until = time.monotonic() + _GRACE
    while True:
        try:
            number, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if number:
            continue
        if time.monotonic() > until:
            for process in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _children() -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _write_for(channel: socket.socket) -> None:
    """Write the files that the child hands over, until it ends."""
    while (asked := _receive(channel)) is not None:
        error = ""
        try:
            files.write_whole(Path(asked["path"]), asked["data"])
        except GraphmemError as found:
            error = str(found)
        _send(channel, {"error": error})


# --- between them -----------------------------------------------------------------------------------------------------


def _send(channel: socket.socket, head: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(head).encode()
    channel.sendall(len(text).to_bytes(8, "little") + len(data).to_bytes(8, "little") + text + data)


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, with its payload as ``data``; None at the end."""
    with contextlib.suppress(OSError):
        sizes = _exactly(channel, 16)
        text = _exactly(channel, int.from_bytes(sizes[:8], "little"))
        data = _exactly(channel, int.from_bytes(sizes[8:], "little"))
        if len(sizes) == 16:
            return {**json.loads(text), "data": data}
    return None


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other end is closed")
        parts += part
    return bytes(parts)
