"""The sharding of a model by its framework, from the framework's own objects: read once, at the model's first call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphmem.base.textbook import Sharded, Transformer
from graphmem.capture.values.tensors import HALF_TYPES, tensors_in


def sharded(model: torch.nn.Module, inputs: object) -> Sharded | None:
    """The model, which was called with ``inputs``; None where it has no parameters or its wrapper is not known."""
    for read in (_of_deepspeed, _of_fsdp1, _of_tensors):
        found = read(model, inputs)
        if found is not None:
            return found if found.parameters else None
    return None


def _of_deepspeed(model: torch.nn.Module, inputs: object) -> Sharded | None:
    if not type(model).__module__.startswith("deepspeed.") or not hasattr(model, "zero_optimization_stage"):
        return None
    stage, parameters = int(model.zero_optimization_stage()), list(model.parameters())
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    is_mixed = bool(model.bfloat16_enabled() or model.fp16_enabled())
    options = {
        "reduce_bucket_size": model.zero_reduce_bucket_size(),
        "allgather_bucket_size": model.zero_allgather_bucket_size(),
    }
    buckets = tuple((name, int(size)) for name, size in options.items() if size)
    ranks, weight = int(model.dp_world_size), 2 if is_mixed else 4
    return Sharded(
        f"DeepSpeed ZeRO-{stage}", count, ranks, stage, weight, is_mixed, _transformer(model, inputs), buckets
    )


def _of_fsdp1(model: torch.nn.Module, inputs: object) -> Sharded | None:
    module = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if module is None or not isinstance(model, module.FullyShardedDataParallel):
        return None
    handles: list[Any] = [
        state._handle for state in module.FullyShardedDataParallel.fsdp_modules(model) if state._handle is not None
    ]
    count = sum(handle.flat_param._unpadded_unsharded_size.numel() for handle in handles)
    strategy = handles[0]._sharding_strategy.name if handles else "NO_SHARD"
    stage = {"FULL_SHARD": 3, "HYBRID_SHARD": 3, "NO_SHARD": 0}.get(strategy, 2)
    weight = handles[0]._orig_param_dtype.itemsize if handles else 4
    ranks = handles[0].world_size if handles else 1
    return Sharded(f"FSDP1 {strategy}", count, ranks, stage, weight, False, _transformer(model, inputs))


def _of_tensors(model: torch.nn.Module, inputs: object) -> Sharded | None:
    """DTensors know of how many parts they are one; a model of others is whole."""
    parameters = list(model.parameters())
    if not parameters:
        return None
    parts = [_parts(parameter) for parameter in parameters]
    ranks = max(parts)
    count = sum(parameter.numel() for parameter in parameters)
    weight = max(parameter.itemsize for parameter in parameters)
    is_replica = type(model) is torch.nn.parallel.DistributedDataParallel
    name = (
        "DTensor shards (FSDP2, tensor parallelism)" if ranks > 1 else "DDP" if is_replica else "this process's model"
    )
    return Sharded(name, count, ranks, 3 if ranks > 1 else 0, weight, False, _transformer(model, inputs))


def _parts(parameter: torch.Tensor) -> int:
    mesh, parts = getattr(parameter, "device_mesh", None), 1
    if mesh is None:
        return 1
    for dimension, placement in enumerate(parameter.placements):
        parts *= mesh.size(dimension) if placement.is_shard() else 1
    return int(parts)


# --- the transformer in it --------------------------------------------------------------------------------------------

#: Names of the same thing in configurations of transformers.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
}


def _transformer(model: torch.nn.Module, inputs: object) -> Transformer | None:
    """The sizes of a transformers model for the formula of activations in bytes; None for other models."""
    config = next(configurations(model), None)
    tokens = next((tensor for tensor in tensors_in(inputs) if _is_tokens(tensor)), None)
    if config is None or tokens is None:
        return None
    found = {name: first(config, spellings) for name, spellings in NAMES.items()}
    if not all(type(value) is int and value > 0 for value in found.values()):
        return None
    runs_in_half = any(parameter.dtype in HALF_TYPES for parameter in model.parameters()) or torch.is_autocast_enabled()
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    is_fused = getattr(config, "_attn_implementation", "eager") != "eager" and runs_in_half
    batch, seq_len = tokens.shape
    return Transformer(**found, batch=batch, seq_len=seq_len, fused_attention=is_fused, recomputes=recomputes)


def configurations(model: torch.nn.Module) -> Iterator[Any]:
    """The configurations of transformers' models in ``model``, the outermost first."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None and first(config, NAMES["hidden"]) is not None:
            yield config


def first(config: object, names: Iterable[str]) -> Any:
    """The first of these names that the configuration has; None for none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int64, torch.int32)


def outermost_blocks(module: nn.Module) -> list[nn.Module]:
    """Every element of the outermost lists of blocks (``nn.ModuleList``, ``nn.Sequential``)."""
    blocks: list[nn.Module] = []
    for child in module.children():
        repeated = isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
        if repeated and all(len(list(element.children())) > 0 for element in child.children()):
            blocks.extend(child.children())
        else:
            blocks.extend(outermost_blocks(child))
    return blocks


def unsplit_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that a transformers model names as not to be split (``_no_split_modules``), which Accelerate and
    ``Trainer`` shard one by one; the outermost blocks of any other model."""
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or outermost_blocks(model)
