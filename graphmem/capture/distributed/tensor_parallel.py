"""Tensor and expert parallelism of a transformers model, by its own plan and transformers' own code."""

from __future__ import annotations

from typing import Any

from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training


def tensor_parallel(model: nn.Module, step: Training | Inference) -> nn.Module:
    """This process's part of ``model``, on the card: distributed while it has no memory, as ``from_pretrained`` does it
    (``prepare_distribute_model`` and ``maybe_distribute_model``, transformers/distributed/mixin.py of 5.23), whose
    checkpoint's parts are then read one by one. Raises :class:`CaptureError`."""
    prepare = getattr(type(model), "prepare_distribute_model", None)
    if prepare is None:
        raise CaptureError(
            f"{type(model).__name__} has no plan for --tp or --ep: they are of transformers' models, of a version that "
            "has DistributedConfig; parallelize others in a program of your own"
        )
    try:
        config, _, meshes = prepare(_configuration(step))
        model = type(model).maybe_distribute_model(model.to("meta"), config, meshes)
    except (ValueError, NotImplementedError) as error:
        raise CaptureError(f"{type(model).__name__} cannot be distributed so: {error}") from None
    return model.to_empty(device=cards().own)


def _configuration(step: Training | Inference) -> Any:
    from transformers.distributed import DistributedConfig

    sharded = step.fsdp if isinstance(step, Training) else None
    options: dict[str, Any] = {"tp_size": step.tp or 1}
    if sharded is not None:
        options |= {
            "fsdp_size": sharded.world_size // options["tp_size"],
            "fsdp_cpu_offload": sharded.offload,
            "fsdp_mixed_precision": step.amp == "bf16",
        }
    if step.ep:
        options["ep_size"] = step.ep
    return DistributedConfig(**options)
