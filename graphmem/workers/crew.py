"""The parts of a long question, worked on by several processes, here or on a Dask or a Ray cluster.

    with Crew(ENGINES.named("dask"), jobs=2) as crew:
        for number, result in crew.results(function, tasks): ...

An engine opens an :class:`concurrent.futures.Executor` and says what its errors mean; what becomes of a part whose
worker died is decided here, once for all of them. An engine is one file; installed packages bring others (entry points
``graphmem.engines``).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pickle import PicklingError
from types import TracebackType
from typing import Any, Protocol, TypeVar

from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.plugins import Kind

Task = TypeVar("Task")
Result = TypeVar("Result")


class Loss(Enum):
    """What an error of an executor means: this part's worker died, or all workers are gone, or the function failed."""

    TASK = "task"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class Opened:
    """Workers that are there: who sends them parts, and how many there are now."""

    executor: Executor
    workers: Callable[[], int]


class Engine(Protocol):
    """Where parts are worked on. ``takes_address``: whether workers elsewhere can be named."""

    name: str
    takes_address: bool

    def open(self, jobs: int, address: str | None) -> AbstractContextManager[Opened]:
        """So many workers of this machine, or those of an address. Raises :class:`GraphmemError`: :class:`UsageError`
        where a package is missing."""

    def loss(self, error: BaseException) -> Loss:
        """What an error of a task means."""


ENGINES: Kind[Engine] = Kind(
    "engine",
    group="graphmem.engines",
    package="graphmem.workers",
    attribute="ENGINE",
    protocol="graphmem.workers.crew:Engine",
    order=("processes", "dask", "ray"),
)
#: A part whose worker dies is tried alone after that, so often in all.
_TRIES = 2
#: Workers are asked for so often, without a result between, before giving up.
_OPENINGS = 5


class Crew:
    """Workers that stay for as many rounds of parts as there are, and are asked for again where they are lost."""

    def __init__(self, engine: Engine, jobs: int, address: str | None = None) -> None:
        self._engine, self._jobs, self._address = engine, jobs, address
        self._closing = contextlib.ExitStack()
        self._there: Opened | None = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close()

    @property
    def size(self) -> int:
        """How many workers there are; they are asked for."""
        return max(1, self._opened().workers())

    def results(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result | GraphmemError]]:
        """(number of a task, its result), as they come, each once; made in the folder that this process is in.

        Where workers die, what they were at is done again: one part at a time, so that the one that kills its worker
        is found; its result is an error with the reason. Raises :class:`GraphmemError` where no workers can be had or
        the function and a task cannot be pickled, and what ``function`` raises.
        """
        work = _Work(functools.partial(_in_folder, os.getcwd(), function), tasks, self._engine)
        in_vain = 0
        while not work.is_done:
            in_vain += 1
            if in_vain > _OPENINGS:
                raise SourceError(f"the workers of the engine {self._engine.name} were lost {_OPENINGS} times")
            try:
                for found in work.go_on(self._opened()):
                    in_vain = 0
                    yield found
            except PicklingError:
                raise UsageError(
                    "the model cannot be sent to another process; name it (module.py:factory), or use one job"
                ) from None
            if not work.is_done:
                self._close()

    def _opened(self) -> Opened:
        if self._there is None:
            self._there = self._closing.enter_context(self._engine.open(self._jobs, self._address))
        return self._there

    def _close(self) -> None:
        self._there = None
        self._closing.close()


def _in_folder(folder: str, function: Callable[[Any], Any], task: Any) -> Any:
    """The result of a task in a worker, which may have begun in another folder."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return function(task)


class _Work:
    """Tasks on their way. ``suspects``: those whose worker may have died of them; they are tried one at a time."""

    def __init__(self, function: Callable[[Any], Any], tasks: Sequence[Any], engine: Engine) -> None:
        self._function, self._tasks, self._engine = function, tasks, engine
        self._waiting = deque(range(len(tasks)))
        self._suspects: deque[int] = deque()
        self._tries: dict[int, int] = {}
        self._running: dict[Future[Any], int] = {}

    @property
    def is_done(self) -> bool:
        """Whether every task has a result."""
        return not (self._waiting or self._suspects or self._running)

    def go_on(self, there: Opened) -> Iterator[tuple[int, Any]]:
        """The results of tasks until all are done, or the workers are gone."""
        while not self.is_done:
            self._submit(there)
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                number = self._running.pop(future)
                loss, error = self._loss(future)
                if loss is Loss.NONE:
                    yield number, future.result()
                    continue
                if self._is_given_up(number):
                    said = str(error).partition(". ")[0]
                    yield number, SourceError(f"its worker died {_TRIES} times, perhaps for lack of memory: {said}")
                else:
                    self._suspects.append(number)
                if loss is Loss.ALL:
                    self._suspects.extend(self._running.values())
                    self._running.clear()
                    return

    def _submit(self, there: Opened) -> None:
        queue = self._suspects or self._waiting
        most = 1 if self._suspects else 2 * max(1, there.workers()) if queue else 0
        while queue and len(self._running) < most:
            number = queue.popleft()
            self._running[there.executor.submit(self._function, self._tasks[number])] = number

    def _loss(self, future: Future[Any]) -> tuple[Loss, BaseException | None]:
        try:
            error = future.exception()
        except CancelledError as cancelled:
            return Loss.ALL, cancelled
        return (Loss.NONE if error is None else self._engine.loss(error)), error

    def _is_given_up(self, number: int) -> bool:
        """Whether a task that was alone when its worker died has been tried often enough."""
        if not self._running:
            self._tries[number] = self._tries.get(number, 0) + 1
        return self._tries.get(number, 0) >= _TRIES
