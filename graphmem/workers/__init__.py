"""Who makes the captures of a question that takes several: this process, others of this machine, or a cluster's.

Every command that makes captures which do not depend on each other takes :class:`Workers`; ``crew`` has what becomes of
parts and of the workers that die of them, and each engine is one file beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from graphmem.base.options import Whole, check_values, option
from graphmem.base.records import dataclass
from graphmem.errors import GraphmemError, UsageError

if TYPE_CHECKING:
    from graphmem.workers.crew import Crew

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Workers:
    """How many, by which engine, and where they are."""

    jobs: int | None = option(
        None,
        "Workers of this machine, each with captures of its own (graphmem[parallel]). Default: 1; of 'accuracy' and "
        "'zoo analyze' the CPU's cores.",
        Whole(),
    )
    engine: str = option("", "Who works: processes, dask or ray (graphmem[dask], graphmem[ray]). Default: processes.")
    scheduler: str | None = option(
        None, "Address of a Dask scheduler (tcp://host:8786), or of a Ray cluster (auto).", metavar="ADDRESS"
    )

    def __post_init__(self) -> None:
        check_values(self)

    def on_all_cores(self) -> Workers:
        """As many as the CPU has cores, where nobody said who works and processes can be had side by side."""
        is_said = self.jobs is not None or self.engine or self.scheduler is not None
        return self if is_said or find_spec("joblib") is None else replace(self, jobs=os.cpu_count())

    def crew(self) -> Crew | None:
        """Those who work, who are asked for once there is work; None: all is done in this process. Raises
        :class:`UsageError`."""
        if self.jobs in (None, 1) and not self.engine and self.scheduler is None:
            return None
        from graphmem.workers.crew import ENGINES, Crew

        engine = ENGINES.named(self.engine or "processes")
        if self.scheduler is not None and not engine.takes_address:
            raise UsageError(
                f"--scheduler is of an engine with workers elsewhere (--engine dask, ray), not {engine.name}"
            )
        return Crew(engine, self.jobs or 1, self.scheduler)

    def map(
        self, function: Callable[[Item], Result], items: Sequence[Item], cost: Callable[[Item], float] | None = None
    ) -> Iterator[Result | GraphmemError]:
        """The results in the order of the items, an error in the place of one whose workers died of it.

        Items of the highest ``cost`` are begun first, so that none of them is left alone at the end. Raises what
        ``function`` raises, and :class:`GraphmemError` where no workers can be had.
        """
        crew = self.crew()
        if crew is None:
            yield from map(function, items)
            return
        order = sorted(range(len(items)), key=lambda at: -cost(items[at]) if cost else 0.0)
        made: dict[int, Result | GraphmemError] = {}
        following = 0
        with crew:
            for number, result in crew.results(function, [items[at] for at in order]):
                made[order[number]] = result
                while following in made:
                    yield made.pop(following)
                    following += 1
