"""Threads that a program starts work under the capture's modes, as the engine's do: their allocations are recorded.

PyTorch keeps modes for each thread. transformers loads weights in a pool of threads (``core_model_loading.py``, 5.x),
and they go to the card there. One operator at a time is recorded then: a thread may be stopped anywhere in Python, and
the recorder has one operator in hand.
"""

from __future__ import annotations

import contextlib
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graphmem.capture.patches import Patches
from graphmem.capture.record.dispatch import Named, RecordingMode
from graphmem.capture.record.streams import Streams
from graphmem.capture.threads import Threads, joining
from graphmem.capture.torch_internals import (
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    dispatch_modes,
    pop_dispatch_mode,
    push_dispatch_mode,
)


def patch_threads(patches: Patches) -> None:
    """Let threads that one of the capture starts belong to it, until ``patches`` are undone."""
    patches.set(threading.Thread, "start", joining(threading.Thread.start, patches.threads, modes_of_starter))


class _OfThreads(FakeTensorMode):  # type: ignore[misc]
    """A fake mode of several threads. While a fake kernel runs, fake tensors are ``meta`` to the thread that runs it:
    PyTorch keeps one answer for all (``FakeTensorMode.in_kernel_invocation``)."""

    invoking: set[int]

    @classmethod
    def of(cls, mode: FakeTensorMode) -> None:
        """Let a mode be one of several threads from now on."""
        if not isinstance(mode, cls):
            mode.__class__ = cls
            mode.invoking = set()

    @property
    def in_kernel_invocation(self) -> bool:
        return get_ident() in self.invoking

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, runs: bool) -> None:
        (self.invoking.add if runs else self.invoking.discard)(get_ident())


class _OneAtATime(RecordingMode):
    """A recording mode of several threads."""

    lock: threading.RLock

    @classmethod
    def of(cls, mode: RecordingMode) -> None:
        """Let a mode be one of several threads from now on."""
        if not isinstance(mode, cls):
            mode.__class__ = cls
            mode.lock = threading.RLock()

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        with self.lock:
            return super().__torch_dispatch__(func, types, args, kwargs)


def let_recorder_run(operator: Any, run: Callable[..., object]) -> None:
    """``run(mode, ...)`` runs an operator of higher order, which asks for the class of the topmost mode and knows no
    classes made of that. For all captures of the process."""
    for kind in (RecordingMode, _OneAtATime):
        if kind not in operator.python_key_table:
            operator.py_impl(kind)(run)


class _WhileItLasts(TorchDispatchMode):  # type: ignore[misc]
    """Over the modes of a thread that may outlive its capture: afterwards there are none."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        with contextlib.nullcontext() if self._threads else disable_current_modes():
            return func(*args, **(kwargs or {}))


def modes_of_starter(threads: Threads) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The modes of this thread for a thread it starts, where the capture's recorder is among them."""
    modes = dispatch_modes()
    recording = next((mode for mode in modes if isinstance(mode, RecordingMode)), None)
    if recording is None:
        return contextlib.nullcontext
    _OneAtATime.of(recording)
    for mode in modes:
        if isinstance(mode, FakeTensorMode):
            _OfThreads.of(mode)
    return lambda: _under([*modes, _WhileItLasts(threads)], recording.recorder.streams)


@contextlib.contextmanager
def _under(modes: list[object], streams: Streams) -> Iterator[None]:
    for mode in modes:
        push_dispatch_mode(mode)
    try:
        with streams.in_thread():
            yield
    finally:
        for mode in reversed(modes):
            pop_dispatch_mode(getattr(mode, "_mode_key", None))
