"""A pretend CUDA device for fake tensors, on any build of PyTorch, with or without a GPU.

The trick is to show two faces. To Python a device tensor is on ``cuda:0``: model code, optimizers and PyTorch's own
decompositions ask it and choose as they would on a card. To C++ its device is ``meta`` (the device of the storage that
a fake tensor really has), for which autograd needs neither a driver nor a device thread, while its dispatch keys are
CUDA's, so that autocast and autograd take the CUDA entries of the dispatcher. Host tensors are ordinary CPU fakes.
Every tensor created on ``meta`` while the pretence lasts is a device tensor.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import inspect
import logging
import types
from _thread import get_ident
from collections.abc import Callable, Container, Iterator
from typing import Any, TypeGuard

import torch

from graphmem.capture.device.factories import device_named
from graphmem.capture.device.own_attributes import OWN_ATTRIBUTES, own_attributes, swap_attributes
from graphmem.capture.device.pretend_device import DEVICE, cards, device_of
from graphmem.capture.patches import Patches, around, constant
from graphmem.capture.threads import Threads
from graphmem.capture.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    make_subclass,
    swap_tensor_impl,
    without_torch_function,
)
from graphmem.capture.values.callers import called_by_operator
from graphmem.capture.values.known_values import KnownValues
from graphmem.capture.values.tensors import NOWHERE, innermost, tensors_in
from graphmem.torch_names import private

_META = torch.device("meta")
#: What fake operators gave under the pretence, by the card's number, as ``FakeTensorMode.cache``: nothing for other
#: modes, nor theirs for it.
_RESULTS: dict[torch.device, dict[Any, Any]] = {}
#: Bound before they are replaced.
_TO: Any = torch.Tensor.to
_SET_ITEM: Any = torch.Tensor.__setitem__
#: The attribute in which a fake tensor keeps its device.
FAKE_DEVICE = "_fake_device" if isinstance(FakeTensor.__dict__.get("fake_device"), property) else "fake_device"

#: Where fake tensors note what they found out of their data.
_MEMOS = ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo")
_Make = Callable[..., torch.Tensor]


def patch_fake_tensors(patches: Patches, values: KnownValues) -> None:
    """Make fake tensors on ``cuda`` work until ``patches`` are undone. ``values``: known values go with a copy."""
    patches.set(FakeTensor, "__new__", staticmethod(around(_new)(FakeTensor.__new__)))
    patches.set(FakeTensorMode, "cache", _RESULTS.setdefault(cards().own, {}))
    _attributes.cache_clear()
    patches.set(torch.Tensor, "__new__", staticmethod(around(_new_of_class)(torch.Tensor.__new__)))
    patches.set(torch.nn.Parameter, "__new__", staticmethod(around(_new_parameter)(torch.nn.Parameter.__new__)))
    deep_copy = {"__deepcopy__": _deep_copy(values)}
    patches.around(torch.Tensor, {"as_subclass": _as_subclass, "is_shared": _is_shared, **deep_copy})
    patches.around(torch.nn.Parameter, deep_copy)
    methods = {
        "to": _to,
        "cuda": lambda self, *_, **__: self.to(cards().own),
        "__setitem__": _set_item,
        "pin_memory": _pin_memory,
        "is_pinned": lambda self, *_: hasattr(self, "_graphmem_pinned"),
        "share_memory_": _share_memory,
    }
    patches.table(torch.Tensor, methods)
    attributes = {
        "is_cuda": property(lambda self: self.fake_device.type == "cuda"),
        "is_meta": property(lambda self: self.fake_device == NOWHERE),
        "is_cpu": property(lambda self: self.fake_device.type == "cpu" and not self.is_meta),
        "get_device": lambda self: cards().own.index if self.is_cuda else -1,
    }
    patches.table(FakeTensor, attributes)
    patches.share(FakeTensor, "device", _shown_device(patches.threads))
    for name in ("device", "is_cuda", "is_meta", "is_cpu"):
        patches.share(torch.Tensor, name, _of_the_inner(getattr(torch.Tensor, name), name, patches.threads))
    lost = "parameters of a class of their own, as bitsandbytes', are not followed"
    patches.wrap("torch.Tensor._make_subclass", lost, around(_make_subclass))
    lost = "host tensors of classes of their own, as fastai's, are refused by operators"
    patches.replace("torch._subclasses.fake_tensor._check_for_subclass_arg", lost, _wants_own_dispatch)
    patches.wrap("torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor", lost, around(_of_plain))
    patches.set(torch.utils, "swap_tensors", _swap_tensors)
    lost = "fake tensors may look for a driver"
    patches.replace("torch._subclasses.fake_tensor.init_gpu_context", lost, constant(None))


def _new(original: _Make, cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``FakeTensor.__new__``, of any of the spellings that PyTorch 2.4 to 2.13 use; and ``type(parameter)(value,
    requires_grad=...)`` and ``type(tensor)(value)``, by which libraries make one like it: fake parameters are of the
    same class as fake tensors, and accelerate's ``set_module_tensor_to_device`` always gives ``requires_grad``, which
    only parameters take."""
    if args and isinstance(args[0], torch.Tensor) and (given := _given(kwargs)).keys() <= {"requires_grad"}:
        value, *flag = (*args, *given.values())
        return torch.nn.Parameter(value, *flag) if flag else value.detach()
    device = args[2] if len(args) > 2 else kwargs.get("device", kwargs.get("fake_device"))
    if device is None or device_of(device).type == "cpu":
        return original(cls, *args, **kwargs)
    fake_mode = args[0] if args else kwargs["fake_mode"]
    return device_tensor(cls, fake_mode, args[1] if len(args) > 1 else kwargs["elem"])


