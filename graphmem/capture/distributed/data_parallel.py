"""DistributedDataParallel: PyTorch's own reducer on a process group without others; what its buckets are for."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.distributed.strategy import Strategy
from graphmem.capture.patches import Patches
from graphmem.capture.ports import RankBook, StorageBook
from graphmem.errors import CaptureError
from graphmem.torch_names import private
from graphmem.trace import Category


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
            return nn.parallel.DistributedDataParallel(
                part, device_ids=[cards().own.index], process_group=group, **options
            )

    def micro_batch(self, model: nn.Module, inputs: Any, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are reduced in the last micro-batch."""
        waits = self.step.pp is None and not is_last
        made: contextlib.AbstractContextManager[object] = model.no_sync() if waits else contextlib.nullcontext()
        return made


def patch_data_parallel(patches: Patches, book: RankBook) -> None:
    """Name what reducers allocate, and answer what they ask of other ranks."""
    bucket_of: dict[int, tuple[Category, str]] = {}  # id of a reducer -> what its buckets are for

    def init_helper(original_init: Any, self: Any, parameters: Any, *args: object, **kwargs: object) -> None:
        if self._use_python_reducer:
            raise CaptureError("DDP with optimize_ddp='python_reducer' cannot be analysed; leave it at its default")
        purpose = (Category.COMMUNICATION, "DDP bucket")
        if self.gradient_as_bucket_view:
            purpose = (Category.GRADIENT, "gradients in a DDP bucket")
        book.streams.note_leaves(parameters)  # the reducer keeps the nodes that accumulate their gradients
        with book.storages.births(*purpose):
            original_init(self, parameters, *args, **kwargs)
        bucket_of[id(self.reducer)] = purpose

    def rebuild(original_rebuild: Any, self: Any) -> bool:
        with book.storages.births(*bucket_of.get(id(self), (Category.COMMUNICATION, "DDP bucket"))):
            return bool(original_rebuild(self))

    def broadcast(original_broadcast: Any, *args: object, **kwargs: object) -> None:
        with book.storages.births(Category.COMMUNICATION, "broadcast of parameters and buffers"):
            original_broadcast(*args, **kwargs)

    lost = "what DistributedDataParallel allocates has no name, and what it asks of other ranks no answer"
    patches.wrap("torch.nn.parallel.distributed.DistributedDataParallel._ddp_init_helper", lost, _over(init_helper))
    patches.wrap("torch.distributed.Reducer._rebuild_buckets", lost, _over(rebuild))
    patches.replace(
        "torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", lost, _refuse_builtin_hook
    )
    patches.set(dist.Logger, "set_runtime_stats_and_log", lambda _: None)  # there are no times
    patches.wrap("torch.distributed._broadcast_coalesced", lost, _over(broadcast))
    if hasattr(dist.distributed_c10d, "_broadcast_coalesced"):  # of some versions
        patches.set(
            dist.distributed_c10d, "_broadcast_coalesced", private("torch.distributed._broadcast_coalesced", lost)
        )
    verify = _verify(book.storages)
    for name in ("torch.distributed.utils", "torch.nn.parallel.distributed", "torch.distributed.fsdp._init_utils"):
        if "_verify_param_shape_across_processes" in vars(sys.modules.get(name, object)):
            patches.set(sys.modules[name], "_verify_param_shape_across_processes", verify)


def _over(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """A method that is given the one that it replaces first."""

    def made_of(original: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(original, *args, **kwargs)

    return made_of


def _refuse_builtin_hook(*_: object) -> None:
    raise CaptureError(
        "DDP's built-in C++ communication hooks cannot be analysed; register the Python one of the same name from "
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    )


def _verify(storages: StorageBook) -> Callable[..., None]:
    """What comparing the parameters' number and shapes with other ranks allocates (``verify_params_across_processes``,
    reducer.cpp); it always finds them alike."""

    def verify(process_group: Any, tensors: Sequence[torch.Tensor], logger: Any = None) -> None:
        del logger
        device = tensors[0].device
        with storages.births(Category.COMMUNICATION, "comparison of parameters across ranks"):
            count = torch.tensor([len(tensors)]).to(device)
            counts = [torch.empty_like(count) for _ in range(process_group.size())]
            sizes_and_strides = torch.empty(2 * sum(tensor.dim() for tensor in tensors), dtype=torch.int64)
            metadata = sizes_and_strides.to(device)
            del metadata, sizes_and_strides, counts, count

    return verify
