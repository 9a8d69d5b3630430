"""The mesh of processes of a step, by the names that its dimensions have in FSDP2's and torchtitan's programs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from graphmem.errors import CaptureError
from graphmem.training import Training


def process_mesh(training: Training) -> Any:
    """The process group of all processes, and the mesh over it with the dimensions of ``training.mesh``. Raises
    :class:`CaptureError`."""
    if not dist.is_available():
        raise CaptureError("this build of PyTorch has no torch.distributed; install one that has")
    from torch.distributed.device_mesh import init_device_mesh

    sizes = training.mesh
    dist.init_process_group("nccl")
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shards_of(mesh: Any) -> Any:
    """The part of ``mesh`` that FSDP2 shards over: one dimension, or replicas of one. Processes that share a sequence
    share the parameters too (torchtitan's ``dp_shard_cp``)."""
    names = [name for name in ("replicate", "shard", "cp") if name in mesh.mesh_dim_names]
    if "cp" in names:
        mesh["shard", "cp"]._flatten("shard_cp")
        names = [*names[: names.index("shard")], "shard_cp"]
    return mesh if tuple(names) == tuple(mesh.mesh_dim_names) else mesh[tuple(names)]
