"""A Dask cluster: that of an address (``tcp://host:8786``), or workers of this machine.

Clusters of Slurm, PBS and others are made by dask-jobqueue, whose scheduler has an address.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from graphmem.errors import SourceError, UsageError
from graphmem.workers.crew import Loss, Opened

#: Seconds to wait for a scheduler.
_PATIENCE = 60


class Dask:
    """Dask's scheduler gives a part of a worker that died to another one, a few times."""

    name = "dask"
    takes_address = True

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Opened]:
        """The cluster of the address, or one of ``jobs`` processes here."""
        try:
            from distributed import Client, LocalCluster
        except ImportError:
            raise UsageError("Dask is not installed; pip install 'graphmem[dask]'") from None
        for name in ("distributed", "tornado"):  # what becomes of lost workers is said in rows
            logging.getLogger(name).setLevel(logging.CRITICAL)
        cluster = None if address else LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
        try:
            client = Client(address or cluster, timeout=_PATIENCE)
        except (OSError, ValueError) as error:
            raise SourceError(f"no Dask scheduler answers at {address}: {error}") from None
        try:
            yield Opened(client.get_executor(pure=False), functools.partial(_threads, client))
        finally:
            client.close()
            if cluster is not None:
                cluster.close()

    def loss(self, error: BaseException) -> Loss:
        """Workers of one part that died too often, or a scheduler that is gone."""
        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker

        if isinstance(error, KilledWorker):
            return Loss.TASK
        return Loss.ALL if isinstance(error, (CommClosedError, OSError)) else Loss.NONE


def _threads(client: Any) -> int:
    """Of all workers that are there now: clusters of dask-jobqueue begin with none. 0 while no scheduler answers."""
    try:
        return sum(client.nthreads().values())
    except (OSError, TimeoutError):
        return 0


ENGINE = Dask()
