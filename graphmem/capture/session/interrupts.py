"""Ctrl-C during a capture: at once in the user's step, and when all is done while names are replaced or put back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Holds back SIGINT until :meth:`let_in`. Python hands signals to the main thread alone; elsewhere this does
    nothing, and neither where SIGINT is not Python's to handle."""

    def __init__(self) -> None:
        self._holding = True
        self._held: list[FrameType | None] = []
        self._handler: Any = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What is sent before the end takes effect at the end, unless it was let in."""
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        if not callable(handler):
            yield
            return
        self._handler = handler
        signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            self._holding = True
            if signal.getsignal(signal.SIGINT) == self._receive:
                signal.signal(signal.SIGINT, handler)
            self._deliver()

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """Here they take effect at once."""
        try:
            self._holding = False
            self._deliver()
            yield
        finally:
            self._holding = True

    def check(self) -> None:
        """Let in what has been sent so far, where nothing is half done."""
        self._deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held.append(frame)
        else:
            self._handler(number, frame)

    def _deliver(self) -> None:
        if self._held:
            frame = self._held[0]
            self._held.clear()
            self._handler(signal.SIGINT, frame)