def _shown_device(threads: Threads) -> property:
    """The property ``x.device``. A program's own meta tensor is kept on the device ``NOWHERE`` (``cpu:1``), as ``meta``
    is PyTorch's word for fake memory on the card: the program reads ``meta`` of it, operators read ``NOWHERE``.
    While a fake kernel runs, every fake tensor is ``meta``, as in PyTorch.

    It is read for every operator: only for such a tensor is the thread looked at.
    """

    def device(self: FakeTensor) -> torch.device:
        if self.fake_mode.in_kernel_invocation:
            return _META
        shown: torch.device = self.fake_device
        if shown.index != 1 or shown.type != "cpu" or get_ident() not in threads:
            return shown
        return shown if called_by_operator() else _META

    return property(device, FakeTensor.device.fset)


def _of_the_inner(original: Any, name: str, threads: Threads) -> property:
    """``x.device`` and its like. A tensor that a transform of ``torch.func`` has wrapped is where the one inside is,
    which is ``meta`` to C++. Any other tensor that is not fake is a real one."""

    def shown(self: torch.Tensor) -> object:
        inner = innermost(self) if get_ident() in threads else None
        return getattr(inner, name) if isinstance(inner, FakeTensor) else original.__get__(self)

    return property(shown)


def _new_of_class(original: _Make, cls: type, *args: object, **kwargs: object) -> torch.Tensor:
    """``T(data)`` of a class of tensors: a plain tensor, viewed as that class. PyTorch gives the plain one itself the
    class, which it refuses for a fake tensor: that has one already."""
    if cls is torch.Tensor or issubclass(cls, FakeTensor):
        return original(cls, *args, **kwargs)
    plain = args[0] if len(args) == 1 and isinstance(args[0], FakeTensor) else original(torch.Tensor, *args, **kwargs)
    return plain.as_subclass(cls)


def _new_parameter(
    original: _Make, cls: type, data: torch.Tensor | None = None, requires_grad: bool = True, **attributes: object
) -> torch.Tensor:
    """``P(data)`` of a class of parameters, which PyTorch makes of plain tensors by ``Tensor._make_subclass``."""
    if type(data) is FakeTensor and cls is not torch.nn.Parameter:
        return _make_subclass(make_subclass, cls, data, requires_grad)
    return original(cls, data, requires_grad, **_given(attributes))


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    """What is given beside another's own attributes, with which accelerate's ``init_on_device`` makes a parameter anew:
    on a card those of a fake tensor are not among them."""
    own = {"fake_mode", "_is_param", *_attributes()}
    return {name: one for name, one in attributes.items() if name not in own}


