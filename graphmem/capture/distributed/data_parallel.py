"""DistributedDataParallel: PyTorch's own reducer on a process group without others; the purpose of its buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.distributed.strategy import Strategy
from graphmem.capture.patches import Patches, around, constant
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.record.storages import Storages
from graphmem.errors import CaptureError
from graphmem.torch_names import private
from graphmem.trace import Category

_Function = Callable[..., object]


class Replicated(Strategy):
    """``--ddp``: every process has all of the model, or of its stages of a pipeline."""

    def wrapped(self, part: nn.Module) -> nn.Module:
        """The model or stage in a wrapper for the processes that have the same, or for a new group of all."""
        if not dist.is_available():
            raise CaptureError("this build of PyTorch has no torch.distributed; install one that has, for --ddp")
        assert self.step.ddp is not None
        options = dataclasses.asdict(self.step.ddp)
        del options["world_size"]  # the others are PyTorch's, by its names
        group = None
        if self.step.pp is None:
            dist.init_process_group("nccl")
        else:
            group = self.mesh["replicate"].get_group()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that broadcast_buffers has a new name in 2.13
            return DistributedDataParallel(part, device_ids=[cards().own.index], process_group=group, **options)

    def micro_batch(self, model: nn.Module, inputs: object, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are reduced in the last micro-batch."""
        waits = self.step.pp is None and not is_last
        made: contextlib.AbstractContextManager[object] = model.no_sync() if waits else contextlib.nullcontext()
        return made


def patch_data_parallel(patches: Patches, book: Recorder) -> None:
    """Name the allocations of reducers, and answer the questions they ask other ranks."""
    bucket_of: dict[int, tuple[Category, str]] = {}  # id of a reducer -> what its buckets are for

    def init_helper(
        original: _Function, self: DistributedDataParallel, leaves: list[nn.Parameter], *args: object, **others: object
    ) -> None:
        if self._use_python_reducer:
            raise CaptureError("DDP with optimize_ddp='python_reducer' cannot be analysed; leave it at its default")
        purpose = (Category.COMMUNICATION, "DDP bucket")
        if self.gradient_as_bucket_view:
            purpose = (Category.GRADIENT, "gradients in a DDP bucket")
        book.streams.note_leaves(leaves)  # the reducer keeps the nodes that accumulate their gradients
        with book.storages.births(*purpose):
            original(self, leaves, *args, **others)
        bucket_of[id(self.reducer)] = purpose

    def rebuild(original: _Function, self: dist.Reducer) -> bool:
        with book.storages.births(*bucket_of.get(id(self), (Category.COMMUNICATION, "DDP bucket"))):
            return bool(original(self))

    def broadcast(original: _Function, *args: object, **kwargs: object) -> None:
        with book.storages.births(Category.COMMUNICATION, "broadcast of parameters and buffers"):
            original(*args, **kwargs)

    lost = "what DistributedDataParallel allocates has no name, and what it asks of other ranks no answer"
    patches.wrap("torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper", lost, around(init_helper))
    patches.wrap("torch.distributed.Reducer._rebuild_buckets", lost, around(rebuild))
    patches.replace(
        "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", lost, _refuse_builtin_hook
    )
    patches.set(dist.Logger, "set_runtime_stats_and_log", constant(None))  # there are no times
    patches.wrap("torch.distributed._broadcast_coalesced", lost, around(broadcast))
    broadcasts = private("torch.distributed._broadcast_coalesced", lost)
    patches.where_found([dist.distributed_c10d], {"_broadcast_coalesced": broadcasts})  # of some versions
    names = ("torch.distributed.utils", "torch.nn.parallel.distributed", "torch.distributed.fsdp._init_utils")
    verify = {"_verify_param_shape_across_processes": _verify(book.storages)}
    patches.where_found([sys.modules[name] for name in names if name in sys.modules], verify)


def _refuse_builtin_hook(*_: object) -> None:
    raise CaptureError(
        "DDP's built-in C++ communication hooks cannot be analysed; register the Python one of the same name from "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )


def _verify(storages: Storages) -> _Function:
    """The tensors of comparing the parameters' number and shapes with other ranks (``verify_params_across_processes``,
    reducer.cpp); it always finds them alike."""

    def verify(process_group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], logger: object = None) -> None:
        del logger
        device = tensors[0].device
        with storages.births(Category.COMMUNICATION, "comparison of parameters across ranks"):
            count = torch.tensor([len(tensors)]).to(device)
            counts = [torch.empty_like(count) for _ in range(process_group.size())]
            sizes_and_strides = torch.empty(2 * sum(tensor.dim() for tensor in tensors), dtype=torch.int64)
            metadata = sizes_and_strides.to(device)
            del metadata, sizes_and_strides, counts, count

    return verify
