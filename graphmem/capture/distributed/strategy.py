"""A way of sharing a step out among processes, a strategy a file. Its methods are the parts of the step that it
changes; those that it leaves out change nothing. :mod:`graphmem.capture.loop.strategies` composes them. And the mesh
of processes, by the names that its dimensions have in FSDP2's and torchtitan's programs."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphmem.errors import CaptureError
from graphmem.training import Training


class Strategy:
    """One way of sharing ``step``, whose options name it, out over the processes of ``mesh``."""

    #: Whether it brings the model to the card itself; and so late that the batch is there before.
    moves = moves_late = False

    def __init__(self, step: Training, mesh: DeviceMesh) -> None:
        self.step, self.mesh = step, mesh

    def inputs(self, inputs: object) -> Any:
        """The batch, on the host, with the values that a part of it cannot give."""
        return inputs

    def prepare(self, model: nn.Module) -> None:
        """Look at the model while it is whole. Raises :class:`CaptureError` for one that cannot be shared out so."""

    def share(self, part: nn.Module) -> nn.Module:
        """Share out the parameters of the model, or of a stage of it, in place; the module to go on with."""
        return part

    def materialize(self, part: nn.Module) -> None:
        """Give the module's tensors memory, where :meth:`share` has left them without."""

    def wrapped(self, part: nn.Module) -> nn.Module:
        """The wrapped model, or stage of it, which is on the card."""
        return part

    def micro_batch(self, model: nn.Module, inputs: object, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """The context of the passes of ``model`` on one micro-batch, the last one of its step or not."""
        return contextlib.nullcontext()


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
