"""Parameters that the caller made, which are fake while a capture lasts.

Hooks, optimizers and closures know a parameter by the object that it is. So a real parameter that a capture converts,
or whose hooks it runs, is not copied: its own object is fake until the end, and is then as it was, with its data, its
gradient, its attributes and its hooks. Optimizers that step it meanwhile get their state back.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.optim import optimizer as torch_optimizer

from graphmem.capture.device.assigned_data import HOOKS, register_hooks
from graphmem.capture.device.fake_tensors import fake_kind
from graphmem.capture.device.own_attributes import swap_attributes
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor, is_traceable_wrapper_subclass, swap_tensor_impl


@dataclass
class _Lent:
    """A parameter, the object that holds its real data meanwhile, and its hooks as they were: (table, entries)."""

    parameter: weakref.ref[Any]
    keeper: Any
    hooks: list[tuple[Any, dict[int, Any]]]

    def give_back(self) -> None:
        parameter = self.parameter()
        if parameter is None:
            return
        for name, (table, entries) in zip(HOOKS, self.hooks, strict=True):
            if table is not None:
                table.clear()
                table.update(entries)
            setattr(parameter, name, table)
        _swap(parameter, self.keeper)


class Borrowed:
    """The caller's parameters that are fake now. Nothing here keeps one alive."""

    _current: ClassVar[Borrowed | None] = None

    def __init__(self) -> None:
        self._lent: list[_Lent] = []
        self._optimizers: weakref.WeakKeyDictionary[Any, tuple[dict[Any, Any], list[dict[str, Any]]]]
        self._optimizers = weakref.WeakKeyDictionary()

    @classmethod
    @contextlib.contextmanager
    def lent(cls) -> Iterator[Borrowed]:
        """For the duration parameters can be borrowed; then all are given back."""
        borrowed = cls._current = cls()
        only = Patches().threads.only
        handle = torch_optimizer.register_optimizer_step_pre_hook(only(borrowed._before_step))
        try:
            yield borrowed
        finally:
            cls._current = None
            handle.remove()
            borrowed._give_back()

    @classmethod
    def of_capture(cls) -> Borrowed:
        """Those of the running capture."""
        assert cls._current is not None
        return cls._current

    def fake(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter itself, fake from now on. Of a tensor around others, which cannot change its kind, a plain
        fake parameter."""
        if is_fake(parameter):
            return parameter
        fake = fake_like(parameter)
        if is_traceable_wrapper_subclass(parameter):
            return fake
        self._lend(parameter, fake)
        return parameter

    def _lend(self, parameter: torch.Tensor, fake: torch.Tensor) -> None:
        """Ctrl-C waits for the end of it (:mod:`graphmem.capture.session.interrupts`)."""
        hooks = [getattr(parameter, name) for name in HOOKS]
        _swap(parameter, fake)
        self._lent.append(_Lent(weakref.ref(parameter), fake, [(table, dict(table or ())) for table in hooks]))
        register_hooks(parameter)

    def has(self, parameter: torch.Tensor) -> bool:
        """True if it is borrowed."""
        return any(lent.parameter() is parameter for lent in self._lent)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Remember an optimizer's states of parameters that are borrowed."""
        if optimizer in self._optimizers or not self._lent:
            return
        borrowed = {id(lent.parameter()) for lent in self._lent}
        if any(id(parameter) in borrowed for group in optimizer.param_groups for parameter in group["params"]):
            state = {parameter: dict(held) for parameter, held in optimizer.state.items()}
            self._optimizers[optimizer] = (state, [dict(group) for group in optimizer.param_groups])

    def _give_back(self) -> None:
        while self._lent:
            self._lent[-1].give_back()
            self._lent.pop()
        for optimizer, (state, groups) in list(self._optimizers.items()):
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=False):
                group.clear()
                group.update(before)


def is_fake(tensor: torch.Tensor) -> bool:
    """True if it is a fake tensor, or around others that are, as a DTensor is, whose own may be around others."""
    if isinstance(tensor, FakeTensor) or not is_traceable_wrapper_subclass(tensor):
        return isinstance(tensor, FakeTensor)
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return all(is_fake(one) for one in inner if isinstance(one, torch.Tensor))


def fake_like(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor or parameter on the host with the layout, the attributes and the gradient of a real one."""
    with torch.no_grad():
        fake: Any = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if type(tensor) is not torch.nn.Parameter and not is_traceable_wrapper_subclass(tensor):
            kind: Any = type(tensor)
            fake.__class__ = fake_kind(kind)
    vars(fake).update({name: value for name, value in vars(tensor).items() if name not in vars(fake)})
    if tensor.is_leaf and tensor.grad is not None:
        fake.grad = fake_like(tensor.grad)
    return fake


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the identities of two tensors, in Python and in C++."""
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    swap_attributes(tensor, other)
    swap_tensor_impl(tensor, other)
