"""A process group of one process that stands for several, on a CUDA build and in a capture."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor


@contextlib.contextmanager
def processes(world_size: int, backend: str = "alone") -> Iterator[None]:
    """The first rank of ``world_size``. A capture replaces the backend of its own accord."""
    if isinstance(torch.empty(0), FakeTensor):
        dist.init_process_group("nccl", rank=0, world_size=world_size)
    else:
        if backend == "fake":
            importlib.import_module("torch.testing._internal.distributed.fake_pg")
        else:
            register_alone()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def register_alone() -> None:
    """Make the backend ``alone`` known."""
    if not hasattr(dist.Backend, "ALONE"):
        dist.Backend.register_backend("alone", _make, devices=["cpu", "cuda"])


def _done(tensors: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future)


class _Alone(dist.ProcessGroup):
    """Every collective finds the others in agreement. PyTorch's fake group has works without results, which the
    reducer refuses."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._size = size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "alone"

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return _done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        return _done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _done(outputs)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> dist.Work:
        return _done([output])

    _allgather_base = all_gather_single  # before 2.13

    def barrier(self, opts: Any = None) -> dist.Work:
        return _done([])

    def send(self, tensors: Any, destination: int, tag: int) -> dist.Work:
        return _done([])

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        return _done([])


def _make(store: Any, rank: int, size: int, timeout: Any) -> _Alone:
    del store, timeout
    return _Alone(rank, size)
