"""Functions that make tensors: from data, on a device given as a number, of old-fashioned types, with lazy shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from graphmem.capture.device.cuda_namespace import check_device
from graphmem.capture.device.pretend_device import cards, device_of
from graphmem.capture.patches import Patches, around
from graphmem.capture.torch_internals import DeviceContext, FakeTensor, disabled_torch_function, function_modes
from graphmem.capture.values.callers import called_by_operator
from graphmem.capture.values.tensors import NOWHERE
from graphmem.torch_names import private

#: Factories that convert data. They make a host tensor and copy it, as on a card; C++ would ask a driver to.
_FROM_DATA = ("tensor", "as_tensor", "asarray")
_META = torch.device("meta")
_Make = Callable[..., torch.Tensor]
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
#: Sparse tensors that are made of parts -> how many.
_OF_PARTS = {"sparse_coo_tensor": 2, "sparse_csr_tensor": 3, "sparse_csc_tensor": 3, "sparse_compressed_tensor": 3}


_modes_on: Any = private(
    "torch._C._len_torch_dispatch_stack", "who names the device meta is found out by the call stack alone", lambda: 1
)


def _constructors() -> list[Any]:
    names = (
        "empty full zeros ones eye arange linspace logspace rand randn randint randperm tensor as_tensor scalar_tensor"
    )
    return [getattr(torch, name) for name in (*names.split(), "empty_strided", "empty_permuted", "range", "asarray")]


def patch_factories(patches: Patches) -> None:
    """Make factories understand the pretended device; the tensors they make are fake because a mode is on."""
    known = private("torch.utils._device._device_constructors", "factories are known by a list of ours", _constructors)
    # PyTorch remembers those it finds: they must be its own.
    found: set[Any] = {*known(), *(getattr(torch, name) for name in _LIKE)}
    own = [name for name in (one.__name__ for one in found) if getattr(torch, name, None) in found]
    own = [name for name in own if name not in _OF_PARTS]
    patches.around(torch, dict.fromkeys(own, _with_numbered_device) | dict.fromkeys(_FROM_DATA, _host_then_copy))
    patches.around(torch, {name: _with_parts_there(count) for name, count in _OF_PARTS.items()})
    patches.set(torch.Tensor, "new_tensor", _new_tensor)
    lost = "devices named by a number, or as cuda, are not understood by torch.set_default_device and Tensor.to"
    patches.wrap("torch.utils._device.DeviceContext.__init__", lost, around(_begin_context))
    patches.set(torch, "get_default_device", _shown_default)
    patches.wrap("torch._C._nn._parse_to", lost, around(_parse_to))
    patches.replace("torch._shape_as_tensor", "a shape that becomes a tensor ends the run", _shape_as_tensor)
    _patch_old_types(patches)
    _patch_lazy(patches)


def device_named(device: object) -> torch.device | None:
    """The device of an argument: numbers are cards, and ``meta`` is nowhere, but for operators and meta kernels, which
    run with every mode off. Raises :class:`CaptureError` for a card other than the first."""
    if device is None or isinstance(device, bool):
        return device
    if device == "meta" or device == _META:  # first, and by name: PyTorch asks so in every operator
        return _META if not _modes_on() or called_by_operator() else NOWHERE
    if device == NOWHERE:
        return device
    check_device(device)
    return cards().own if isinstance(device, int) else device_of(device)


def _named_by_program(device: object) -> torch.device | None:
    """The device that a program names, where it is known to be the program."""
    device = device_named(device)
    return NOWHERE if device == _META else device


def _begin_context(original: Callable[..., None], self: DeviceContext, device: object) -> None:
    """``with torch.device("meta")``, and a default device of that kind: C++ is handed the kept device."""
    original(self, torch.device(device))
    self.device = _named_by_program(self.device)


def _shown_default() -> torch.device:
    """``torch.get_default_device``, which makes a tensor to know a card's number."""
    device = _default_device()
    if device == NOWHERE:
        return _META
    return cards().own if device.type == "cuda" else device


def _with_numbered_device(original: _Make, *args: object, **kwargs: object) -> torch.Tensor:
    """C++ takes a number for the accelerator that this build has, and there may be none."""
    if "device" in kwargs:
        kwargs["device"] = device_named(kwargs["device"])
    return original(*args, **kwargs)


