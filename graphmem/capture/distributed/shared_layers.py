"""Layers shared over one dimension of a mesh: tensor parallelism that is combined with pipelines, sequences that are
shared, or PyTorch's sequence parallelism.

The order is torchtitan's: a model, or a stage of one, without memory; its layers shared; then sharded by FSDP2; then
memory for the part of this process (``parallelize_hf_transformers`` and ``init_weights`` there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.distributed.strategy import Strategy
from graphmem.errors import CaptureError
from graphmem.training import Training

#: The rules by which activations between the layers can be shared out: those of llama and its kin, which shard
#: attention and feed-forward layer between their norms.
_OF_LLAMA = {
    "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip


class SharedLayers(Strategy):
    """``--tp`` over a dimension of the mesh, ``--sp``: every process has a part of each layer."""

    moves = True

    def inputs(self, inputs: object) -> Any:
        if not self.step.sp or self.step.cp is not None:
            return inputs
        return _with_positions(inputs, self.step.tp or 1, self.step.pp is not None)

    def prepare(self, model: nn.Module) -> None:
        self._prefix = f"{getattr(model, 'base_model_prefix', '')}."
        if self.step.sp:
            _check_for_styles(model)
        self._plan: Mapping[str, str] = {} if self.step.sp else _plan_of(model, self.step)

    def share(self, part: nn.Module) -> nn.Module:
        """Move the part to the meta device and divide its layers over the mesh's ``tp`` dimension."""
        model = part if self.step.pp is None else part.model
        model.to("meta")
        if self.step.sp:
            _by_styles(model, self.mesh["tp"])
        else:
            _by_plan(model, self.mesh["tp"], self._plan, self._prefix)
        if self.step.pp is None:
            model.tie_weights(recompute_mapping=False)
        return part

    def materialize(self, part: nn.Module) -> None:
        offloads = self.step.fsdp is not None and self.step.fsdp.offload
        materialize(part, torch.device("cpu") if offloads else None)


def materialize(module: torch.nn.Module, parameters: torch.device | None = None) -> None:
    """Replace every parameter and buffer of a module, also one that had memory, by a new one without values, on the
    card; parameters on the device ``parameters`` if given. A tensor that several names share stays shared."""
    made: dict[int, torch.Tensor] = {}

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            device = parameters if parameters is not None and isinstance(tensor, nn.Parameter) else cards().own
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    module._apply(with_memory)


# --- by transformers' own rules ---------------------------------------------------------------------------------------


def _plan_of(model: object, training: Training) -> Mapping[str, str]:
    """transformers' rules by the names of modules and parameters, those of ``training.tp_plan`` among them
    (``DistributedMixin._resolve_parallel_plans``, transformers/distributed/mixin.py of 5.23)."""
    resolve = getattr(model, "_resolve_parallel_plans", None)
    if resolve is None:
        raise CaptureError(
            f"{type(model).__name__} has no plan for --tp: it is of transformers' models, of a version that has "
            "DistributedConfig; parallelize others in a program of your own (graphmem run)"
        )
    from transformers.distributed import DistributedConfig

    own = dict(training.tp_plan) or None
    try:
        plan: Mapping[str, str] = resolve(DistributedConfig(tp_size=training.tp, tp_plan=own))[0]
    except (ValueError, NotImplementedError) as error:
        raise CaptureError(f"{type(model).__name__} cannot be distributed so: {error}") from None
    return plan


def _by_plan(part: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str], prefix: str) -> None:
    """The rules for the modules of ``part``; a stage without the head is the base model, whose names have no prefix."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    owned = {name for name, module in part.named_modules() if not isinstance(module, nn.Identity)}
    owned |= {name for name, _ in part.named_parameters()}
    is_base = not any(name.startswith(prefix) for name in owned)
    named = {name.removeprefix(prefix) if is_base else name: style for name, style in plan.items()}
    try:
        apply_tensor_parallelism(part, mesh, {name: style for name, style in named.items() if name in owned})
    except (ValueError, NotImplementedError) as error:
        raise CaptureError(f"{type(part).__name__} cannot be distributed so: {error}") from None


# --- by PyTorch's styles ----------------------------------------------------------------------------------------------


def _check_for_styles(model: torch.nn.Module) -> None:
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if plan != _OF_LLAMA or not hasattr(model, "lm_head") or model.config.tie_word_embeddings:
        raise CaptureError(
            f"--sp is of models that are sharded as llama is, with a head of their own, and {type(model).__name__} is "
            "not; parallelize it in a program of your own (graphmem run)"
        )


def _by_styles(part: torch.nn.Module, mesh: DeviceMesh) -> None:
    """By PyTorch's styles, as torchtitan parallelizes a transformers model (its ``apply_non_moe_tp``): norms run on a
    part of the sequence, attention and feed-forward layer gather it and scatter their sums. transformers' own plans do
    not (``enable_sequence_parallel`` is not wired up in 5.23). A stage has some of it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    shared, whole = Shard(1), Replicate()
    base = getattr(part, part.base_model_prefix, part)
    if isinstance(base.embed_tokens, nn.Embedding):
        parallelize_module(base.embed_tokens, mesh, RowwiseParallel(input_layouts=whole, output_layouts=shared))
    if not isinstance(base.norm, nn.Identity):
        parallelize_module(base.norm, mesh, SequenceParallel())
    if base is not part:
        parallelize_module(part.lm_head, mesh, ColwiseParallel(input_layouts=shared, output_layouts=whole))
    rules: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": shared}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(shared,), desired_input_layouts=(whole,)),
    }
    for rule, style in _OF_LLAMA.items():
        kind = ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=shared)
        rules[rule.removeprefix("layers.*.")] = kind
    for layer in base.layers:
        if not isinstance(layer, nn.Identity):
            parallelize_module(layer, mesh, rules)


def _with_positions(inputs: object, processes: int, by_row: bool) -> dict[str, Any]:
    """The batch with the positions that a part of a sequence lacks, ``by_row`` where rows are parted too. Raises
    :class:`CaptureError`."""
    if not isinstance(inputs, dict) or "input_ids" not in inputs or "attention_mask" in inputs:
        raise CaptureError("--sp is of models of transformers on input_ids, with no attention_mask; write a program")
    rows, length = inputs["input_ids"].shape
    if length % processes:
        raise CaptureError(
            f"the sequence of {length} cannot be cut into {processes} equal parts; give another --seq-len"
        )
    return {**inputs, "position_ids": torch.arange(length).repeat(rows if by_row else 1, 1)}