_guard_memory: Any = private(
    "torch._C._set_throw_on_mutable_data_ptr",
    "code outside PyTorch that writes to a tensor's memory is not caught",
    lambda _: None,
)


def device_tensor(cls: type, fake_mode: FakeTensorMode, elem: torch.Tensor) -> torch.Tensor:
    """A fake tensor on the card, made of a tensor on ``meta``."""
    self = make_subclass(cls, elem, elem.requires_grad, dispatch_device=False, device_for_backend_keys=DEVICE)
    _guard_memory(self)
    attributes = self.__dict__
    dict.update(attributes, _attributes())
    attributes["fake_mode"] = fake_mode
    return self


@functools.cache
def _attributes() -> dict[str, Any]:
    """Attributes that ``FakeTensor.__new__`` sets, but for the mode. Setting the memos one by one would take long."""
    new = types.SimpleNamespace(constant=None, real_tensor=None, pytype=None, dispatch_keys=None)
    setattr(new, FAKE_DEVICE, cards().own)
    for memo in _MEMOS:
        if memo in FakeTensor.__dict__:
            FakeTensor.__dict__[memo].__set__(new, None)
    return vars(new)


def _make_subclass(
    original: _Make, cls: type, data: torch.Tensor, require_grad: bool = False, **options: object
) -> torch.Tensor:
    """``Tensor._make_subclass``, by which libraries make parameters of a class of their own (bitsandbytes'
    ``Params4bit``): of a fake tensor, one of both classes. PyTorch refuses tensors that have a Python object already.
    """
    if not isinstance(data, FakeTensor) or cls is FakeTensor:
        return original(cls, data, require_grad, **options)
    with torch.no_grad(), without_torch_function():  # data may be of such a class already
        made = data.detach()
    made.__class__ = fake_kind(cls)
    return made.requires_grad_(require_grad)


def _as_subclass(original: _Make, self: torch.Tensor, cls: type) -> torch.Tensor:
    """``Tensor.as_subclass``: the same values as another class, as fastai, MONAI and ``Tensor.__torch_function__`` ask
    for it. Of a fake tensor, a view of both classes; PyTorch refuses tensors that have a Python object already."""
    with without_torch_function():
        viewed = torch.ops.aten.alias(self)
    if not isinstance(viewed, FakeTensor):
        return original(self, cls)
    viewed.__class__ = fake_kind(cls)
    return viewed


def _wants_own_dispatch(value: object) -> bool:
    """True if a real tensor's class answers operators itself. PyTorch takes any class for one that may; a host tensor
    of a class without ``__torch_dispatch__`` is below Python an ordinary one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return False
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


#: Bound before it is replaced.
_AS_SUBCLASS: Any = torch.Tensor.as_subclass


def _of_plain(
    original: _Make, self: object, fake_mode: FakeTensorMode, t: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """``FakeTensorConverter.from_real_tensor``, which refuses tensors of any class but PyTorch's."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) and not _wants_own_dispatch(t):
        if kwargs.get("shape_env") is not None and kwargs.get("symbolic_context") is None:
            kwargs.update(_symbols_of(t))
        with disable_current_modes(), without_torch_function():
            t = _AS_SUBCLASS(t, torch.Tensor)
    made = original(self, fake_mode, t, *args, **kwargs)
    if t.is_meta and t._is_zerotensor():  # C++ makes them for forward derivatives, beside every mode
        vars(made)[FAKE_DEVICE] = cards().own
    return made


def _symbols_of(tensor: torch.Tensor) -> dict[str, object]:
    """Sizes that Dynamo has made symbols of, which are the same ones to its backend: PyTorch knows them by the tensor
    (``TracingContext.tensor_to_context``, torch/_guards.py)."""
    context = private("torch._guards.TracingContext.try_get", "compiled code is of one size")()
    known = None if context is None else context.tensor_to_context.get(tensor)
    return {} if known is None else {"symbolic_context": known, "source": known.tensor_source}


#: Classes of PyTorch that are fake tensors' own.
_PYTORCHS = (torch.Tensor, torch.nn.Parameter)