def _with_parts_there(count: int) -> _Make:
    """A sparse tensor of ``count`` parts, each moved to the device that is named: the values, then their indices
    (``sparse_csr_tensor_ctor``, torch/csrc/utils/tensor_new.cpp)."""

    def make(original: _Make, *args: Any, device: object = None, **kwargs: Any) -> torch.Tensor:
        place = device_named(device)
        if place is None or len(args) < count:
            return _with_numbered_device(original, *args, **kwargs | ({} if device is None else {"device": device}))
        values = torch.as_tensor(args[count - 1], device=place, dtype=kwargs.pop("dtype", None))
        indices = [torch.as_tensor(part, device=place) for part in args[: count - 1]]
        return original(*indices, values, *args[count:], **kwargs)

    return make


def _host_then_copy(
    original: _Make, data: object, *args: object, device: object = None, requires_grad: bool = False,
    pin_memory: bool = False, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    if pin_memory:  # C++ reads the data into pinned memory, which a build without a card has none of
        made = _host_then_copy(original, data, *args, device=device, **kwargs).pin_memory()
        return made.requires_grad_() if requires_grad else made
    place = device_named(device)
    if place is None:
        place = data.device if isinstance(data, FakeTensor) else _default_device()
    is_read_back = isinstance(data, (list, tuple)) and any(isinstance(one, FakeTensor) for one in _elements(data))
    if is_read_back:
        data = _read_back(data, kwargs.get("dtype"))
    if place.type != "cuda" and place != NOWHERE and not is_read_back:
        extra = {"requires_grad": True} if requires_grad else {}
        return original(data, *args, device=place, **extra, **kwargs)
    made = data if isinstance(data, FakeTensor) else original(data, *args, device="cpu", **kwargs)
    made = made.to(cards().own if place.type == "cuda" else place, kwargs.get("dtype") or made.dtype)
    return made.requires_grad_() if requires_grad else made


def _elements(data: Any) -> Iterator[Any]:
    """The numbers and tensors in nested lists."""
    for one in data:
        yield from _elements(one) if isinstance(one, (list, tuple)) else (one,)


def _read_back(data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A host tensor of elements that are read one by one, some of them without values, on the card or the host
    (``internal_new_from_data``, torch/csrc/utils/tensor_new.cpp)."""
    kinds = [one.dtype if isinstance(one, torch.Tensor) else torch.tensor(one).dtype for one in _elements(data)]
    shape, inside = [], data
    while isinstance(inside, (list, tuple)):
        shape.append(len(inside))
        inside = inside[0]
    shape += inside.shape if isinstance(inside, torch.Tensor) else ()
    return torch.empty(shape, dtype=dtype or reduce(torch.promote_types, kinds))


def _default_device() -> torch.device:
    """The device of ``torch.set_default_device`` or of the innermost ``with torch.device(...)``."""
    for mode in reversed(function_modes()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


def _new_tensor(
    self: torch.Tensor, data: object, *, dtype: torch.dtype | None = None, device: object = None, **options: object
) -> torch.Tensor:
    """``Tensor.new_tensor``: the dtype and the device are this tensor's."""
    place = self.device if device is None else device
    return torch.tensor(data, dtype=dtype or self.dtype, device=place, **options)


def _shape_as_tensor(input: torch.Tensor) -> torch.Tensor:
    """Numbers of the host, which C++ would write into a tensor that holds none."""
    return torch.tensor(list(input.shape), dtype=torch.int64)


def _parse_to(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """The arguments of ``nn.Module.to``."""
    if args and (type(args[0]) is int or isinstance(args[0], (str, torch.device))):
        args = (_named_by_program(args[0]), *args[1:])
    elif args and isinstance(args[0], FakeTensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if "device" in kwargs:
        kwargs["device"] = _named_by_program(kwargs["device"])
    return original(*args, **kwargs)


# --- torch.cuda.FloatTensor and Tensor.type() -------------------------------------------------------------------------

_OLD_TYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool,
}  # fmt: skip


class _OldType(type):
    """``torch.cuda.FloatTensor(2, 3)``, ``torch.cuda.FloatTensor([1.0])``, and the type of ``isinstance``."""

    dtype: torch.dtype

    def __call__(cls, *args: object, **_: object) -> torch.Tensor:
        if args and all(isinstance(size, int) for size in args):
            return torch.empty(args, dtype=cls.dtype, device=cards().own)
        if args and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device=cards().own)
        return torch.tensor(args[0] if args else [], dtype=cls.dtype, device=cards().own)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def _patch_old_types(patches: Patches) -> None:
    kinds = {
        f"{name}Tensor": _OldType(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
        for name, dtype in _OLD_TYPES.items()
    }
    patches.table(torch.cuda, kinds)

    def named(kind: object) -> object:
        return kinds.get(kind.partition("torch.cuda.")[2], kind) if isinstance(kind, str) else kind

    def type_(
        original: Callable[..., torch.Tensor | str], self: torch.Tensor, dtype: type | torch.dtype | str | None = None,
        non_blocking: bool = False, **kwargs: object,
    ) -> torch.Tensor | str:  # fmt: skip
        on_card = isinstance(self, FakeTensor) and self.is_cuda
        if dtype is None:
            name = str(original(self))
            return name.replace("torch.meta.", "torch.cuda.") if on_card else name
        kind = named(dtype)
        if isinstance(kind, _OldType):
            return self.to(cards().own, kind.dtype, non_blocking=non_blocking)
        if on_card and isinstance(dtype, torch.dtype):
            return self.to(dtype, non_blocking=non_blocking)
        return original(self, dtype, non_blocking, **kwargs)

    def set_default_tensor_type(original: Callable[[object], None], kind: object) -> None:
        kind = named(kind)
        if isinstance(kind, _OldType):
            torch.set_default_dtype(kind.dtype)
            torch.set_default_device(cards().own)
        else:
            original(kind)

    patches.around(torch.Tensor, {"type": type_})
    patches.around(torch, {"set_default_tensor_type": set_default_tensor_type})


# --- lazy parameters --------------------------------------------------------------------------------------------------


class LazyParameter(UninitializedParameter, FakeTensor):  # type: ignore[misc]
    """A parameter without a shape: an empty fake tensor that becomes an ordinary one."""

    cls_to_become = FakeTensor
    shape = torch.Tensor.shape
    __torch_function__ = disabled_torch_function

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return memo.setdefault(id(self), made_lazy(self.data.device, self.data.dtype, self.requires_grad))


class LazyBuffer(UninitializedBuffer, FakeTensor):  # type: ignore[misc]
    """A buffer without a shape."""

    cls_to_become = FakeTensor
    shape = torch.Tensor.shape
    __torch_function__ = disabled_torch_function

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return memo.setdefault(id(self), made_lazy(self.data.device, self.data.dtype, False, LazyBuffer))


def made_lazy(
    device: object, dtype: torch.dtype | None, requires_grad: bool, kind: type = LazyParameter
) -> torch.Tensor:
    """A lazy parameter, or buffer, that will be made on ``device``."""
    tensor: Any = torch.empty(0, device=device, dtype=dtype)
    tensor.requires_grad_(requires_grad)
    tensor.__class__ = kind
    if kind is LazyParameter:
        tensor._is_param = True
    return tensor


def lazy_like(real: torch.Tensor) -> torch.Tensor:
    """A fake lazy parameter or buffer on the host for a real one."""
    kind = LazyParameter if isinstance(real, torch.nn.Parameter) else LazyBuffer
    return made_lazy("cpu", real.data.dtype, real.requires_grad, kind)


def moved_lazy(lazy: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A lazy tensor on the device, and of the dtype, that ``move`` (of ``Module.to``) gives."""
    like = move(torch.empty(0, dtype=lazy.data.dtype, device=lazy.data.device))
    return made_lazy(like.device, like.dtype, lazy.requires_grad, type(lazy))


def _patch_lazy(patches: Patches) -> None:
    def parameter(
        _: object, requires_grad: bool = True, device: object = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return made_lazy(device, dtype, requires_grad)

    def buffer(
        _: object, requires_grad: bool = False, device: object = None, dtype: torch.dtype | None = None, **__: object
    ) -> torch.Tensor:
        return made_lazy(device, dtype, requires_grad, LazyBuffer)

    patches.set(UninitializedParameter, "__new__", staticmethod(parameter))
    patches.set(UninitializedBuffer, "__new__", staticmethod(buffer))
