"""Tensor and expert parallelism of a transformers model, by its own plan and transformers' own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphmem.capture.distributed.shared_layers import materialize
from graphmem.capture.distributed.strategy import Strategy
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training


class TensorParallel(Strategy):
    """``--tp``, ``--ep`` of a transformers model, and FSDP2 with them where transformers shards too."""

    moves = True

    def __init__(self, step: Training | Inference, mesh: DeviceMesh | None) -> None:
        self.mesh, self._step = mesh, step

    def share(self, part: nn.Module) -> nn.Module:
        """This process's part of the model, on the card: distributed while it has no memory, as ``from_pretrained``
        does it (``prepare_distribute_model`` and ``maybe_distribute_model``, transformers/distributed/mixin.py of
        5.23), whose checkpoint's parts are then read one by one. Raises :class:`CaptureError`."""
        name = type(part).__name__
        prepare = getattr(type(part), "prepare_distribute_model", None)
        if prepare is None:
            raise CaptureError(
                f"{name} has no plan for --tp or --ep: they are of transformers' models, of a version that has "
                "DistributedConfig; parallelize others in a program of your own"
            )
        try:
            config, _, meshes = prepare(_configuration(self._step))
            model = type(part).maybe_distribute_model(_untied(part.to("meta")), config, meshes)
        except (ValueError, NotImplementedError) as error:
            raise CaptureError(f"{name} cannot be distributed so: {error}") from None
        sharded = self._step.fsdp if isinstance(self._step, Training) else None
        return _on_card_and_tied(model, torch.device("cpu") if sharded is not None and sharded.offload else None)


def _untied(model: nn.Module) -> nn.Module:
    """The model with a weight of its own for each that is tied to another: ``from_pretrained`` builds it so
    (``no_tie_weights``, transformers/initialization.py of 5.23), and the rules of both modules are applied."""
    for name in model.all_tied_weights_keys:
        module, _, weight = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(
            model.get_submodule(module), weight, nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        )
    return model


def _on_card_and_tied(model: torch.nn.Module, parameters: torch.device | None) -> nn.Module:
    """The part of the model with memory, its ``parameters`` elsewhere where FSDP2 offloads them, tied as it is when its
    weights are loaded (``_finalize_model_loading``, transformers/modeling_utils.py of 5.23): a tied weight is the
    other's part, and none of its own is ever made."""
    model.tie_weights(recompute_mapping=False)
    materialize(model, parameters)
    model.tie_weights(recompute_mapping=False)  # parameters that are not shared out were replaced one by one
    return model


def _configuration(step: Training | Inference) -> Any:
    """The ``DistributedConfig`` of transformers for the sizes and the plan of a step."""
    from transformers.distributed import DistributedConfig

    sharded = step.fsdp if isinstance(step, Training) else None
    options: dict[str, Any] = {"tp_size": step.tp or 1}
    if sharded is not None:
        sizes = sharded.mesh_of(sharded.world_size // options["tp_size"])
        options |= {
            "fsdp_size": sizes["shard"],
            "dp_replicate_size": sizes.get("replicate", 1),
            "fsdp_cpu_offload": sharded.offload,
            "fsdp_mixed_precision": step.amp == "bf16",
        }
    if step.ep:
        options["ep_size"] = step.ep
    if isinstance(step, Training) and step.tp_plan:
        options["tp_plan"] = dict(step.tp_plan)
    return DistributedConfig(**options)
