"""The workers of ``torch.utils.data.DataLoader``, which run in this process: a capture has one.

PyTorch's own iterator keeps all its books (prefetching, the order of batches, who is exhausted); its queues and
processes are replaced. A worker is a copy of the dataset and three random states, seeded as ``_worker_loop`` of
``torch/utils/data/_utils/worker.py`` seeds a process's, and put in place while it fetches. So batches are those that
processes would send, without their tensors being shared.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from graphmem.base.environment import having
from graphmem.capture.patches import Patches
from graphmem.capture.values import generators
from graphmem.torch_names import private

_LOST = "data loaders with workers cannot be followed"
_loader: Any = private("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", _LOST)
_kinds: Any = private("torch.utils.data.dataloader._DatasetKind", _LOST)
_worker: Any = private("torch.utils.data._utils.worker", _LOST)
_pinning: Any = private("torch.utils.data._utils.pin_memory", "data loaders that pin memory cannot be followed")
_collators: Any = private("torch.utils.data._utils.collate.default_collate_fn_map", _LOST)
_wrapped_error: Any = private("torch._utils.ExceptionWrapper", "errors of data loaders' workers are not raised")


def patch_data_loaders(patches: Patches) -> None:
    """Run workers here until ``patches`` are undone."""
    patches.replace("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", _LOST, _InProcess)
    collators = {**_collators, torch.Tensor: _collated}
    patches.replace("torch.utils.data._utils.collate.default_collate_fn_map", _LOST, collators)
    lost = "data loaders with workers ask about processes that are not there"
    patches.replace("torch.utils.data._utils.signal_handling._set_worker_pids", lost, lambda *_: None)
    patches.replace("torch.utils.data._utils.signal_handling._remove_worker_pids", lost, lambda *_: None)
    patches.replace("torch.utils.data._utils.signal_handling._set_SIGCHLD_handler", lost, lambda *_: None)


def _collated(batch: object, **options: object) -> object:
    """A batch of tensors as PyTorch collates it outside of a worker, which would write it into shared memory of its own
    (``collate_tensor_fn``, torch/utils/data/_utils/collate.py) where no fake tensor can be."""
    with having(_worker, _worker_info=None):
        return _collators[torch.Tensor](batch, **options)


class _InProcess(_loader):  # type: ignore[misc]
    """PyTorch's iterator over processes, without them."""

    def __init__(self, loader: object) -> None:
        own = copy.copy(loader)
        vars(own)["_DataLoader__multiprocessing_context"] = _Context()
        super().__init__(own)

    @property
    def _pin_memory(self) -> bool:
        return False  # by no thread: below

    @_pin_memory.setter
    def _pin_memory(self, wanted: bool) -> None:
        self._pins = wanted

    def _process_data(self, data: object, *args: object) -> object:
        data = super()._process_data(data, *args)
        return _pinning.pin_memory(data, self._pin_memory_device) if self._pins else data


class _Context:
    """The part of ``multiprocessing`` that is asked for: queues of tasks and of results, processes, an event."""

    def __init__(self) -> None:
        self.tasks: deque[tuple[_Queue, Any]] = deque()

    def Queue(self) -> _Queue:  # noqa: N802 - multiprocessing's name
        return _Queue(self)

    def Event(self) -> Event:  # noqa: N802
        return Event()

    def Process(self, target: object, args: Any) -> _Worker:  # noqa: N802
        del target
        worker = _Worker(*args)
        args[2].worker = worker
        return worker


class _Queue:
    """Tasks that are put into any queue are done in their order when a result is asked for."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self.worker: _Worker | None = None

    def put(self, task: object) -> None:
        self._context.tasks.append((self, task))

    def get(self, timeout: float | None = None) -> Any:
        del timeout
        while self._context.tasks:
            queue, task = self._context.tasks.popleft()
            result = queue.worker.result(task) if queue.worker is not None and task is not None else None
            if result is not None:
                return result
        raise RuntimeError("a data loader waits for a batch that no worker was asked for")

    def cancel_join_thread(self) -> None:
        pass

    close = cancel_join_thread


class _Worker:
    """A process that fetches batches."""

    pid = 0
    daemon = False

    def __init__(
        self, kind: object, dataset: object, _tasks: object, _results: object, _done: object, auto_collation: bool,
        collate: object, drop_last: bool, base_seed: int, init: Callable[[int], None] | None, number: int,
        workers: int, _persistent: bool, shared_seed: int | None,
    ) -> None:  # fmt: skip
        self._dataset = copy.copy(dataset)  # a process has its own
        self._options = (auto_collation, collate, drop_last)
        self._kind, self._init, self._number, self._workers = kind, init, number, workers
        self._base_seed, self._shared_seed = base_seed, shared_seed
        self._states: Any = None
        self._failed: Any = None
        self._has_ended = self._is_joined = False

    def start(self) -> None:
        """As a process begins; an error here is raised with the first batch."""
        with _in_place_of(self):
            try:
                seed = self._base_seed + self._number
                random.seed(seed)
                torch.manual_seed(seed)
                np.random.seed(_worker._generate_state(self._base_seed, self._number))
                self._shuffle_pipe(self._shared_seed)
                self._info = _worker.WorkerInfo(
                    id=self._number, num_workers=self._workers, seed=seed, dataset=self._dataset
                )
                _worker._worker_info = self._info
                if self._init is not None:
                    self._init(self._number)
                self._make_fetcher()
            except Exception:
                self._failed = _wrapped_error(where=f"in DataLoader worker process {self._number}")

    def is_alive(self) -> bool:
        return not self._is_joined

    def join(self, timeout: float | None = None) -> None:
        del timeout
        self._has_ended = self._is_joined = True

    def result(self, task: Any) -> Any:
        """The item that the process puts into the queue of results for a task; None for nothing."""
        if isinstance(task, _worker._ResumeIteration):
            self._has_ended = False
            with _in_place_of(self):
                self._shuffle_pipe(task.seed)
                self._make_fetcher()
            return task, None
        if self._has_ended:
            return None
        number, index = task
        if self._failed is not None:
            failed, self._failed = self._failed, None
            return number, failed
        with _in_place_of(self):
            return number, self._fetched(index)

    def _fetched(self, index: object) -> Any:
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            if self._kind != _kinds.Iterable:
                return _wrapped_error(where=f"in DataLoader worker process {self._number}")
            self._has_ended = True
            return _worker._IterableDatasetStopIteration(self._number)
        except Exception:
            return _wrapped_error(where=f"in DataLoader worker process {self._number}")

    def _shuffle_pipe(self, seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe) and seed is not None:
            shared = torch.Generator()
            shared.manual_seed(seed)
            self._dataset = apply_random_seed(self._dataset, shared)

    def _make_fetcher(self) -> None:
        self._fetcher = _kinds.create_fetcher(self._kind, self._dataset, *self._options)


@contextlib.contextmanager
def _in_place_of(worker: _Worker) -> Iterator[None]:
    """Until the end, this process is the worker's: its random states, and ``get_worker_info``."""
    outside, info = _random_states(), _worker._worker_info
    if worker._states is not None:
        _set_random_states(worker._states)
        _worker._worker_info = worker._info
    try:
        yield
    finally:
        worker._states, _worker._worker_info = _random_states(), info
        _set_random_states(outside)


def _random_states() -> object:
    return generators.current().settled().get_state(), random.getstate(), np.random.get_state()


def _set_random_states(states: Any) -> None:
    generators.current().restart().set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
