"""Processes of this machine, by joblib's loky, which sends functions and models that pickle cannot."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from graphmem.errors import UsageError
from graphmem.planning.engines import Loss


class Processes:
    """One pool of processes, which is broken when one of them dies."""

    name = "processes"
    takes_address = False

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Executor]:
        """A pool of ``jobs`` processes."""
        try:
            import joblib

            executor = joblib.externals.loky.ProcessPoolExecutor(jobs)
        except ImportError:
            raise UsageError("processes side by side need joblib; pip install 'graphmem[parallel]'") from None
        try:
            yield executor
        finally:
            executor.shutdown(wait=True, kill_workers=True)

    def loss(self, error: BaseException) -> Loss:
        """The pool is broken as a whole."""
        return Loss.ALL if isinstance(error, BrokenProcessPool) else Loss.NONE


ENGINE = Processes()
