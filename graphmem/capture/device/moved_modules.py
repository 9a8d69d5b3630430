"""Modules that are moved to the device: their real parameters become fake on the way, and are given back at the end."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphmem.capture.device.factories import moved_lazy
from graphmem.capture.device.fake_tensors import assigning_data, is_of_own_class
from graphmem.capture.patches import Patches


@contextlib.contextmanager
def moved_modules() -> Iterator[None]:
    """Let modules that existed before be moved, for the duration; afterwards they hold what they held."""
    patches, originals = Patches(), _Originals()
    try:
        patches.set(nn.Module, "_apply", _apply_to_fakes(nn.Module._apply, originals))
        yield
    finally:
        patches.undo()
        originals.give_back()


def _apply_to_fakes(original: Any, originals: _Originals) -> Any:
    """``Module._apply`` that first turns real host parameters into fake ones: small literals, or a caller's own."""

    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        originals.keep(self)
        for name, parameter in self._parameters.items():
            if parameter is not None and not _is_fake(parameter):
                with torch.no_grad():
                    fake = torch.empty_like(parameter, device="cpu") if parameter.dim() else _fake_scalar(parameter)
                self._parameters[name] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        lazy = [
            (table, name, tensor)
            for table in (self._parameters, self._buffers)
            for name, tensor in table.items()
            if is_lazy(tensor)
        ]
        for table, name, _ in lazy:
            table[name] = None  # keeps its place
        own = {name: parameter for name, parameter in self._parameters.items() if is_of_own_class(parameter)}
        for name in own:
            self._parameters[name] = None  # keeps its place
        with assigning_data():
            applied = original(self, *args, **kwargs)
        for name, parameter in own.items():
            self._parameters[name] = _converted(parameter, args[0] if args else kwargs["fn"])
        for table, name, tensor in lazy:
            table[name] = moved_lazy(tensor, args[0] if args else kwargs["fn"])
        return applied

    return apply


def _is_fake(parameter: torch.Tensor) -> bool:
    """Whether it is a fake tensor, or around others that are, as a DTensor is."""
    if isinstance(parameter, FakeTensor) or not is_traceable_wrapper_subclass(parameter):
        return isinstance(parameter, FakeTensor)
    inner = [getattr(parameter, name) for name in parameter.__tensor_flatten__()[0]]
    return all(isinstance(one, FakeTensor) for one in inner if isinstance(one, torch.Tensor))


def _converted(parameter: Any, convert: Callable[[Any], Any]) -> Any:
    """As ``Module._apply`` does with parameters that are no fake tensors: the same object has the converted data."""
    with torch.no_grad():
        parameter.data = convert(parameter)
    return parameter


class _Originals:
    """The real tensors of modules that existed before the capture and are moved by it, to be given back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[nn.Module], bool, list[tuple[Any, str, torch.Tensor]]]] = {}

    def keep(self, module: nn.Module) -> None:
        known = self._kept.get(id(module))
        if known is not None and known[0]() is module:
            return
        real = [
            (table, name, tensor)
            for table in ("_parameters", "_buffers")
            for name, tensor in getattr(module, table).items()
            if tensor is not None and not isinstance(tensor, FakeTensor)
        ]
        self._kept[id(module)] = (weakref.ref(module), module.training, real)

    def give_back(self) -> None:
        for reference, training, real in self._kept.values():
            module = reference()
            if module is not None:
                module.training = training
                for table, name, tensor in real:
                    getattr(module, table)[name] = tensor


def _fake_scalar(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(1, dtype=parameter.dtype).reshape(())