@functools.cache
def fake_kind(kind: type) -> FakeTensor:
    """The class of fake tensors that are of this class too, to all appearance the class itself. It is below
    those of the classes above it, for which ``__torch_function__`` asks."""
    if issubclass(FakeTensor, kind) or issubclass(kind, FakeTensor):
        return FakeTensor if kind is torch.Tensor else kind
    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    names["__dict__"] = OWN_ATTRIBUTES
    above = [fake_kind(base) for base in kind.__bases__ if issubclass(base, torch.Tensor) and base not in _PYTORCHS]
    return _overridable(type(kind)(kind.__name__, (kind, *(above or [_of_own_class()])), names), kind)


@functools.cache
def _of_own_class() -> FakeTensor:
    """Fake tensors as ``super()`` finds them from a class of a library: with the default ``__torch_function__``."""
    return _overridable(type(FakeTensor)("FakeTensor", (FakeTensor,), {}), torch.Tensor)


def _overridable(fake: FakeTensor, kind: type) -> FakeTensor:
    """``fake`` with the ``__torch_function__`` of ``kind``. PyTorch turns the default one off where it makes a class
    that has a ``__torch_dispatch__`` (``THPVariableMetaType_init``)."""
    fake.__torch_function__ = inspect.getattr_static(kind, "__torch_function__")
    return fake


def library_class(kind: type) -> type:
    """The class of a library that a class of fake tensors stands for; any other class itself."""
    shown = kind.__bases__[0]
    return shown if shown is not torch.Tensor and fake_kind(shown) is kind else kind


@contextlib.contextmanager
def without_classes(*given: object) -> Iterator[None]:
    """While an operator runs, fake tensors of libraries' classes are plain ones. On a card it is C++, which asks no
    class; PyTorch's kernels for shapes are Python, and call methods that a class may have replaced
    (``MetaTensor.new_empty``)."""
    tensors = [one for one in tensors_in(given) if is_of_own_class(one)]
    kinds = [type(one) for one in tensors]
    for one in tensors:
        one.__class__ = FakeTensor
    try:
        yield
    finally:
        for one, kind in zip(tensors, kinds, strict=True):
            one.__class__ = kind


def is_of_own_class(parameter: object) -> TypeGuard[FakeTensor]:
    """True if a library made this fake parameter of a class of its own."""
    return isinstance(parameter, FakeTensor) and type(parameter) is not FakeTensor


def _stand_in(device: object, moved: torch.Tensor) -> torch.device | None:
    """The C++ device for a device that Python names, to which a tensor moves."""
    device = device_named(device)
    if device is not None and device != NOWHERE and isinstance(moved, FakeTensor) and moved.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    return _META if device is not None and device.type == "cuda" else device


