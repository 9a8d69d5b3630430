"""One rank of several, without the others: process groups.

``torch.distributed`` is real up to the collective: whatever backend a step asks for, its process groups are PyTorch's
own ``fake`` ones, and the operators of ``c10d`` are answered (``capture.operators.collectives``): they write into
tensors that exist, and are done at once. PyTorch's own reducer (``torch/csrc/distributed/c10d/reducer.cpp``) runs, so
its buckets, their rebuilding after the first iteration, and their views are as on a card.

NCCL's own memory lies outside PyTorch's allocator and is no part of a trace; its communicators are noted
(``devices.nccl``). The memory that ``ProcessGroupNCCL`` takes from the allocator is: a flat copy for collectives on
lists (``newLikeFlat``).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from graphmem.capture.device.pretend_device import DEVICE
from graphmem.capture.distributed.checkpoints import checkpoints_of_one
from graphmem.capture.distributed.data_parallel import patch_data_parallel
from graphmem.capture.distributed.deepspeed_kernels import deepspeed_kernels
from graphmem.capture.distributed.experts import patch_experts
from graphmem.capture.distributed.objects import patch_objects
from graphmem.capture.distributed.sharded_model import sharded
from graphmem.capture.distributed.sharding import forget_meshes, patch_resize, patch_sharding
from graphmem.capture.patches import Patches, around, constant
from graphmem.capture.record.recorder import Recorder
from graphmem.errors import CaptureError
from graphmem.torch_names import private
from graphmem.training.processes import Processes

_LOST = "sharded models and process groups cannot be followed"

#: What the CUDA 13 wheels of PyTorch 2.13 bring; comm hooks ask it for bfloat16.
NCCL_VERSION = (2, 29, 7)


@contextlib.contextmanager
def one_rank(book: Recorder, processes: Processes | None) -> Iterator[None]:
    """``torch.distributed`` for one of several ``processes``, started as ``torchrun`` would.

    Without them the environment counts as it is. Process groups that the step makes are gone at the end.
    """
    if not dist.is_available():
        yield
        return
    had_group, hook = dist.is_initialized(), sys.excepthook
    with Patches() as patches:
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


@contextlib.contextmanager
def _launched(processes: Processes | None) -> Iterator[None]:
    """The environment variables of ``torchrun``."""
    with Patches() as patches:
        if processes is not None:
            patches.set(os, "environ", _Launched(processes.environment(), os.environ))
        yield


class _Launched(ChainMap[str, str]):
    """The process's environment below the variables of ``torchrun``, which are the capture's alone."""

    def __setitem__(self, name: str, value: str) -> None:
        self.maps[0 if name in self.maps[0] else 1][name] = value

    def __delitem__(self, name: str) -> None:
        del self.maps[0 if name in self.maps[0] else 1][name]


def _patch_process_groups(patches: Patches, book: Recorder) -> None:
    private("torch.testing._internal.distributed.fake_pg", _LOST)
    groups = _Groups(patches, book)
    patches.wrap("torch.distributed.distributed_c10d._get_object_coll_device", _LOST, around(groups.device_of_objects))
    patches.wrap("torch.distributed.distributed_c10d._new_process_group_helper", _LOST, around(groups.make))
    default_timeout = constant(dist.distributed_c10d.default_pg_timeout)  # NCCL's would ask a CUDA build
    patches.replace("torch.distributed.distributed_c10d._get_default_timeout", _LOST, default_timeout)
    patches.set(dist.distributed_c10d, "rendezvous", _rendezvous)
    for owner in (dist, dist.distributed_c10d):
        patches.set(owner, "is_nccl_available", constant(True))
    patches.set(torch.cuda.nccl, "version", constant(NCCL_VERSION))
    patches.replace("torch._C._get_accelerator", _LOST, lambda *_: torch.device(DEVICE.type))


class _Groups:
    """Process groups that the step makes. Libraries choose by the names of backends, so a group shows the one that it
    was asked for with."""

    def __init__(self, patches: Patches, book: Recorder) -> None:
        self._patches, self._book = patches, book
        self._is_prepared = False  # the imports take time, which a step without process groups need not spend
        self._devices: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()

    def make(
        self, original: Callable[..., Any], size: int, rank: int, ranks: Sequence[int], backend: object,
        store: dist.Store, *args: object, **kwargs: object,
    ) -> tuple[dist.ProcessGroup, dist.Store]:  # fmt: skip
        """``_new_process_group_helper``."""
        if not self._is_prepared:
            self._prepare()
        kwargs.update((name, None) for name in ("backend_options", "pg_options", "device_id") if name in kwargs)
        group, store = original(size, rank, ranks, dist.Backend.FAKE, store, *args, **kwargs)
        world = private("torch.distributed.distributed_c10d._world", _LOST)
        if group in world.pg_map:
            if str(backend) != dist.Backend.FAKE:
                self._note_backend(world, group, str(backend), store)
            if str(backend) != "gloo":
                self._note_members(str(group.group_name), tuple(ranks) or tuple(range(size)), rank)
        return group, store

    def device_of_objects(self, original: Callable[..., str], group: dist.ProcessGroup | None = None) -> str:
        """``_get_object_coll_device``: objects travel on the host if the group has a backend for it."""
        return self._devices.get(group or dist.group.WORLD) or original(group)

    def _prepare(self) -> None:
        patch_sharding(self._patches, self._book)
        if "transformers" in sys.modules:
            patch_experts(self._patches, self._book)
        forget_meshes()
        self._is_prepared = True

    def _note_backend(self, world: Any, group: dist.ProcessGroup, backend: str, store: dist.Store) -> None:
        world.pg_map[group] = dist.Backend(backend), store
        world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))
        self._devices[group] = "cuda" if backend in ("nccl", "cuda:nccl") else "cpu"

    def _note_members(self, name: str, members: tuple[int, ...], rank: int) -> None:
        groups = self._book.groups
        if len(members) == 1:
            groups.alone.add(name)
            return
        self._book.on_forward = self._read_model
        groups.ranks[name] = members
        groups.rank = members[rank]

    def _read_model(self, model: torch.nn.Module, inputs: object) -> None:
        self._book.on_forward = None
        with self._book.paused():
            self._book.sharded = sharded(model, inputs)


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Nobody else is there to be met."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0") or 0)
    if size < 1:
        raise CaptureError(
            "init_process_group needs the number of processes: give --world-size (world_size=), or set WORLD_SIZE"
        )
    yield dist.HashStore(), rank if rank >= 0 else int(os.environ.get("RANK", "0") or 0), size


# --- globals of libraries about process groups ------------------------------------------------------------------------


#: Modules, or classes in them, and their variables. None or nothing is in them before the first group is made.
_KEPT = {
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.utils.groups": (
        "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "mesh_device", "mpu",
    ),
    "deepspeed.runtime.zero.partition_parameters.CUDAQuantizer": ("quantizer_cuda_module",),
    "deepspeed.runtime.comm.coalesced_collectives": ("quantizer_module",),
    "torch.nn.functional": ("linear",),  # DeepSpeed's ZeRO-3 puts its own there
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    "accelerate.state.PartialState": ("_shared_state",),
    "accelerate.state.AcceleratorState": ("_shared_state",),
    "accelerate.state.GradientState": ("_shared_state",),
}  # fmt: skip


@contextlib.contextmanager
def library_state_put_back() -> Iterator[None]:
    """A context after which libraries have their former state; those imported meanwhile have none."""
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in _now()}
    try:
        yield
    finally:
        for (path, name), value in _now():
            found = before.get((path, name))
            if isinstance(value, dict):
                value.clear()
                value.update(found or {})
            else:
                setattr(_owner(path), name, found)


def _now() -> list[tuple[tuple[str, str], Any]]:
    places = ((path, name) for path, names in _KEPT.items() for name in names if hasattr(_owner(path), name))
    return [((path, name), getattr(_owner(path), name)) for path, name in places]


def _owner(path: str) -> Any:
    """A module, or a class of one, if it has been imported."""
    module, _, last = path.rpartition(".")
    return sys.modules.get(path) or getattr(sys.modules.get(module), last, None)
