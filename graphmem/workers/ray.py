"""A Ray cluster: that of an address (``auto``, ``ray://host:10001``), or workers of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

from graphmem.errors import SourceError, UsageError
from graphmem.workers.crew import Loss, Opened


class Ray:
    """Ray's workers, a processor for each part."""

    name = "ray"
    takes_address = True

    @contextmanager
    def open(self, jobs: int, address: str | None) -> Iterator[Opened]:
        """The cluster of the address, or one of ``jobs`` processes here."""
        try:
            import ray
        except ImportError:
            raise UsageError("Ray is not installed; pip install 'graphmem[ray]'") from None
        own: dict[str, Any] = {} if address else {"num_cpus": jobs, "include_dashboard": False}
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level="error", **own)
        except (ConnectionError, RuntimeError) as error:
            raise SourceError(f"no Ray cluster answers at {address}: {str(error).partition(chr(10))[0]}") from None
        try:
            processors = int(ray.cluster_resources().get("CPU", 1))
            yield Opened(_Remote(), lambda: processors)
        finally:
            ray.shutdown()

    def loss(self, error: BaseException) -> Loss:
        """A worker that crashed or was out of memory, or a cluster that is gone."""
        from ray import exceptions

        if isinstance(error, (exceptions.WorkerCrashedError, exceptions.OutOfMemoryError)):
            return Loss.TASK
        is_of_function = isinstance(error, exceptions.RayTaskError)
        is_of_cluster = isinstance(error, (exceptions.RayError, ConnectionError)) and not is_of_function
        return Loss.ALL if is_of_cluster else Loss.NONE


class _Remote(Executor):
    """Ray's tasks as an executor's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A task of one processor, tried once."""
        import ray

        future: Future[Any] = ray.remote(max_retries=0, num_cpus=1)(_call).remote(fn, args, kwargs).future()
        return future


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)  # Ray's tasks are plain functions


ENGINE = Ray()
