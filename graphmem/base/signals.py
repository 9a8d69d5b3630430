"""Long calls into C++ that Ctrl-C and other signals can end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

#: Seconds between two looks at whether a signal has come.
_PATIENCE = 0.2


def interruptible(call: Callable[[], Result]) -> Result:
    """``call()``, in a thread beside the main one, which alone can handle signals; that takes calls that release the
    interpreter's lock, as onnxruntime's do. Raises the call's errors; after a signal's own exception the thread is left
    to end by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="graphmem-interruptible", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_PATIENCE)
    if errors:
        raised: Any = errors[0]
        raise raised
    return results[0]
