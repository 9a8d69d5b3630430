"""What ``torch.optim``, ``torch.amp``, checkpointing and ``nn.DataParallel`` ask of a device, told of the pretended."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphmem.capture.device.pretend_device import DEVICE, cards, move
from graphmem.capture.patches import Patches
from graphmem.errors import CaptureError


def patch_training_tools(patches: Patches) -> None:
    """Let them take fake tensors, until ``patches`` are undone."""
    _patch_foreach(patches)
    _patch_amp(patches)
    _patch_checkpointing(patches)
    _patch_data_parallel(patches)


def _patch_foreach(patches: Patches) -> None:
    """Let the multi-tensor paths, CUDA's default, take fake tensors, and name their device by its Python name."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {
            (cards().own if device is not None and device.type == "meta" else device, dtype): value
            for (device, dtype), value in group(*args, **kwargs).items()
        }

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)
    optimizer = sys.modules["torch.optim.optimizer"]
    supported = [*optimizer._foreach_supported_types, FakeTensor]
    patches.set(optimizer, "_foreach_supported_types", supported)
    foreach_utils = sys.modules["torch.utils._foreach_utils"]
    on_device = foreach_utils._device_has_foreach_support

    def has_support(tensors: Any, device: torch.device) -> bool:
        del tensors
        return bool(on_device(device))

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and "_has_foreach_support" in vars(module):
            patches.set(module, "_has_foreach_support", has_support)


def _patch_amp(patches: Patches) -> None:
    """A gradient scaler decides on data whether to step; the usual outcome, no overflow, is assumed."""

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        del self, state
        return optimizer.step(*args, **kwargs)

    patches.set(torch.amp.GradScaler, "_maybe_opt_step", step)
    patches.set(torch.amp.GradScaler, "get_scale", lambda self: self._init_scale)


def _patch_checkpointing(patches: Patches) -> None:
    """It puts the generators of a device back that was in use before: the pretended one always is."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    device_module = module._get_device_module

    def in_use(device: str = DEVICE.type) -> Any:
        found = device_module(device)
        return _InUse() if found is torch.cuda else found

    patches.set(module, "_get_device_module", in_use)


class _InUse:
    """``torch.cuda``, of which PyTorch's own flag says that a device is in use."""

    _initialized = True

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _patch_data_parallel(patches: Patches) -> None:
    """``nn.DataParallel`` over one card calls its module; over several it cannot be followed, and says so."""
    construct = torch.nn.DataParallel.__init__

    def init(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_ids is not None and len(device_ids) > 1:
            raise CaptureError(
                "nn.DataParallel over several cards cannot be analysed; analyse the module itself with one card's "
                "share of the batch (the first card also holds the gathered outputs), or use DistributedDataParallel"
            )
        construct(self, module, device_ids, *args, **kwargs)

    patches.set(torch.nn.DataParallel, "__init__", init)
    patches.set(torch.nn.DataParallel, "scatter", lambda _, inputs, options, __: ([move(inputs)], [move(options)]))
