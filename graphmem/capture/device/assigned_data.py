"""``tensor.data = other``, by which parameters move to another device and stay the objects that they are."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphmem.capture.device.fake_tensors import FAKE_DEVICE
from graphmem.capture.torch_internals import FakeTensor, swap_tensor_impl, without_torch_function
from graphmem.torch_names import private

_META = torch.device("meta")
_same_version: Any = private(
    "torch.autograd._unsafe_preserve_version_counter",
    "a backward pass through a parameter that was moved after its use may be refused",
    lambda _: contextlib.nullcontext(),
)
#: Bound before it is replaced.
_DATA: Any = torch.Tensor.data


def data_property(borrow: Callable[[object], object]) -> property:
    """``Tensor.data``, which another device's tensor may be assigned to: then this one is on that device. A real tensor
    that is assigned a fake one is borrowed.

    ``VariableHooks::set_data`` copies the other tensor's metadata, but a tensor that was made for the host goes on
    asking Python for its device (``TensorImpl::copy_generic_tensor_metadata``, c10/core/TensorImpl.cpp, 2.13). So the
    two exchange what they are to C++. As there, the gradient, the hooks and the version stay, and the node that
    accumulates the gradient does not. A graph that is kept (a loss that is logged later, FSDP's hooks) still holds that
    node, and by it what the tensor was to C++: that shares its data meanwhile (:func:`_give_data`), and is taken again
    when the tensor comes back to the device.
    """

    def get(self: torch.Tensor) -> torch.Tensor:
        return _DATA.__get__(self, type(self))

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, FakeTensor) and not isinstance(borrow(self), FakeTensor):
            raise RuntimeError(f"the data of a {type(self).__name__} cannot become that of a tensor of the capture")
        if not isinstance(value, FakeTensor) or value.fake_device == self.fake_device:
            _DATA.__set__(self, value)
            return
        grad, before = self.grad, self.fake_device
        other = _as_it_was_there(self, value)
        with _same_version(self):
            swap_tensor_impl(self, other)
        register_hooks(self)
        _give_data(self, other)
        self.__dict__.setdefault(_FORMER, {})[before] = weakref.ref(other)  # a graph may hold it: nobody else does
        if grad is not None:
            _set_any_grad(self, grad)
        elif self.grad is not None:
            self.grad = None
        self.__dict__[FAKE_DEVICE] = value.fake_device

    return property(get, assign)


def _as_it_was_there(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The C++ tensor that this one was where ``value`` is, or something new there, with the data of ``value``."""
    reference = tensor.__dict__.get(_FORMER, {}).pop(value.fake_device, None)
    former = None if reference is None else reference()
    with torch.no_grad(), without_torch_function():
        if former is None:
            return _DATA.__get__(value, type(value)).requires_grad_(tensor.requires_grad)
        former._fix_weakref()  # C++ may have kept it after Python had let it go
        _DATA.__set__(former, value)
        former.__dict__[FAKE_DEVICE] = value.fake_device
        return former


#: The attribute of a tensor with what it was to C++, by device.
_FORMER = "_graphmem_former"
#: Where a tensor keeps its hooks, as tables that C++ knows too.
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def register_hooks(tensor: torch.Tensor) -> None:
    """Register the hooks in C++ that are with the Python object, after it has become another tensor to C++."""
    for name in HOOKS:
        table = getattr(tensor, name)
        if table is not None:
            setattr(tensor, name, table)


def _give_data(tensor: torch.Tensor, former: torch.Tensor) -> None:
    """Let what a tensor was to C++, now of ``former``, share the tensor's data: on a card the two are one, which a
    kept graph's ``AccumulateGrad`` holds without what it held before (``VariableHooks::set_data``, 2.13). The gradient
    is the tensor's alone, so that it goes when the tensor lets it go."""
    former.grad = None
    with torch.no_grad(), without_torch_function():
        _DATA.__set__(former, tensor)


def _set_any_grad(tensor: torch.Tensor, grad: torch.Tensor) -> None:
    """``tensor.grad = grad``, be it of another dtype, or on another device: C++ finds both on ``meta`` meanwhile, and
    the tensor's data in the gradient."""
    places = [(each, each.__dict__.get(FAKE_DEVICE)) for each in (tensor, grad)]
    with torch.no_grad(), without_torch_function():
        data = _DATA.__get__(grad, type(grad))
    for each, _ in places:
        each.__dict__[FAKE_DEVICE] = _META
    try:
        _DATA.__set__(grad, tensor)
        tensor.grad = grad
    finally:
        for each, place in places:
            each.__dict__[FAKE_DEVICE] = place
        _DATA.__set__(grad, data)
