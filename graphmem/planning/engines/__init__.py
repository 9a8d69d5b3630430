"""Where the parts of a long question are worked on: in this process, in several, on a Dask or a Ray cluster.

    for number, result in results(function, tasks, ENGINES.named("dask"), jobs=2): ...

An engine opens an :class:`concurrent.futures.Executor` and says what its errors mean; what becomes of a part whose
worker died is decided here, once for all of them. An engine is one file; installed packages bring others (entry points
``graphmem.engines``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, TypeVar

from graphmem.errors import GraphmemError, SourceError
from graphmem.plugins import Kind

Task = TypeVar("Task")
Result = TypeVar("Result")


class Loss(Enum):
    """What an error of an executor means: this part's worker died, or all workers are gone, or the function failed."""

    TASK = "task"
    ALL = "all"
    NONE = "none"


class Engine(Protocol):
    """Where parts are worked on. ``takes_address``: whether workers elsewhere can be named."""

    name: str
    takes_address: bool

    def open(self, jobs: int, address: str | None) -> AbstractContextManager[Executor]:
        """So many workers of this machine, or those of an address. Raises :class:`GraphmemError`: :class:`UsageError`
        where a package is missing."""

    def loss(self, error: BaseException) -> Loss:
        """What an error of a task means."""


ENGINES: Kind[Engine] = Kind(
    "engine",
    group="graphmem.engines",
    package="graphmem.planning.engines",
    attribute="ENGINE",
    protocol="graphmem.planning.engines:Engine",
    order=("processes", "dask", "ray"),
)
#: A part whose worker dies is tried alone after that, so often in all.
_TRIES = 2
#: Workers are asked for so often, without a result between, before giving up.
_OPENINGS = 5


def results(
    function: Callable[[Task], Result], tasks: Sequence[Task], engine: Engine, jobs: int, address: str | None = None
) -> Iterator[tuple[int, Result | GraphmemError]]:
    """(number of a task, its result), as they come, each once.

    Where workers die, what they were at is done again: one part at a time, so that the one that kills its worker is
    found; its result is an error with the reason. ``function`` and tasks must be picklable. Raises
    :class:`GraphmemError` where no workers can be had, and what ``function`` raises.
    """
    work = _Work(function, tasks, engine)
    in_vain = 0
    while not work.is_done:
        in_vain += 1
        if in_vain > _OPENINGS:
            raise SourceError(f"the workers of the engine {engine.name} were lost {_OPENINGS} times")
        with engine.open(jobs, address) as executor:
            for found in work.go_on(executor, jobs):
                in_vain = 0
                yield found


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

    def go_on(self, executor: Executor, jobs: int) -> Iterator[tuple[int, Any]]:
        """The results of tasks until all are done, or the workers are gone."""
        while not self.is_done:
            self._submit(executor, jobs)
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

    def _submit(self, executor: Executor, jobs: int) -> None:
        queue, most = (self._suspects, 1) if self._suspects else (self._waiting, 2 * jobs)
        while queue and len(self._running) < most:
            number = queue.popleft()
            self._running[executor.submit(self._function, self._tasks[number])] = number

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
