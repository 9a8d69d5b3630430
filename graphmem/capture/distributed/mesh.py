"""The mesh of processes of a step, by the names that its dimensions have in FSDP2's and torchtitan's programs."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphmem.errors import CaptureError
from graphmem.training import Training


def process_mesh(training: Training) -> DeviceMesh:
    """The process group of all processes, and the mesh over it with the dimensions of ``training.mesh``. Raises
    :class:`CaptureError`."""
    if not dist.is_available():
        raise CaptureError("this build of PyTorch has no torch.distributed; install one that has")
    sizes = training.mesh
    dist.init_process_group("nccl")
    return init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def shards_of(mesh: DeviceMesh) -> DeviceMesh:
    """The part of ``mesh`` that FSDP2 shards over: one dimension, or replicas of one. Processes that share a sequence
    share the parameters too (torchtitan's ``dp_shard_cp``)."""
    names = tuple(name for name in ("replicate", "shard") if name in mesh.mesh_dim_names)
    if "cp" not in mesh.mesh_dim_names:
        return mesh if names == tuple(mesh.mesh_dim_names) else mesh[names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that slices of what is flattened will be made in another way
        joint = mesh["shard", "cp"]._flatten("shard_cp")
        return mesh["replicate", "shard_cp"] if "replicate" in names else joint
