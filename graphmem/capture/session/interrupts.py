"""Ctrl-C during a capture: at once in the user's step, and when all is done while names are replaced or put back.

Inside an operator it waits for the operator's end. PyTorch takes a dispatch mode off its stack there and puts it back
in a C++ destructor (``StashTorchDispatchModeGuard``, torch/csrc/utils/torch_dispatch_mode.h), which ends the program
when an exception has left another mode in its place. An error raised while an object dies is dropped by Python: it
waits where that can be seen, and is sent again where Python says that it was dropped (``sys.unraisablehook``). Nor is a
parameter of the caller's left half borrowed (``Borrowed._lend``).
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

#: An operator of a capture takes some tenths of a millisecond.
_OPERATOR_SECONDS = 0.001


def _in_operator(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("__torch_dispatch__", "__del__", "_died", "_lend"):
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """Holds back SIGINT until :meth:`let_in`. Python hands signals to the main thread alone; elsewhere this does
    nothing, and neither where SIGINT is not Python's to handle."""

    def __init__(self) -> None:
        self._holding = True
        self._held: list[FrameType | None] = []
        self._handler: Any = None
        self._report: Any = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context that delays signals to its end, unless they were let in."""
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        if not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._receive)
        report, sys.unraisablehook = sys.unraisablehook, self._dropped
        self._report = report
        try:
            yield
        finally:
            self._holding = True
            if sys.unraisablehook == self._dropped:
                sys.unraisablehook = report
            if signal.getsignal(signal.SIGINT) == self._receive:
                signal.signal(signal.SIGINT, handler)
            self._deliver()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """Deliver interrupts at once in this context, first the one that is held."""
        try:
            self._holding = False
            self._deliver()
            yield
        finally:
            self._holding = True

    def check(self) -> None:
        """Raise the signals sent so far, where nothing is half done."""
        self._deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held.append(frame)
        elif _in_operator(frame):
            if not self._held:
                self._held.append(frame)
            _thread.start_new_thread(self._send_again, ())
        else:
            self._held.clear()
            self._handler(number, frame)

    def _dropped(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python could not raise something; an interrupt is not lost by that."""
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._held.append(None)
            _thread.start_new_thread(self._send_again, ())
        else:
            self._report(unraisable)

    def _send_again(self) -> None:
        time.sleep(_OPERATOR_SECONDS)
        if self._held:
            _thread.interrupt_main()

    def _deliver(self) -> None:
        if self._held:
            frame = self._held[0]
            self._held.clear()
            self._handler(signal.SIGINT, frame)
