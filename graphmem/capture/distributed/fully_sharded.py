"""``fully_shard`` (FSDP2): a model wrapped with PyTorch's own code, and what its buffers are for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from graphmem.capture.patches import Patches
from graphmem.capture.ports import StorageBook
from graphmem.errors import CaptureError
from graphmem.trace import Category
from graphmem.training import FullyShard


def fully_sharded(
    model: nn.Module, blocks: Sequence[nn.Module], options: FullyShard, mesh: Any, precision: torch.dtype | None
) -> nn.Module:
    """``model``, which is on the host: its ``blocks`` and itself sharded over ``mesh``, of one dimension, or of
    replicas and shards.

    ``precision``: in which parameters are gathered; None: in their own. Raises :class:`CaptureError`.
    """
    try:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    except ImportError:
        raise CaptureError(
            "fully_shard is in torch.distributed.fsdp since PyTorch 2.6; install that or a newer one"
        ) from None
    chosen: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(precision, torch.float32) if precision else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    if options.shard == "grad-op":
        chosen["reshard_after_forward"] = False
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
