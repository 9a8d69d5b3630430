"""Sharded parameters (FSDP2, DTensor): storages that are resized, and tensors around others."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from graphmem.capture.device.pretend_device import DEVICE
from graphmem.capture.distributed.fully_sharded import name_buffers
from graphmem.capture.distributed.tensor_lists import patch_tensor_lists
from graphmem.capture.patches import Patches, around, constant
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.record.storages import Storages
from graphmem.capture.torch_internals import FakeTensor, disable_current_modes, make_subclass
from graphmem.torch_names import private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LOST = "sharded models and process groups cannot be followed"


def patch_resize(patches: Patches, storages: Storages) -> None:
    """Sharded and low-precision parameters come and go by resizing their storage, which is no operator."""

    def resize(original: Callable[..., object], self: torch.UntypedStorage, size: int) -> object:
        resized = original(self, size)
        storages.resized(self)
        return resized

    patches.around(torch.UntypedStorage, {"resize_": resize})


def patch_sharding(patches: Patches, book: Recorder) -> None:
    """A DTensor shows Python the device of its local part, as device tensors do everywhere in a capture."""
    with Patches.lifted(), disable_current_modes():  # functional optimizers are scripted when they are imported
        importlib.import_module("torch.distributed.optim")
        tensors = importlib.import_module("torch.distributed.tensor")
        importlib.import_module("torch.distributed.fsdp")
        with contextlib.suppress(ImportError):  # before 2.6 it was elsewhere
            groups = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
            patches.set(groups.FSDPParamGroup, "_validate_no_meta_params", constant(None))
            name_buffers(patches, book.storages)
    propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator

    def without_record(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        with book.paused():
            return original(*args, **kwargs)

    patches.around(propagator, {"_propagate_tensor_meta_non_cached": without_record})  # since 2.5
    patch_tensor_lists(patches)
    book.wrappers.add(tensors.DTensor)
    book.unwrapped_in_cpp.add(tensors.DTensor)  # dispatchDTensorOp (torch/csrc/autograd/python_variable.cpp)
    attributes = {
        "__new__": staticmethod(around(_new_dtensor)(tensors.DTensor.__new__)),
        "device": property(_device_of_part),
        "is_cuda": property(lambda self: self._local_tensor.is_cuda),
        "is_meta": property(lambda self: self._local_tensor.is_meta),
    }
    patches.table(tensors.DTensor, attributes)
    dispatch = importlib.import_module("torch.distributed.tensor._dispatch")
    # Since 2.12: it moves the generator's offset around the operator.
    patches.where_found([dispatch], {"run_dtensor_rng_op": lambda start, end, op, *args, **kwargs: op(*args, **kwargs)})


def forget_meshes() -> None:
    """Empty DTensor's caches of operators. Their keys have meshes, and another mesh of the same shape is equal: the
    groups of a former capture would be looked for (``ShardingPropagator``, and its cache in C++ since 2.10)."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return
    clear_native = private("torch._C._clear_DTensor_sharding_propagator_cache", _LOST, None, since=(2, 10))
    clear = getattr(tensors.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear", None)
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    clear_plans = getattr(getattr(redistribute, "_gen_transform_infos", None), "cache_clear", None)
    for forget in (clear_native, clear, clear_plans):
        if forget is not None:
            forget()


def _device_of_part(tensor: DTensor) -> torch.device:
    part = tensor._local_tensor
    return torch.device("meta") if part.is_meta else part.device


def _new_dtensor(
    original: Callable[..., DTensor], cls: type, local_tensor: torch.Tensor, spec: Any, *, requires_grad: bool
) -> DTensor:
    """``DTensor(local, spec, requires_grad=...)`` with the dispatch keys of its device, as ``Tensor._dtensor__new__``
    gives them (torch/csrc/autograd/python_variable.cpp, 2.13): of ``meta``, which C++ finds there, they would have
    norms and attention decomposed, and no autocast."""
    if not isinstance(local_tensor, FakeTensor) or not local_tensor.is_cuda:
        return original(cls, local_tensor, spec, requires_grad=requires_grad)
    like = spec.tensor_meta
    with disable_current_modes():
        shown = torch.empty_strided(like.shape, like.stride, dtype=local_tensor.dtype, device="meta")
        made = make_subclass(cls, shown, requires_grad, device_for_backend_keys=DEVICE)
    made._spec, made._local_tensor = spec, local_tensor
    return made
