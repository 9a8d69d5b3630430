"""Tensor and expert parallelism of a transformers model, by its own plan and transformers' own code."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.distributed.mesh import process_mesh
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training


def tensor_parallel(model: nn.Module, step: Training | Inference) -> nn.Module:
    """This process's part of ``model``, on the card: distributed while it has no memory, as ``from_pretrained`` does it
    (``prepare_distribute_model`` and ``maybe_distribute_model``, transformers/distributed/mixin.py of 5.23), whose
    checkpoint's parts are then read one by one. Raises :class:`CaptureError`."""
    if isinstance(step, Training) and step.sp:
        return _sequence_parallel(model, process_mesh(step)).to_empty(device=cards().own)
    prepare = getattr(type(model), "prepare_distribute_model", None)
    if prepare is None:
        raise CaptureError(
            f"{type(model).__name__} has no plan for --tp or --ep: they are of transformers' models, of a version that "
            "has DistributedConfig; parallelize others in a program of your own"
        )
    try:
        config, _, meshes = prepare(_configuration(step))
        model = type(model).maybe_distribute_model(_untied(model.to("meta")), config, meshes)
    except (ValueError, NotImplementedError) as error:
        raise CaptureError(f"{type(model).__name__} cannot be distributed so: {error}") from None
    return _on_card_and_tied(model)


def _untied(model: Any) -> Any:
    """The model with a weight of its own for each that is tied to another: ``from_pretrained`` builds it so
    (``no_tie_weights``, transformers/initialization.py of 5.23), and the rules of both modules are applied."""
    for name in model.all_tied_weights_keys:
        module, _, weight = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(
            model.get_submodule(module), weight, nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        )
    return model


def _on_card_and_tied(model: Any) -> Any:
    """The part of the model with memory, tied as it is when its weights are loaded (``_finalize_model_loading``,
    transformers/modeling_utils.py of 5.23): a tied weight is the other's part, and none of its own is ever made."""
    model.tie_weights(recompute_mapping=False)
    made: dict[int, torch.Tensor] = {}

    def on_card(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=cards().own)
        return made[id(tensor)]

    model._apply(on_card)
    model.tie_weights(recompute_mapping=False)  # parameters that are not shared out were replaced one by one
    return model


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
    if isinstance(step, Training) and step.tp_plan:
        options["tp_plan"] = dict(step.tp_plan)
    return DistributedConfig(**options)


#: The rules by which activations between the layers can be shared out: those of llama and its kin, which shard
#: attention and feed-forward layer between their norms.
_OF_LLAMA = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip


def _sequence_parallel(model: Any, mesh: Any) -> Any:
    """The model by PyTorch's styles, without memory, as torchtitan parallelizes a transformers model (its
    ``apply_non_moe_tp``): norms run on a part of the sequence, attention and feed-forward layer gather it and scatter
    what they sum. transformers' own plans do not (``enable_sequence_parallel`` is not wired up in 5.23)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if plan != _OF_LLAMA or not hasattr(model, "lm_head") or model.config.tie_word_embeddings:
        raise CaptureError(
            f"--sp is of models that are sharded as llama is, with a head of their own, and {type(model).__name__} is "
            "not; parallelize it in a program of your own (graphmem run)"
        )
    part, whole = Shard(1), Replicate()
    parallelize_module(
        model.to("meta"),
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
        },
    )
    rules: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,)),
    }
    for rule, style in _OF_LLAMA.items():
        kind = ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=part)
        rules[rule.removeprefix("layers.*.")] = kind
    for layer in model.model.layers:
        parallelize_module(layer, mesh, rules)
    return model


def with_positions(inputs: Any, processes: int) -> dict[str, Any]:
    """The batch with the positions that a part of a sequence cannot tell. Raises :class:`CaptureError`."""
    if not isinstance(inputs, dict) or "input_ids" not in inputs or "attention_mask" in inputs:
        raise CaptureError("--sp is of models of transformers on input_ids, with no attention_mask; write a program")
    length = inputs["input_ids"].shape[1]
    if length % processes:
        raise CaptureError(
            f"the sequence of {length} cannot be cut into {processes} equal parts; give another --seq-len"
        )
    return {**inputs, "position_ids": torch.arange(length).unsqueeze(0)}
