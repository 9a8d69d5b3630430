"""What ``torch.optim``, ``torch.amp``, checkpointing and ``nn.DataParallel`` ask of a device, told of the pretended."""

from __future__ import annotations

import sys
from typing import Any

import torch

from graphmem.capture.device.pretend_device import DEVICE, cards, move
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor
from graphmem.errors import CaptureError
from graphmem.torch_names import private


def patch_training_tools(patches: Patches) -> None:
    """Let them take fake tensors, until ``patches`` are undone."""
    _patch_foreach(patches)
    _patch_amp(patches)
    _patch_checkpointing(patches)
    _patch_data_parallel(patches)


def _patch_foreach(patches: Patches) -> None:
    """Let the multi-tensor paths, CUDA's default, take fake tensors, and name their device by its Python name."""

    def grouped(group: Any) -> Any:
        def grouped_by_python_name(*args: object, **kwargs: object) -> Any:
            return {
                (cards().own if device is not None and device.type == "meta" else device, dtype): value
                for (device, dtype), value in group(*args, **kwargs).items()
            }

        return grouped_by_python_name

    lost = "optimizers may update parameters one by one, which takes less memory than CUDA's default"
    patches.wrap("torch._C._group_tensors_by_device_and_dtype", lost, grouped)
    patches.wrap("torch.optim.optimizer._foreach_supported_types", lost, lambda types: [*types, FakeTensor])
    on_device = private("torch.utils._foreach_utils._device_has_foreach_support", lost, lambda _: True)

    def has_support(tensors: object, device: torch.device) -> bool:
        del tensors
        return bool(on_device(device))

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and "_has_foreach_support" in vars(module):
            patches.set(module, "_has_foreach_support", has_support)


def _patch_amp(patches: Patches) -> None:
    """A gradient scaler decides on data whether to step; the usual outcome, no overflow, is assumed."""

    def step(self: Any, optimizer: torch.optim.Optimizer, state: object, *args: object, **kwargs: object) -> object:
        del self, state
        return optimizer.step(*args, **kwargs)

    lost = "a gradient scaler asks values whether to step"
    patches.replace("torch.amp.grad_scaler.GradScaler._maybe_opt_step", lost, step)
    patches.set(torch.amp.GradScaler, "get_scale", lambda self: self._init_scale)


def _patch_checkpointing(patches: Patches) -> None:
    """It puts the generators of a device back that was in use before: the pretended one always is."""

    def of_device(device_module: Any) -> Any:
        def in_use(device: str = DEVICE.type) -> Any:
            found = device_module(device)
            return _InUse() if found is torch.cuda else found

        return in_use

    lost = "what checkpointing keeps of the device's generators is not counted"
    patches.wrap("torch.utils.checkpoint._get_device_module", lost, of_device)


class _InUse:
    """``torch.cuda``, of which PyTorch's own flag says that a device is in use."""

    _initialized = True

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


def _patch_data_parallel(patches: Patches) -> None:
    """``nn.DataParallel`` over one card calls its module; over several it cannot be followed, and says so."""
    construct = torch.nn.DataParallel.__init__

    def init(self: Any, module: object, device_ids: Any = None, *args: object, **kwargs: object) -> None:
        if device_ids is not None and len(device_ids) > 1:
            raise CaptureError(
                "nn.DataParallel over several cards cannot be analysed; analyse the module itself with one card's "
                "share of the batch (the first card also holds the gathered outputs), or use DistributedDataParallel"
            )
        construct(self, module, device_ids, *args, **kwargs)

    patches.set(torch.nn.DataParallel, "__init__", init)
    patches.set(torch.nn.DataParallel, "scatter", lambda _, inputs, options, __: ([move(inputs)], [move(options)]))
