"""``torch.optim``, ``torch.amp``, checkpointing and ``nn.DataParallel``, with the pretended device for an answer where
they ask about devices."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from graphmem.base import versions
from graphmem.capture.device.pretend_device import DEVICE, cards, move
from graphmem.capture.patches import Patches, around
from graphmem.capture.torch_internals import FakeTensor
from graphmem.errors import CaptureError
from graphmem.torch_names import private


def patch_training_tools(patches: Patches, torch_version: versions.Version) -> None:
    """Let them take fake tensors and do what they do in this version, until ``patches`` are undone."""
    if versions.SEVERAL_TENSORS_AT_ONCE.holds(torch_version):
        _patch_foreach(patches)
    if not versions.GRADIENTS_SET_TO_NONE.holds(torch_version):
        for kind in (torch.optim.Optimizer, torch.nn.Module):
            patches.around(kind, {"zero_grad": _filled_with_zeros})
    lost = "a gradient scaler asks values whether to step"
    patches.replace("torch.amp.grad_scaler.GradScaler._maybe_opt_step", lost, _step_without_overflow)
    patches.set(torch.amp.GradScaler, "get_scale", lambda self: self._init_scale)
    lost = "what checkpointing keeps of the device's generators is not counted"
    patches.wrap("torch.utils.checkpoint._get_device_module", lost, around(_module_in_use))
    patches.around(torch.nn.DataParallel, {"__init__": _over_one_card})
    patches.set(torch.nn.DataParallel, "scatter", lambda _, inputs, options, __: ([move(inputs)], [move(options)]))


def _filled_with_zeros(original: Callable[..., None], self: object, set_to_none: bool = False) -> None:
    """``zero_grad`` before it dropped gradients."""
    original(self, set_to_none=set_to_none)


_Groups = dict[tuple[torch.device | None, torch.dtype], object]


def _patch_foreach(patches: Patches) -> None:
    """Let the multi-tensor paths, CUDA's default, take fake tensors, and name their device by its Python name."""
    lost = "optimizers may update parameters one by one, which takes less memory than CUDA's default"
    patches.wrap("torch._C._group_tensors_by_device_and_dtype", lost, around(_grouped_by_python_name))
    types = private("torch.optim.optimizer._foreach_supported_types", lost, None)
    if types is not None:  # a list for every thread: compiled steps look at it
        patches.share(sys.modules["torch.optim.optimizer"], "_foreach_supported_types", [*types, FakeTensor])
    on_device = private("torch.utils._foreach_utils._device_has_foreach_support", lost, lambda _: True)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and "_has_foreach_support" in vars(module):
            patches.set(module, "_has_foreach_support", lambda _, device: bool(on_device(device)))


def _grouped_by_python_name(group: Callable[..., _Groups], *args: object, **kwargs: object) -> _Groups:
    return {
        (cards().own if device is not None and device.type == "meta" else device, dtype): value
        for (device, dtype), value in group(*args, **kwargs).items()
    }


def _step_without_overflow(
    _: object, optimizer: torch.optim.Optimizer, __: object, *args: object, **kwargs: object
) -> object:
    """A gradient scaler decides on data whether to step; the usual outcome, no overflow, is assumed."""
    return optimizer.step(*args, **kwargs)


def _module_in_use(device_module: Callable[[str], ModuleType], device: str = DEVICE.type) -> object:
    """Checkpointing puts the generators of a device back that was in use before: the pretended one always is."""
    found = device_module(device)
    return _InUse() if found is torch.cuda else found


class _InUse:
    """``torch.cuda``, whose flag for a device in use is set."""

    _initialized = True

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


def _over_one_card(
    original: Callable[..., None], self: torch.nn.DataParallel, module: torch.nn.Module,
    device_ids: Sequence[int] | None = None, *args: object, **kwargs: object,
) -> None:  # fmt: skip
    """``nn.DataParallel`` over one card calls its module; over several it cannot be followed."""
    if device_ids is not None and len(device_ids) > 1:
        raise CaptureError(
            "nn.DataParallel over several cards cannot be analysed; analyse the module itself with one card's "
            "share of the batch (the first card also holds the gathered outputs), or use DistributedDataParallel"
        )
    original(self, module, device_ids, *args, **kwargs)
