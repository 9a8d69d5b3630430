"""Finds child processes that use PyTorch but never ran the hook, by the libraries mapped into their memory (Linux)."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from graphmem.errors import CaptureError
from graphmem.following.children import Notes

#: Seconds between two looks: less than it takes to import PyTorch.
_PAUSE = 0.25
_LIBRARY = b"/libtorch_cpu"
_UNSEEN = (
    "{} uses PyTorch where graphmem cannot look: it was started with -I, -E or -S, or with another PYTHONPATH; write "
    "graphmem run train.py, or leave these out"
)


@contextlib.contextmanager
def watched_for_unnoticed(root: int, notes: Notes) -> Iterator[None]:
    """Until the end, processes below ``root`` that use PyTorch unnoticed are ended, with all the others.

    Raises :class:`CaptureError` at the end where there was one.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    watch = _Watch(root, notes)
    watch.start()
    try:
        try:
            yield
        finally:
            watch.is_over.set()
            watch.join()
            time.sleep(0)  # an interrupt by the watch comes here at the latest
    except KeyboardInterrupt:
        if not watch.found:
            raise
    if watch.found:
        raise CaptureError(watch.found)


class _Watch(threading.Thread):
    def __init__(self, root: int, notes: Notes) -> None:
        super().__init__(daemon=True)
        self._root, self._notes = root, notes
        self._suspects: dict[int, str] = {}
        self.is_over, self.found = threading.Event(), ""

    def run(self) -> None:
        while not self.is_over.wait(_PAUSE) and not self.found:
            below = [one for one in _below(self._root) if one != os.getpid() and not self._notes.has("seen", one)]
            suspects = {one: _words(one) for one in below if _uses_torch(one)}
            refused = self._notes.all_of("refused")
            # between fork and exec a process has its parent's memory: what is there twice is its own
            unseen = [words for one, words in suspects.items() if self._suspects.get(one) == words]
            self.found = next(iter([*refused, *map(_UNSEEN.format, unseen)]), "")
            self._suspects = suspects
        if self.found:
            self._end()

    def _end(self) -> None:
        """End the processes; this one's own program is interrupted."""
        for process in _below(self._root):
            with contextlib.suppress(OSError):
                if process != os.getpid():
                    os.kill(process, signal.SIGKILL)
        if self._root == os.getpid():
            _thread.interrupt_main()


def _below(root: int) -> list[int]:
    """The processes that descend from ``root``."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        for one in children.get(waiting.pop(), ()):
            found.append(one)
            waiting.append(one)
    return [*found, root]


def _uses_torch(process: int) -> bool:
    try:
        return _LIBRARY in Path(f"/proc/{process}/maps").read_bytes()
    except OSError:
        return False


def _words(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
