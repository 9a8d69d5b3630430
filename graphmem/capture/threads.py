"""Which threads belong to the running capture. There is one capture at a time in a process; others wait.

A capture replaces names of PyTorch, which all threads of a process share. The replacements act for the threads of the
capture alone (:mod:`graphmem.capture.patches`); this module finds those. They are the thread that analyses, every
thread that it or one of them starts through ``threading.Thread`` (a data loader's, the one that follows backward
passes), and the autograd engine's own threads while they work under the capture's modes, which the engine carries to
them (``ThreadLocalState``, ATen/ThreadLocalState.h).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from typing import Any

from graphmem.errors import CaptureError


class Threads(set[int]):
    """The identities of the threads of one capture; empty when it is over, so that later uses see nobody."""

    #: The dispatch mode that marks the autograd engine's threads.
    mode: Any = None

    def adopts(self) -> bool:
        """Add this thread, which is not known yet, if it is the autograd engine's at work for this capture. Returns
        whether it was added."""
        if self.mode is None:
            return False
        torch = sys.modules["torch"]
        depth = torch._C._len_torch_dispatch_stack()
        if not any(torch._C._get_dispatch_stack_at(position) is self.mode for position in range(depth)):
            return False
        self.add(get_ident())  # below the mode itself, the stack does not show it
        return True

    def only(self, function: Callable[..., object]) -> Callable[..., Any]:
        """``function`` for these threads; for any other, nothing, and None."""

        def here(*args: object, **kwargs: object) -> object:
            if get_ident() in self or self.adopts():
                return function(*args, **kwargs)
            return None

        here.__module__ = function.__module__
        return here

    def end(self) -> None:
        """The capture is over."""
        self.mode = None
        self.clear()


_NESTED = (
    "an analysis is running on this thread already, and a second one inside it (in the model, its factory or its step) "
    "cannot wait for it; start it after the first has returned"
)


_LOOK_UP_SECONDS = 0.2


class _Process:
    """The state that the threads of this process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads: Threads | None = None


_process = _Process()


@contextlib.contextmanager
def turn(waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait until no other thread analyses, and let none begin until the end.

    Raises :class:`CaptureError` inside a capture: it cannot wait for itself.
    """
    threads = _process.threads
    if threads is not None and (get_ident() in threads or threads.adopts()):
        raise CaptureError(_NESTED)
    lock = _process.lock
    while not lock.acquire(timeout=_LOOK_UP_SECONDS):
        waiting()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def capturing(waiting: Callable[[], None] = lambda: None) -> Iterator[Threads]:
    """A capture of this thread and of those that it starts. Raises :class:`CaptureError` for one inside another.

    ``waiting`` is called again and again while another thread captures.
    """
    with turn(waiting):
        threads = Threads({get_ident()})
        _process.threads = threads
        try:
            yield threads
        finally:
            _process.threads = None
            threads.end()


def current_threads() -> Threads | None:
    """The threads of the running capture if this one is among them."""
    threads = _process.threads
    return threads if threads is not None and (get_ident() in threads or threads.adopts()) else None


class OwnThread(threading.Thread):
    """A thread of a capture itself, which sees to its modes."""


def joining(
    start: Callable[[threading.Thread], None],
    threads: Threads,
    modes_of_starter: Callable[[Threads], Callable[[], contextlib.AbstractContextManager[None]]],
) -> Callable[[threading.Thread], None]:
    """``threading.Thread.start`` for a thread that belongs to the capture of the one that starts it, and works under
    its modes."""

    def start_member(thread: threading.Thread) -> None:
        run = thread.run
        under = contextlib.nullcontext if isinstance(thread, OwnThread) else modes_of_starter(threads)

        def run_as_member() -> None:
            threads.add(get_ident())
            try:
                with under():
                    run()
            finally:
                threads.discard(get_ident())  # the system gives the number to another thread
                vars(thread).pop("run", None)

        thread.run = run_as_member  # type: ignore[method-assign]
        start(thread)

    return start_member


def _in_forked_child() -> None:
    """A child has one thread, and no capture but that thread's own."""
    _process.lock = threading.RLock()
    if _process.threads is not None and get_ident() not in _process.threads:
        _process.threads.end()
        _process.threads = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
