"""AOTAutograd's own tensors, with the pretended device's two faces.

While AOTAutograd traces, tensors are wrapped in ``FunctionalTensor``, whose C++ device and dispatch keys come from the
fake tensor inside, that is from ``meta``. Composite operators and autocast would then take that device's entries. As
with fake tensors (:mod:`graphmem.capture.device.fake_tensors`) the C++ device stays ``meta``, for autograd, and the
dispatch keys become CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from graphmem.capture.device.pretend_device import DEVICE, cards
from graphmem.capture.patches import Patches, around
from graphmem.capture.torch_internals import FakeTensor, TorchDispatchMode
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"
FunctionalTensor: Any = private("torch._subclasses.functional_tensor.FunctionalTensor", _LOST)
FunctionalTensorMode: Any = private("torch._subclasses.functional_tensor.FunctionalTensorMode", _LOST)

_is_functional: Any = private("torch._is_functional_tensor", _LOST)
_from_functional: Any = private("torch._from_functional_tensor", _LOST)


def patch_functional_tensors(patches: Patches) -> None:
    """Give ``FunctionalTensor`` CUDA's dispatch keys, and to Python the device of the tensor inside."""
    device = torch.Tensor.device.__get__
    attributes = {
        "__new__": staticmethod(around(_new)(FunctionalTensor.__new__)),
        "device": property(lambda self: cards().own if _is_inside_on_device(self.elem) else device(self)),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
    }
    patches.table(FunctionalTensor, attributes)
    for mode in (FunctionalTensorMode, ProxyTorchDispatchMode):
        patches.around(mode, {"__torch_dispatch__": _name_device})


def _new(
    original: Callable[..., torch.Tensor], cls: type, elem: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    wrapper = original(cls, elem, *args, **kwargs)
    if not _is_inside_on_device(elem) or not _is_plain(elem):
        return wrapper
    tensor = private("torch.Tensor._make_subclass", _LOST)(
        cls, _same_shape(elem), elem.requires_grad, dispatch_device=False, device_for_backend_keys=DEVICE
    )
    private("torch._C._set_throw_on_mutable_data_ptr", _LOST)(tensor)
    tensor.__dict__.update(wrapper.__dict__)
    return tensor


def _name_device(
    original: Callable[..., object], self: TorchDispatchMode, func: object, types: object,
    args: tuple[object, ...] = (), kwargs: dict[str, Any] | None = None,
) -> object:  # fmt: skip
    """C++ composites pass on the device they see; graphs should name the one that Python sees."""
    if kwargs and isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "meta":
        kwargs = {**kwargs, "device": cards().own}
    return original(self, func, types, args, kwargs)


def _is_inside_on_device(elem: torch.Tensor) -> bool:
    inside: Any = elem
    while _is_functional(inside):
        inside = _from_functional(inside)
    return isinstance(inside, FakeTensor) and inside.fake_device.type == "cuda"


def _is_plain(elem: torch.Tensor) -> bool:
    """Strided, of known sizes, and no lazy view of numbers."""
    numbers = (*elem.shape, *elem.stride(), elem.storage_offset()) if elem.layout is torch.strided else (None,)
    return all(type(number) is int for number in numbers) and not elem.is_conj() and not elem.is_neg()


def _same_shape(elem: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the sizes, strides and offset of ``elem``."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(elem.shape, elem.stride(), strict=True))
    with private("torch._C._DisableTorchDispatch", _LOST)():
        storage = torch.empty(elem.storage_offset() + max(span, 0), dtype=elem.dtype, device="meta")
        return storage.as_strided(elem.shape, elem.stride(), elem.storage_offset())
