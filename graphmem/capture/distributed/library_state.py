"""Globals of libraries about process groups, which live as long as the process: here longer than a capture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

#: Modules, or classes in them, and their variables. None or nothing is in them before the first group is made.
_KEPT = {
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.utils.groups": (
        "_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP", "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "mesh_device", "mpu",
    ),
    "deepspeed.runtime.zero.partition_parameters.CUDAQuantizer": ("quantizer_cuda_module",),
    "deepspeed.runtime.comm.coalesced_collectives": ("quantizer_module",),
    "torch.nn.functional": ("linear",),  # DeepSpeed's ZeRO-3 puts its own there
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    "accelerate.state.PartialState": ("_shared_state",),
    "accelerate.state.AcceleratorState": ("_shared_state",),
    "accelerate.state.GradientState": ("_shared_state",),
}  # fmt: skip


@contextlib.contextmanager
def library_state_put_back() -> Iterator[None]:
    """A context after which libraries have their former state; those imported meanwhile have none."""
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in _now()}
    try:
        yield
    finally:
        for (path, name), value in _now():
            found = before.get((path, name))
            if isinstance(value, dict):
                value.clear()
                value.update(found or {})
            else:
                setattr(_owner(path), name, found)


def _now() -> list[tuple[tuple[str, str], Any]]:
    places = ((path, name) for path, names in _KEPT.items() for name in names if hasattr(_owner(path), name))
    return [((path, name), getattr(_owner(path), name)) for path, name in places]


def _owner(path: str) -> Any:
    """A module, or a class of one, if it has been imported."""
    module, _, last = path.rpartition(".")
    return sys.modules.get(path) or getattr(sys.modules.get(module), last, None)
