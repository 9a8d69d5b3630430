"""Attributes that libraries put on tensors of their own classes.

Classes copy them from tensor to tensor as a whole: ``self.__dict__ = copy(other.__dict__)`` (fastai, MONAI),
``self.__dict__.update(other.__dict__)``. What a fake tensor keeps there for itself (its device, its mode) is not shown
to such a copy, and stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import torch

_NAMES = {"_fake_device", "fake_device", "fake_mode", "constant", "real_tensor", "pytype", "dispatch_keys", "_is_param"}
_PREFIXES = (
    "_graphmem_",
    "_nonzero_memo",
    "_item_memo",
    "_unique_memo",
    "_unique_consecutive_memo",
    "_nested_int_",
)
_DICT: Any = vars(torch.Tensor)["__dict__"]


def own_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the program has put on a tensor."""
    return _own(_DICT.__get__(tensor))


def swap_attributes(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange all attributes of two tensors."""
    former = _DICT.__get__(first)
    _DICT.__set__(first, _DICT.__get__(second))
    _DICT.__set__(second, former)


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    names = dict.keys(attributes)
    return {
        name: dict.__getitem__(attributes, name)
        for name in names
        if name not in _NAMES and not name.startswith(_PREFIXES)
    }


class _Attributes(dict[str, Any]):
    """All attributes of a tensor; whoever goes through them, or adds others', meets the program's own."""

    def __iter__(self) -> Iterator[str]:
        return iter(_own(self))

    def __len__(self) -> int:
        return len(_own(self))

    def __eq__(self, other: object) -> bool:
        return _own(self) == other

    def __repr__(self) -> str:
        return repr(_own(self))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (_own(self),)

    def __copy__(self) -> dict[str, Any]:
        return _own(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(_own(self), memo)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return _own(self).keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return _own(self).values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return _own(self).items()

    def copy(self) -> dict[str, Any]:
        return _own(self)

    def update(self, *given: Any, **named: Any) -> None:
        dict.update(self, _own(dict(*given, **named)))

    def __ior__(self, given: Any) -> _Attributes:  # type: ignore[override,misc]
        self.update(given)
        return self

    def clear(self) -> None:
        for name in _own(self):
            del self[name]


def _shown(tensor: torch.Tensor) -> dict[str, Any]:
    attributes: dict[str, Any] = _DICT.__get__(tensor)
    if type(attributes) is not _Attributes:
        attributes = _Attributes(attributes)
        _DICT.__set__(tensor, attributes)
    return attributes


def _replace(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    shown = _shown(tensor)
    shown.clear()
    shown.update(attributes)


#: ``__dict__`` of a class of fake tensors that is a library's too.
OWN_ATTRIBUTES = property(_shown, _replace)
