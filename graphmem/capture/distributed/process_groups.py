"""One rank of several, without the others: process groups.

``torch.distributed`` is real up to the collective: whatever backend a step asks for, its process groups are PyTorch's
own ``fake`` ones, and the operators of ``c10d`` are answered (``capture.operators.collectives``): they write into
tensors that exist, and are done at once. PyTorch's own reducer (``torch/csrc/distributed/c10d/reducer.cpp``) runs, so
its buckets, their rebuilding after the first iteration, and their views are what they are on a card.

What NCCL takes itself lies outside PyTorch's allocator and is no part of a trace; its communicators are noted
(``devices.nccl``). What
``ProcessGroupNCCL`` takes from the allocator is: a flat copy for collectives on lists (``newLikeFlat``).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import ChainMap
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphmem.capture.device.pretend_device import DEVICE
from graphmem.capture.distributed.checkpoints import checkpoints_of_one
from graphmem.capture.distributed.data_parallel import patch_data_parallel
from graphmem.capture.distributed.deepspeed_kernels import deepspeed_kernels
from graphmem.capture.distributed.experts import patch_experts
from graphmem.capture.distributed.library_state import library_state_put_back
from graphmem.capture.distributed.objects import patch_objects
from graphmem.capture.distributed.sharded_model import sharded
from graphmem.capture.distributed.sharding import forget_meshes, patch_resize, patch_sharding
from graphmem.capture.patches import Patches
from graphmem.capture.ports import RankBook
from graphmem.errors import CaptureError
from graphmem.torch_names import private
from graphmem.training.processes import Processes

_LOST = "sharded models and process groups cannot be followed"

#: What the CUDA 13 wheels of PyTorch 2.13 bring; comm hooks ask it for bfloat16.
NCCL_VERSION = (2, 29, 7)


@contextlib.contextmanager
def one_rank(book: RankBook, processes: Processes | None) -> Iterator[None]:
    """``torch.distributed`` for one of several ``processes``, started as ``torchrun`` would.

    Without them the environment counts as it is. Process groups that the step makes are gone at the end.
    """
    if not dist.is_available():
        yield
        return
    patches = Patches()
    had_group, hook = dist.is_initialized(), sys.excepthook
    try:
        with _launched(processes), library_state_put_back(), deepspeed_kernels(book), checkpoints_of_one():
            _patch_process_groups(patches, book)
            patch_data_parallel(patches, book)
            patch_objects(patches, book)
            patch_resize(patches, book.storages)
            yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
            forget_meshes()
        sys.excepthook = hook
        patches.undo()


@contextlib.contextmanager
def _launched(processes: Processes | None) -> Iterator[None]:
    """The environment variables of ``torchrun``."""
    if processes is None:
        yield
        return
    patches = Patches()
    try:
        patches.set(os, "environ", _Launched(processes.environment(), os.environ))
        yield
    finally:
        patches.undo()


class _Launched(ChainMap[str, str]):
    """The process's environment below the variables of ``torchrun``, which are the capture's alone."""

    def __setitem__(self, name: str, value: str) -> None:
        self.maps[0 if name in self.maps[0] else 1][name] = value

    def __delitem__(self, name: str) -> None:
        del self.maps[0 if name in self.maps[0] else 1][name]


def _patch_process_groups(patches: Patches, book: RankBook) -> None:
    fake_pg = private("torch.testing._internal.distributed.fake_pg", _LOST)

    del fake_pg
    module = dist.distributed_c10d
    make = private("torch.distributed.distributed_c10d._new_process_group_helper", _LOST)
    prepared: list[bool] = []  # the imports take time, which a step without process groups need not spend
    object_device = private("torch.distributed.distributed_c10d._get_object_coll_device", _LOST, lambda _: "cpu")
    asked_for = _AskedFor()

    def look(model: torch.nn.Module, inputs: object) -> None:
        book.on_forward = None
        with book.paused():
            book.sharded = sharded(model, inputs)

    def helper(size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: object, **kwargs: object) -> Any:
        if not prepared:
            patch_sharding(patches, book)
            if "transformers" in sys.modules:
                patch_experts(patches, book)
            forget_meshes()
            prepared.append(True)
        for name in ("backend_options", "pg_options", "device_id"):
            if name in kwargs:
                kwargs[name] = None
        group, store = make(size, rank, ranks, dist.Backend.FAKE, store, *args, **kwargs)
        if group in module._world.pg_map:
            asked_for.note(group, str(backend), store)
            if size == 1 and str(backend) != "gloo":
                book.groups.alone.add(str(group.group_name))
            elif str(backend) != "gloo":
                book.on_forward = look
                members = tuple(ranks) or tuple(range(size))
                book.groups.ranks[str(group.group_name)] = members
                book.groups.rank = members[rank]
        return group, store

    def device_of_objects(group: object = None) -> str:
        return asked_for.device(group or dist.group.WORLD) or object_device(group)

    patches.replace("torch.distributed.distributed_c10d._get_object_coll_device", _LOST, device_of_objects)
    patches.replace("torch.distributed.distributed_c10d._new_process_group_helper", _LOST, helper)
    patches.set(module, "rendezvous", _rendezvous)
    patches.replace(  # NCCL's would ask a CUDA build
        "torch.distributed.distributed_c10d._get_default_timeout", _LOST, lambda _: module.default_pg_timeout
    )
    for owner in (dist, module):
        patches.set(owner, "is_nccl_available", lambda: True)
    patches.set(torch.cuda.nccl, "version", lambda: NCCL_VERSION)
    patches.replace("torch._C._get_accelerator", _LOST, lambda *_: torch.device(DEVICE.type))


class _AskedFor:
    """The backends that the step asked for, which it is told that it has: libraries choose by their names."""

    def __init__(self) -> None:
        self._device: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def note(self, group: object, backend: str, store: object) -> None:
        if backend == dist.Backend.FAKE:
            return
        world = private("torch.distributed.distributed_c10d._world", _LOST)
        world.pg_map[group] = dist.Backend(backend), store
        world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
        devices = {"nccl": "cuda", "cuda:nccl": "cuda", "gloo": "cpu"}
        self._device[group] = devices.get(backend, "cpu")

    def device(self, group: object) -> str | None:
        """Where the group's objects travel (``_get_object_coll_device``): on the host, if it has a backend for it."""
        return self._device.get(group)


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: object) -> Iterator[tuple[Any, int, int]]:
    """Nobody else is there to be met."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0") or 0)
    if size < 1:
        raise CaptureError(
            "init_process_group needs the number of processes: give --world-size (world_size=), or set WORLD_SIZE"
        )
    yield dist.HashStore(), rank if rank >= 0 else int(os.environ.get("RANK", "0") or 0), size
