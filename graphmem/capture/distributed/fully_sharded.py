"""``fully_shard`` (FSDP2): a model wrapped with PyTorch's own code, and the purpose of its buffers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphmem.capture.distributed.sharded_model import unsplit_blocks
from graphmem.capture.distributed.strategy import Strategy, shards_of
from graphmem.capture.patches import Patches
from graphmem.capture.record.storages import Storages
from graphmem.capture.values.tensors import DTYPES
from graphmem.errors import CaptureError
from graphmem.trace import Category
from graphmem.training import Training


class FullySharded(Strategy):
    """``--fsdp``: every process has a part of each parameter, and gathers the others block by block. The model stays on
    the host until its shards are moved. Tensor parallelism by transformers' own plan shards it, too."""

    def __init__(self, step: Training, mesh: DeviceMesh) -> None:
        super().__init__(step, mesh)
        assert step.fsdp is not None
        self._options = step.fsdp
        self._by_transformers = bool(step.tp or step.ep) and not step.tp_in_mesh
        self.moves = self.moves_late = not self._by_transformers

    def share(self, part: nn.Module) -> nn.Module:
        """Apply ``fully_shard`` in place to each block of the model or stage, then to the whole, unless a plan of
        transformers has sharded it. Raises :class:`CaptureError` where PyTorch is older than ``fully_shard``."""
        if self._by_transformers:
            return part
        try:
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        except ImportError:
            raise CaptureError(
                "fully_shard is in torch.distributed.fsdp since PyTorch 2.6; install that or a newer one"
            ) from None
        precision = MixedPrecisionPolicy(DTYPES[self.step.amp], torch.float32) if self.step.amp else None
        chosen: dict[str, Any] = {
            "mesh": shards_of(self.mesh),
            "mp_policy": precision or MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy() if self._options.offload else OffloadPolicy(),
        }
        if self._options.shard == "grad-op":
            chosen["reshard_after_forward"] = False
        for block in unsplit_blocks(part):
            fully_shard(block, **chosen)
        fully_shard(part, **chosen)
        return part

    def micro_batch(self, model: nn.Module, inputs: object, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Gradients are reduced in the last micro-batch, unless each is to be."""
        if self.step.pp is None and self.step.grad_accum > 1 and not self._options.sync_each_batch:
            model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


#: Where FSDP2 allocates what processes exchange: module, class in it, and what its functions make.
_BUFFERS = (
    ("_fsdp_param_group", "", {"foreach_all_gather": "gathered parameters", "foreach_reduce": "reduced gradients"}),
    ("_fsdp_param", "FSDPParam", {"init_all_gather_outputs": "gathered parameters"}),
)


def name_buffers(patches: Patches, storages: Storages) -> None:
    """Name the purpose of FSDP2's buffers."""

    def named(label: str) -> Callable[..., object]:
        def in_births(original: Callable[..., object], *args: object, **kwargs: object) -> object:
            with storages.births(Category.COMMUNICATION, label):
                return original(*args, **kwargs)

        return in_births

    for module, kind, labels in _BUFFERS:
        owner: object = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{module}")
        owner = getattr(owner, kind) if kind else owner
        patches.around(owner, {name: named(label) for name, label in labels.items()})
