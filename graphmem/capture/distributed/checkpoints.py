"""Checkpoints of sharded models, of which one process alone is here: what the others would have said of their parts.

``torch.distributed.checkpoint`` checks that the parts of all processes cover every tensor; here those of one do not.
FSDP1 gathers what each process's optimizer holds of a flat parameter: another one holds what lies in its part, with the
types and numbers of this one's states (``torch/distributed/fsdp/_optim_utils.py``, 2.13).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches

_PLANNER, _OPTIMIZERS = "torch.distributed.checkpoint.default_planner", "torch.distributed.fsdp._optim_utils"


def checkpoints_of_one() -> contextlib.AbstractContextManager[None]:
    """Sharded checkpoints find the other processes' parts, for the duration."""
    return patched_imports(_FOLLOWED)


def _follow_planner(patches: Patches, module: ModuleType) -> None:
    if hasattr(module, "_validate_global_plan"):  # it tells whether, or since 2.13 why not
        was_told_why = "list" in str(module._validate_global_plan.__annotations__.get("return"))
        patches.set(module, "_validate_global_plan", lambda *_: [] if was_told_why else True)

    planner = getattr(module, "DefaultSavePlanner", None)
    if hasattr(planner, "_dedup_save_plans"):
        patches.set(planner, "_dedup_save_plans", lambda self, plans: _all_here(plans))


def _all_here(plans: list[Any]) -> list[Any]:
    """Nothing is left to other processes, which were taken to plan what this one does."""
    return [plans[0], *(dataclasses.replace(plan, items=[]) for plan in plans[1:])]


def _follow_optimizers(patches: Patches, module: Any) -> None:
    known: list[Any] = []  # what is told of a state, of the first parameter that has one

    def mapped(*args: Any, **kwargs: object) -> Any:
        keys, of_keys = original_keys(*args, **kwargs)
        if not kwargs.get("merge_keys") or not keys:
            return keys, of_keys
        others = {
            module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, info in args[4].items()
            if info.param_requires_grad[info.param_indices[name]]
        }
        return sorted({*keys, *others}), of_keys

    def gathered(fsdp_state: Any, states: dict[str, Any]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = original_gathered(fsdp_state, states)
        mine = told[fsdp_state.rank]
        known.extend(state for state in mine.values() if state.tensors)
        if not known:
            return told
        return [mine if rank == fsdp_state.rank else _told_by(fsdp_state, rank, mine, known[0], module)
                for rank in range(len(told))]  # fmt: skip

    if not hasattr(module, "_map_param_key_to_optim_keys") or not hasattr(module, "_allgather_state_info"):
        return
    original_keys, original_gathered = module._map_param_key_to_optim_keys, module._allgather_state_info
    patches.set(module, "_map_param_key_to_optim_keys", mapped)
    patches.set(module, "_allgather_state_info", gathered)


def _told_by(fsdp_state: Any, rank: int, mine: dict[str, Any], like: Any, module: Any) -> dict[str, Any]:
    """What the process of a rank says of the states of a flat parameter."""
    handle = fsdp_state._handle
    size = handle.flat_param._sharded_size.numel()
    parts = dict(
        zip(handle.flat_param._fqns, handle._get_shard_metadata(rank * size, (rank + 1) * size - 1), strict=True)
    )
    told = {}
    for name in mine:
        if name not in parts or not parts[name].in_shard:
            told[name] = module.StateInfo({}, {}, {})
            continue
        shape = torch.Size([parts[name].numel_in_shard])
        tensors = {state: info._replace(shape=shape) for state, info in like.tensors.items()}
        told[name] = module.StateInfo(tensors, like.scalar_tensors, like.non_tensors)
    return told


_FOLLOWED: dict[str, Callable[[Patches, Any], None]] = {
    _PLANNER: _follow_planner,
    _OPTIMIZERS: _follow_optimizers,
}
