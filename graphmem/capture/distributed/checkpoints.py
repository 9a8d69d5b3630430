"""Checkpoints of sharded models, of which one process alone is here: the messages of the others about their parts.

``torch.distributed.checkpoint`` checks that the parts of all processes cover every tensor; here those of one do not.
FSDP1 gathers each process's optimizer states of a flat parameter: another one holds those of its part, with the types
and numbers of this one's states (``torch/distributed/fsdp/_optim_utils.py``, 2.13).
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

#: What FSDP1 gathers of a process: by parameter, the state of its optimizer.
_States = dict[str, Any]


def checkpoints_of_one() -> contextlib.AbstractContextManager[None]:
    """Sharded checkpoints find the other processes' parts, for the duration."""
    return patched_imports(_FOLLOWED)


def _follow_planner(patches: Patches, module: ModuleType) -> None:
    if hasattr(module, "_validate_global_plan"):  # it returns whether, or since 2.13 why not
        gives_reasons = "list" in str(module._validate_global_plan.__annotations__.get("return"))
        patches.set(module, "_validate_global_plan", lambda *_: [] if gives_reasons else True)
    planner = getattr(module, "DefaultSavePlanner", None)

    def all_here(_: object, plans: list[Any]) -> list[Any]:
        """Nothing is left to other processes, which are assumed to plan as this one does."""
        return [plans[0], *(dataclasses.replace(plan, items=[]) for plan in plans[1:])]

    patches.where_found([planner], {"_dedup_save_plans": all_here})


def _follow_optimizers(patches: Patches, module: ModuleType) -> None:
    known: list[Any] = []  # what is known of a state, of the first parameter that has one

    def mapped(original: Callable[..., Any], *args: Any, **kwargs: object) -> object:
        keys, of_keys = original(*args, **kwargs)
        if not kwargs.get("merge_keys") or not keys:
            return keys, of_keys
        others = {
            module._OptimStateKey(unflat_param_names=(name,), is_fsdp_managed=True)
            for name, info in args[4].items()
            if info.param_requires_grad[info.param_indices[name]]
        }
        return sorted({*keys, *others}), of_keys

    def gathered(original: Callable[..., list[_States]], fsdp_state: Any, states: _States) -> list[_States]:
        of_ranks = original(fsdp_state, states)
        mine = of_ranks[fsdp_state.rank]
        known.extend(state for state in mine.values() if state.tensors)
        if not known:
            return of_ranks
        return [mine if rank == fsdp_state.rank else _states_of(fsdp_state, rank, mine, known[0], module)
                for rank in range(len(of_ranks))]  # fmt: skip

    if hasattr(module, "_map_param_key_to_optim_keys") and hasattr(module, "_allgather_state_info"):
        patches.around(module, {"_map_param_key_to_optim_keys": mapped, "_allgather_state_info": gathered})


def _states_of(fsdp_state: Any, rank: int, mine: _States, like: Any, module: Any) -> _States:
    """The states of a flat parameter that the process of a rank holds."""
    handle = fsdp_state._handle
    size = handle.flat_param._sharded_size.numel()
    shards = handle._get_shard_metadata(rank * size, (rank + 1) * size - 1)
    parts = dict(zip(handle.flat_param._fqns, shards, strict=True))
    states: _States = {}
    for name in mine:
        if name not in parts or not parts[name].in_shard:
            states[name] = module.StateInfo({}, {}, {})
            continue
        shape = torch.Size([parts[name].numel_in_shard])
        tensors = {state: info._replace(shape=shape) for state, info in like.tensors.items()}
        states[name] = module.StateInfo(tensors, like.scalar_tensors, like.non_tensors)
    return states


#: By the full names of the modules.
_FOLLOWED: dict[str, Callable[[Patches, ModuleType], None]] = {
    "torch.distributed.checkpoint.default_planner": _follow_planner,
    "torch.distributed.fsdp._optim_utils": _follow_optimizers,
}
