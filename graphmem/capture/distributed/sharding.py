"""Sharded parameters (FSDP2, DTensor): storages that are resized, and tensors around others."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from graphmem.capture.patches import Patches
from graphmem.capture.ports import RankBook, StorageBook


def patch_resize(patches: Patches, storages: StorageBook) -> None:
    """Sharded and low-precision parameters come and go by resizing their storage, which is no operator."""
    original = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        resized = original(self, size)
        storages.resized(self)
        return resized

    patches.set(torch.UntypedStorage, "resize_", resize)


def patch_sharding(patches: Patches, book: RankBook) -> None:
    """A DTensor shows Python the device of its local part, as device tensors do everywhere in a capture."""
    with Patches.lifted(), _disable_current_modes():  # functional optimizers are scripted when they are imported
        importlib.import_module("torch.distributed.optim")
        tensors = importlib.import_module("torch.distributed.tensor")
        importlib.import_module("torch.distributed.fsdp")
        with contextlib.suppress(ImportError):  # before 2.6 it was elsewhere
            groups = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
            patches.set(groups.FSDPParamGroup, "_validate_no_meta_params", lambda self: None)
    propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    propagate = getattr(propagator, "_propagate_tensor_meta_non_cached", None)  # since 2.5

    def without_record(*args: Any, **kwargs: Any) -> Any:
        with book.paused():
            return propagate(*args, **kwargs)  # type: ignore[misc]

    if propagate is not None:
        patches.set(propagator, "_propagate_tensor_meta_non_cached", without_record)
    book.wrappers.add(tensors.DTensor)
    patches.set(tensors.DTensor, "device", property(lambda self: self._local_tensor.device))
    patches.set(tensors.DTensor, "is_cuda", property(lambda self: self._local_tensor.is_cuda))
    patches.set(tensors.DTensor, "is_meta", property(lambda self: False))
