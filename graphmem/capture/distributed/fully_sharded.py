"""``fully_shard`` (FSDP2) of a model, with PyTorch's own code on a process group without others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphmem.errors import CaptureError
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
