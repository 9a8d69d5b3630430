"""One rank of several, without the others: process groups, collectives, and DistributedDataParallel.

``torch.distributed`` is real up to the collective: whatever backend a step asks for, its process groups are PyTorch's
own ``fake`` ones, and the operators of ``c10d`` are answered here: they write into tensors that exist, and are done at
once. PyTorch's own reducer (``torch/csrc/distributed/c10d/reducer.cpp``) runs, so its buckets, their rebuilding after
the first iteration, and their views are what they are on a card.

What NCCL takes itself lies outside PyTorch's allocator and is no part of a trace (:data:`NCCL_NOTE`). What
``ProcessGroupNCCL`` takes from the allocator is: a flat copy for collectives on lists (``newLikeFlat``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from graphmem.capture.device.pretend_device import DEVICE
from graphmem.capture.patches import Patches
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.trace import Category
from graphmem.training import DataParallel

#: Public reports differ widely: 0.5 to 0.7 GB for the first communicator of 4 A100 (NCCL issue 964), 1.1 GB and more on
#: 8 H100 (issue 1685); it depends on NCCL's version, channels and topology.
NCCL_NOTE = (
    "NCCL's own buffers (often 0.5 to 1 GiB for each communicator) are outside PyTorch's allocator and count as 0"
)

#: What the CUDA 13 wheels of PyTorch 2.13 bring; comm hooks ask it for bfloat16.
NCCL_VERSION = (2, 29, 7)

_aten = torch.ops.aten
_INTEGERS = (torch.int32, torch.int64)
#: Operators that make the reducer's host tensors.
MAKES_HOST_VALUES = {_aten.empty.memory_format, _aten.zeros.default}
_REDUCER_FILE = os.path.join("torch", "nn", "parallel", "distributed.py")


# --- collectives ------------------------------------------------------------------------------------------------------


def _collectives() -> set[Any]:
    names = (
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_",
        "allreduce_coalesced_", "alltoall_", "alltoall_base_", "barrier", "broadcast_", "gather_", "monitored_barrier_",
        "recv_", "recv_any_source_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "scatter_", "send",
    )  # fmt: skip
    return {getattr(torch.ops.c10d, name).default for name in names if hasattr(torch.ops.c10d, name)}


#: The operators of process groups.
COLLECTIVES = _collectives() if dist.is_available() else set()


def collective(func: Any, args: Sequence[Any], recorder: Any) -> Any:
    """Answer a collective: its outputs are the tensors that were given, and its work is done.

    The work keeps its tensors alive while somebody keeps the work (``ProcessGroupNCCL``, ``TensorShelf``).
    """
    lists = [value for value in args[:2] if isinstance(value, (list, tuple)) and value]
    if str(func).startswith(("c10d.allgather_.", "c10d.reduce_scatter_.")):
        recorder.storages.take_and_give(_flat_bytes(lists), Category.COMMUNICATION, "flat copy of a collective's list")
    if not func._schema.returns:
        return None
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors_in(args[0])))
    work = torch._C._distributed_c10d._create_work_from_future(future).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def _flat_bytes(lists: Sequence[Any]) -> int:
    """Bytes of the tensors of a list of lists, if they are all alike: only then are they laid out flat."""
    nested = next((value for value in lists if isinstance(value[0], (list, tuple))), None)
    tensors = list(nested[0]) if nested else []
    if len({(tuple(tensor.shape), tensor.dtype) for tensor in tensors}) != 1:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_bookkeeping(kwargs: Any, frame: FrameType | None) -> bool:
    """Whether one of :data:`MAKES_HOST_VALUES` makes a host tensor of indices or flags for the reducer, which reads and
    writes it itself."""
    if kwargs.get("dtype") not in _INTEGERS or kwargs.get("pin_memory"):
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return frame is not None and (
        frame.f_code.co_filename.endswith((_REDUCER_FILE, __file__))
        or frame.f_code is torch.autograd.graph._engine_run_backward.__code__
    )


# --- process groups ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_rank(recorder: Any, world_size: int | None) -> Iterator[None]:
    """``torch.distributed`` for the first rank of ``world_size`` processes, started as ``torchrun`` would.

    Without a ``world_size`` that of the environment counts. Process groups that the step makes are gone at the end.
    """
    if not dist.is_available():
        yield
        return
    patches = Patches()
    had_group, hook = dist.is_initialized(), sys.excepthook
    try:
        with _launched(world_size):
            _patch_process_groups(patches, recorder)
            _patch_data_parallel(patches, recorder)
            _patch_resize(patches, recorder)
            yield
    finally:
        if dist.is_initialized() and not had_group:
            dist.destroy_process_group()
        sys.excepthook = hook
        patches.undo()


@contextlib.contextmanager
def _launched(world_size: int | None) -> Iterator[None]:
    """The environment variables of ``torchrun``, on one machine."""
    if world_size is None:
        yield
        return
    values = {
        "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _patch_process_groups(patches: Patches, recorder: Any) -> None:
    from torch.testing._internal.distributed import fake_pg  # registers the backend

    del fake_pg
    module = dist.distributed_c10d
    make = module._new_process_group_helper
    prepared: list[bool] = []  # the imports take time, which a step without process groups need not spend

    def helper(size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **kwargs: Any) -> Any:
        del backend
        if not prepared:
            _patch_sharding(patches, recorder)
            prepared.append(True)
            recorder.notes.append(NCCL_NOTE)
        for name in ("backend_options", "pg_options", "device_id"):
            if name in kwargs:
                kwargs[name] = None
        return make(size, rank, ranks, dist.Backend.FAKE, store, *args, **kwargs)

    patches.set(module, "_new_process_group_helper", helper)
    patches.set(module, "rendezvous", _rendezvous)
    patches.set(module, "_get_default_timeout", lambda _: module.default_pg_timeout)  # NCCL's would ask a CUDA build
    for owner in (dist, module):
        patches.set(owner, "is_nccl_available", lambda: True)
    patches.set(torch.cuda.nccl, "version", lambda: NCCL_VERSION)
    patches.set(torch._C, "_get_accelerator", lambda *_: torch.device(DEVICE.type))


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Nobody else is there to be met."""
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0") or 0)
    if size < 1:
        raise CaptureError(
            "init_process_group needs the number of processes: give --world-size (world_size=), or set WORLD_SIZE"
        )
    yield dist.HashStore(), rank if rank >= 0 else int(os.environ.get("RANK", "0") or 0), size


