"""``fully_shard`` (FSDP2): a model wrapped with PyTorch's own code, and what its buffers are for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphmem.capture.patches import Patches
from graphmem.capture.ports import StorageBook
from graphmem.errors import CaptureError
from graphmem.trace import Category
from graphmem.training import FullyShard


def fully_sharded(
    model: nn.Module, blocks: Sequence[nn.Module], options: FullyShard, precision: torch.dtype | None
) -> nn.Module:
    """``model``, which is on the host: its ``blocks`` and itself sharded for the process group of all processes.

    ``precision``: in which parameters are gathered; None: in their own. Raises :class:`CaptureError`.
    """
    if not dist.is_available():
        raise CaptureError("this build of PyTorch has no torch.distributed; install one that has, for --fsdp")
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    except ImportError:
        raise CaptureError(
            "fully_shard is in torch.distributed.fsdp since PyTorch 2.6; install that or a newer one"
        ) from None
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl")
    names = ("replicate", "shard") if len(options.mesh) == 2 else ("shard",)
    chosen: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", options.mesh, mesh_dim_names=names),
        "reshard_after_forward": options.shard != "grad-op",
        "mp_policy": MixedPrecisionPolicy(precision, torch.float32) if precision else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, **chosen)
    fully_shard(model, **chosen)
    return model


#: Where FSDP2 allocates what processes exchange: module and name, and what that is.
_BUFFERS = (
    ("_fsdp_param_group", "foreach_all_gather", "gathered parameters"),
    ("_fsdp_param", "FSDPParam.init_all_gather_outputs", "gathered parameters"),
    ("_fsdp_param_group", "foreach_reduce", "reduced gradients"),
)


def name_buffers(patches: Patches, storages: StorageBook) -> None:
    """Say of FSDP2's buffers what they are for."""
    for module, path, label in _BUFFERS:
        owner: Any = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{module}")
        *classes, name = path.split(".")
        for part in classes:
            owner = getattr(owner, part)
        if hasattr(owner, name):
            patches.set(owner, name, _in_births(getattr(owner, name), storages, label))


def _in_births(original: Callable[..., Any], storages: StorageBook, label: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with storages.births(Category.COMMUNICATION, label):
            return original(*args, **kwargs)

    return named
