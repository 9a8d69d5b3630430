"""Modules that are converted: moved to the device, or given another dtype.

``nn.Module._apply`` (torch/nn/modules/module.py, 2.13) assigns ``.data`` of ordinary parameters, so that they stay the
objects that they are, with their hooks and attributes, and swaps fake ones, which loses both. Here fake ones are
converted as a card's are. Real ones, of modules that were made before the capture, are borrowed on the way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphmem.capture.device.assigned_data import data_property
from graphmem.capture.device.borrowed import Borrowed, is_fake
from graphmem.capture.device.factories import moved_lazy
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor, is_traceable_wrapper_subclass

_Convert = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def moved_modules() -> Iterator[None]:
    """Let modules be converted, for the duration; afterwards those that existed before hold their former tensors."""
    originals = _Originals()
    try:
        with Patches() as patches, Borrowed.lent() as borrowed:
            lost = "parameters are others after they are moved"
            patches.replace("torch.nn.Module._apply", lost, _apply_of(borrowed, originals))
            patches.set(torch.Tensor, "data", data_property(borrowed.fake))
            yield
    finally:
        originals.give_back()


def _apply_of(borrowed: Borrowed, originals: _Originals) -> Callable[..., nn.Module]:
    """``Module._apply``."""

    def apply(self: nn.Module, fn: _Convert, recurse: bool = True) -> nn.Module:
        originals.note(self)
        for module in self.children() if recurse else ():
            module._apply(fn)
        for name, parameter in _present(self._parameters):
            new = self._parameters[name] = _converted(borrowed.fake(parameter), fn)
            if new is not parameter and (borrowed.has(parameter) or not is_fake(parameter)):
                originals.keep(self, "_parameters", name, parameter)
        for name, buffer in _present(self._buffers):
            new = self._buffers[name] = moved_lazy(buffer, fn) if is_lazy(buffer) else fn(buffer)
            if new is not buffer and not isinstance(buffer, FakeTensor):
                originals.keep(self, "_buffers", name, buffer)
        return self

    return apply


def _present(tensors: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """One at a time: a replaced tensor dies before the next is looked at."""
    return ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _converted(parameter: torch.Tensor, convert: _Convert) -> torch.Tensor:
    """The parameter after ``Module._apply``: the same object unless ``torch.__future__`` asks to overwrite it, or it
    comes from or goes to ``meta``, whose tensors do not take the data of others (``has_compatible_shallow_copy_type``,
    c10/core/TensorImpl.h). Tensors around others are swapped, as all are where ``torch.__future__`` asks for it."""
    if is_lazy(parameter):
        return moved_lazy(parameter, convert)
    with torch.no_grad():
        data = convert(parameter)
    grad = parameter.grad
    if torch.__future__.get_swap_module_params_on_conversion() or is_traceable_wrapper_subclass(data):
        return _swapped(parameter, data, grad, convert)
    if torch.__future__.get_overwrite_module_params_on_conversion() or data.is_meta != parameter.is_meta:
        new = nn.Parameter(data, parameter.requires_grad)
        if grad is not None:
            with torch.no_grad():
                new.grad = convert(grad).requires_grad_(grad.requires_grad)
        return new
    parameter.data = data
    if grad is not None:
        with torch.no_grad():
            grad.data = convert(grad)
        parameter.grad = grad  # to C++ it has become another tensor
    return parameter


def _swapped(parameter: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None, convert: _Convert) -> torch.Tensor:
    parameter.grad = None
    torch.utils.swap_tensors(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
    if grad is not None:
        with torch.no_grad():
            torch.utils.swap_tensors(grad, convert(grad).requires_grad_(grad.requires_grad))
        parameter.grad = grad
    return parameter


class _Originals:
    """Modules that existed before the capture: whether they trained, and their tensors that were replaced."""

    def __init__(self) -> None:
        self._modules: weakref.WeakKeyDictionary[nn.Module, tuple[bool, dict[tuple[str, str], torch.Tensor]]]
        self._modules = weakref.WeakKeyDictionary()

    def note(self, module: nn.Module) -> None:
        self._modules.setdefault(module, (module.training, {}))

    def keep(self, module: nn.Module, table: str, name: str, tensor: torch.Tensor) -> None:
        self._modules[module][1].setdefault((table, name), tensor)

    def give_back(self) -> None:
        for module, (training, replaced) in list(self._modules.items()):
            module.training = training
            for (table, name), tensor in replaced.items():
                getattr(module, table)[name] = tensor