def _patch_resize(patches: Patches, recorder: Any) -> None:
    """Sharded and low-precision parameters come and go by resizing their storage, which is no operator."""
    original = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        resized = original(self, size)
        recorder.storages.resized(self)
        return resized

    patches.set(torch.UntypedStorage, "resize_", resize)


def _patch_sharding(patches: Patches, recorder: Any) -> None:
    """A DTensor shows Python the device of its local part, as device tensors do everywhere in a capture."""
    with Patches.lifted(), _disable_current_modes():  # functional optimizers are scripted when they are imported
        importlib.import_module("torch.distributed.optim")
        tensors = importlib.import_module("torch.distributed.tensor")
        fsdp = importlib.import_module("torch.distributed.fsdp")
        with contextlib.suppress(ImportError):  # before 2.6 it was elsewhere
            groups = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
            patches.set(groups.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)
    propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    propagate = getattr(propagator, "_propagate_tensor_meta_non_cached", None)  # since 2.5

    def without_record(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return propagate(*args, **kwargs)  # type: ignore[misc]

    if propagate is not None:
        patches.set(propagator, "_propagate_tensor_meta_non_cached", without_record)
    recorder.wrappers.add(tensors.DTensor)
    patches.set(tensors.DTensor, "device", property(lambda self: self._local_tensor.device))
    patches.set(tensors.DTensor, "is_cuda", property(lambda self: self._local_tensor.is_cuda))
    patches.set(tensors.DTensor, "is_meta", property(lambda self: False))
    patches.set(fsdp.FullyShardedDataParallel, "__init__", _refuse_fsdp1)


def _refuse_fsdp1(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "FullyShardedDataParallel (FSDP1) cannot be analysed; fully_shard (FSDP2) of torch.distributed.fsdp can"
    )


# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def data_parallel(model: torch.nn.Module, options: DataParallel) -> torch.nn.Module:
    """``model``, which is on the device, wrapped for the process group of all processes."""
    if not dist.is_available():
        raise CaptureError("this build of PyTorch has no torch.distributed; install one that has, for --ddp")
    dist.init_process_group("nccl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that broadcast_buffers has a new name in 2.13
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[0],
            bucket_cap_mb=options.bucket_cap_mb,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            find_unused_parameters=options.find_unused_parameters,
            broadcast_buffers=options.broadcast_buffers,
        )


def _patch_data_parallel(patches: Patches, recorder: Any) -> None:
    from torch.nn.parallel import distributed as module

    bucket_of: dict[int, tuple[Category, str]] = {}  # id of a reducer -> what its buckets are for

    def init_helper(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        if self._use_python_reducer:
            raise CaptureError("DDP with optimize_ddp='python_reducer' cannot be analysed; leave it at its default")
        purpose = (Category.COMMUNICATION, "DDP bucket")
        if self.gradient_as_bucket_view:
            purpose = (Category.GRADIENT, "gradients in a DDP bucket")
        recorder.streams.note_leaves(parameters)  # the reducer keeps the nodes that accumulate their gradients
        with recorder.storages.births(*purpose):
            original_init(self, parameters, *args, **kwargs)
        bucket_of[id(self.reducer)] = purpose

    def rebuild(self: Any) -> bool:
        with recorder.storages.births(*bucket_of.get(id(self), (Category.COMMUNICATION, "DDP bucket"))):
            return bool(original_rebuild(self))

    def broadcast(*args: Any, **kwargs: Any) -> None:
        with recorder.storages.births(Category.COMMUNICATION, "broadcast of parameters and buffers"):
            original_broadcast(*args, **kwargs)

    original_init = module.DistributedDataParallel._ddp_init_helper
    original_rebuild = dist.Reducer._rebuild_buckets
    original_broadcast = dist._broadcast_coalesced
    patches.set(module.DistributedDataParallel, "_ddp_init_helper", init_helper)
    patches.set(dist.Reducer, "_rebuild_buckets", rebuild)
    patches.set(module.DistributedDataParallel, "_register_builtin_comm_hook", _refuse_builtin_hook)
    patches.set(dist.Logger, "set_runtime_stats_and_log", lambda _: None)  # there are no times
    for owner in (dist, dist.distributed_c10d):
        if hasattr(owner, "_broadcast_coalesced"):
            patches.set(owner, "_broadcast_coalesced", broadcast)
    verify = _verify(recorder)
    for name in ("torch.distributed.utils", "torch.nn.parallel.distributed", "torch.distributed.fsdp._init_utils"):
        if "_verify_param_shape_across_processes" in vars(sys.modules.get(name, object)):
            patches.set(sys.modules[name], "_verify_param_shape_across_processes", verify)


def _refuse_builtin_hook(*_: Any) -> None:
    raise CaptureError(
        "DDP's built-in C++ communication hooks cannot be analysed; register the Python one of the same name from "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )


def _verify(recorder: Any) -> Callable[..., None]:
    """What comparing the parameters' number and shapes with other ranks allocates (``verify_params_across_processes``,
    reducer.cpp); it always finds them alike."""

    def verify(process_group: Any, tensors: Sequence[torch.Tensor], logger: Any = None) -> None:
        del logger
        device = tensors[0].device
        with recorder.storages.births(Category.COMMUNICATION, "comparison of parameters across ranks"):
            count = torch.tensor([len(tensors)]).to(device)
            counts = [torch.empty_like(count) for _ in range(process_group.size())]
            sizes_and_strides = torch.empty(2 * sum(tensor.dim() for tensor in tensors), dtype=torch.int64)
            metadata = sizes_and_strides.to(device)
            del metadata, sizes_and_strides, counts, count

    return verify