def _to(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """``Tensor.to`` with the device that C++ knows; also for real host tensors, which become fake on the way.

    A parameter of a library's class keeps the host's mark in C++ when its data moves (``FakeTensor.device`` is asked
    there then): one that is on the card already stays as it is without asking.
    """
    if is_of_own_class(self) and self.is_cuda and _is_there(self, args, kwargs):
        return self
    if args and (isinstance(args[0], (str, torch.device)) or type(args[0]) is int):
        args = (_stand_in(args[0], self), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = _stand_in(kwargs["device"], self)
    moved: torch.Tensor = _TO(self, *args, **kwargs)
    if not isinstance(self, FakeTensor) and NOWHERE in (*args[:1], kwargs.get("device")):
        # Of constants the fake mode makes constants, which are on the host.
        return torch.empty_strided(moved.size(), moved.stride(), dtype=moved.dtype, device=NOWHERE)
    return moved


def _is_there(parameter: torch.Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """True if ``to`` with these arguments leaves a tensor on the card as it is."""
    if "copy" in kwargs or kwargs.get("memory_format") is not None:
        return False
    named = [given for given in (*args[:2], kwargs.get("device"), kwargs.get("dtype")) if given is not None]
    places = [device_named(given) for given in named if not isinstance(given, (torch.dtype, torch.Tensor))]
    dtypes = [given for given in named if isinstance(given, torch.dtype)]
    return (
        len(args) <= 3
        and len(places) + len(dtypes) == len(named)
        and all(isinstance(place, torch.device) and place.type == "cuda" for place in places)
        and all(dtype is parameter.dtype for dtype in dtypes)
    )


def _set_item(self: torch.Tensor, index: object, value: object) -> None:
    """A number is assigned to a part of a device tensor by way of a host scalar, not of one on the device
    (``THPVariable_setitem``, torch/csrc/autograd/python_variable_indexing.cpp: ``self_.is_cuda()``)."""
    if isinstance(self, FakeTensor) and isinstance(value, (bool, int, float, complex)) and self.is_cuda:
        value = torch.scalar_tensor(value, dtype=self.dtype, device="cpu")
    _SET_ITEM(self, index, value)


def _pin_memory(self: torch.Tensor, *_: object) -> torch.Tensor:
    """A copy in pinned host memory (``at::native::_pin_memory``)."""
    if hasattr(self, "_graphmem_pinned"):
        return self
    if self.is_cuda:
        raise RuntimeError("cannot pin a tensor on the device; only dense CPU tensors can be pinned")
    pinned: torch.Tensor = torch.ops.aten._pin_memory(self)
    return pinned


def _share_memory(self: torch.Tensor) -> torch.Tensor:
    """``Tensor.share_memory_``: host memory that other processes see is host memory, and a card's is left alone."""
    if isinstance(self, FakeTensor):
        self._graphmem_shared = True
    return self


def _is_shared(original: Callable[..., bool], self: torch.Tensor) -> bool:
    if not isinstance(self, FakeTensor):
        return original(self)
    return self.is_cuda or hasattr(self, "_graphmem_shared")


def _deep_copy(values: KnownValues) -> _Make:
    """``copy.deepcopy`` of a tensor, which would ask for a fake tensor's data.

    Parameters are cloned. Of any other tensor the storage is copied, once for all tensors that share it, and the new
    tensor starts with a storage of one element (``Parameter.__deepcopy__``, ``Tensor.__deepcopy__``).
    """

    def deep_copy(original: _Make, self: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        if not isinstance(self, FakeTensor):
            is_real = not _wants_own_dispatch(self)
            with disable_current_modes() if is_real else contextlib.nullcontext():
                return original(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return original(self, memo)  # raises
        with torch.no_grad():
            if self.layout is not torch.strided:
                copied = self.detach().clone().requires_grad_(self.requires_grad)
            elif isinstance(self, torch.nn.Parameter):
                kind = torch.nn.Parameter if type(self) is FakeTensor else library_class(type(self))
                copied = kind(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
            else:
                copied = _storage_copied(self, memo).requires_grad_(self.requires_grad)
                copied.__class__ = type(self)
                known = values.of(self)
                if known is not None:
                    values.learn(copied, known)
                if self.grad is not None:
                    copied.grad = copy.deepcopy(self.grad, memo)
                vars(copied).update(copy.deepcopy(own_attributes(self), memo))
        memo[id(self)] = copied
        return copied

    return deep_copy


def _storage_copied(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    key = ("storage", storage._cdata)
    whole = memo.get(key)
    if whole is None:
        elements = storage.nbytes() // tensor.element_size()
        whole = memo[key] = torch.empty(elements, dtype=tensor.dtype, device=tensor.device)
    tensor.new_empty([])
    if whole.dtype is not tensor.dtype:
        whole = whole.view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


def _swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
    """``torch.utils.swap_tensors`` without its refusal of weak references: the fake mode's own tables hold them."""
    swap_attributes(first, second)
    for memo in _MEMOS:
        for tensor in (first, second):
            if isinstance(tensor, FakeTensor):
                setattr(tensor, memo, None)
    if type(first) is type(second) and not isinstance(first, FakeTensor):  # a DTensor: what it is around is in slots
        for slot in copyreg._slotnames(type(first)):  # type: ignore[attr-defined]
            mine, other = getattr(first, slot), getattr(second, slot)
            setattr(first, slot, other)
            setattr(second, slot, mine)
    swap_tensor_impl(first, second)


@contextlib.contextmanager
def shapes_unheard(threads: Container[int]) -> Iterator[None]:
    """Without what PyTorch logs about shapes that do not fit, in these threads: the error has it."""

    def is_heard(_: object) -> bool:
        return get_ident() not in threads

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(is_heard)
    try:
        yield
    finally:
        log.removeFilter(is_heard)
