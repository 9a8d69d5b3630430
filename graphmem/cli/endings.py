"""Handlers of signals: they end the program with one line, or by an exception while temporary folders exist."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

TYPE_CHECKING = False  # that of ``typing``, which takes longer to import than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

#: The context's object where the process is a ``graphmem`` command, which nobody else shares.
OWN_PROCESS = object()
#: Signals that end the program.
ENDINGS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(BaseException):
    """A signal asked the program to end. ``code``: a shell's exit code for a program so ended."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.code = 128 + number


@contextlib.contextmanager
def ending_in_order() -> Iterator[None]:
    """While it lasts a signal is an exception, so that folders for temporary files are removed; before and after there
    are none, and it ends the program at once."""
    before, hook = handle(_raise), sys.unraisablehook
    sys.unraisablehook = lambda unheard: _send_again(unheard, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def handle(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Install ``handler``, but for signals that whoever started the program wants ignored (``nohup``); the former
    handlers."""
    before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread, which alone hears signals
        for number in ENDINGS:
            known = signal.getsignal(number)
            if known is not signal.SIG_IGN:
                signal.signal(number, handler)
                before[number] = known
    return before


def _raise(number: int, _: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


#: Seconds until a signal is sent again.
_SOON = 0.01


def _send_again(unheard: sys.UnraisableHookArgs, hook: Callable[[sys.UnraisableHookArgs], object]) -> None:
    """A signal whose exception nobody could hear, as in the callback of a weak reference, is sent once more; all else
    goes to the ``hook``."""
    error = unheard.exc_value
    if not isinstance(error, (Terminated, KeyboardInterrupt)):
        hook(unheard)
        return
    import threading

    number = error.code - 128 if isinstance(error, Terminated) else signal.SIGINT
    again = threading.Timer(_SOON, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def end(number: int, _: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"graphmem: interrupted\n")
    os._exit(128 + number)
