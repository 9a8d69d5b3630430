"""Processes of this machine, by joblib's loky, which sends functions and models that pickle cannot."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from graphmem.answering import capture_cache
from graphmem.errors import UsageError
from graphmem.workers.crew import Loss, Opened


class Processes:
    """One pool of processes, which is broken when one of them dies."""

    name = "processes"
    takes_address = False

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Opened]:
        """A pool of ``jobs`` processes, which keep captures where this one does."""
        kept = None if capture_cache.in_use is None else capture_cache.in_use.folder
        try:
            import joblib

            executor = joblib.externals.loky.ProcessPoolExecutor(jobs, initializer=capture_cache.use, initargs=(kept,))
        except ImportError:
            raise UsageError("processes side by side need joblib; pip install 'graphmem[parallel]'") from None
        try:
            yield Opened(executor, lambda: jobs)
        finally:
            executor.shutdown(wait=True, kill_workers=True)

    def loss(self, error: BaseException) -> Loss:
        """The pool is broken as a whole."""
        return Loss.ALL if isinstance(error, BrokenProcessPool) else Loss.NONE


ENGINE = Processes()
