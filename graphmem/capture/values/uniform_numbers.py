"""Remembers which storages are filled with one number (zeros, ones), and marks those whose numbers are not known."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from graphmem.capture.torch_internals import disable_current_modes

Number = bool | int | float
#: Types of few numbers -> how many.
_SMALL = {torch.bool: 2, torch.uint8: 256}


class Mark(Enum):
    """Where the values of a storage come from, which outlasts writes into it."""

    NONE = auto()
    FINITE_CHECK = auto()  #: a question whether values are finite
    GOES_ON = auto()  #: the questions of a generation whether it goes on, of which all that are known say yes


@dataclass
class _Entry:
    storage: weakref.ref[torch.UntypedStorage]
    number: Number | None = None
    mark: Mark = Mark.NONE
    below: int | None = None
    distinct: int | None = None


class UniformNumbers:
    """The numbers and marks of one capture's storages."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def of(self, tensor: torch.Tensor) -> Number | None:
        """The number in every element; None where it is not known."""
        entry = self._found(tensor)
        return None if entry is None else entry.number

    def mark_of(self, tensor: torch.Tensor) -> Mark:
        """The mark of the tensor's storage."""
        entry = self._found(tensor)
        return Mark.NONE if entry is None else entry.mark

    def learn(self, tensor: torch.Tensor, number: Number) -> None:
        """From now on every element is ``number``, in the tensor's type."""
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        self._entry(tensor).number = bool(number) if tensor.dtype is torch.bool else int(number) if is_whole else number

    def set_mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        self._entry(tensor).mark = mark

    def below(self, tensor: torch.Tensor) -> int | None:
        """The number that every element, a whole number from 0 on, is below; None where it is not known."""
        if tensor.dtype in _SMALL:
            return _SMALL[tensor.dtype]
        entry = self._found(tensor)
        return None if entry is None else entry.below

    def set_below(self, tensor: torch.Tensor, number: int) -> None:
        self._entry(tensor).below = number

    def possible(self, tensor: torch.Tensor) -> Any:
        """Whole numbers that the elements may be where those of a row differ, as ``tolist`` gives them; else None."""
        entry = self._found(tensor)
        if entry is None or entry.distinct is None:
            return None
        with disable_current_modes():
            position = torch.tensor(tensor.storage_offset())
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                position = position.unsqueeze(-1) + torch.arange(size) * stride
            return (position % entry.distinct).tolist()

    def set_distinct(self, tensor: torch.Tensor) -> None:
        """The whole numbers in each row of a tensor differ from each other."""
        self._entry(tensor).distinct = tensor.shape[-1] if tensor.is_contiguous() else None

    def is_distinct(self, tensor: torch.Tensor) -> bool:
        entry = self._found(tensor)
        return entry is not None and entry.distinct is not None

    def forget(self, tensor: torch.Tensor) -> None:
        """The tensor was written into; its mark stays."""
        entry = self._found(tensor)
        if entry is not None:
            entry.number = entry.below = entry.distinct = None

    def _found(self, tensor: torch.Tensor) -> _Entry | None:
        if not self._entries or tensor.layout is not torch.strided:
            return None
        return self._entries.get(tensor.untyped_storage()._cdata)

    def _entry(self, tensor: torch.Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._entries:
            self._entries[key] = _Entry(weakref.ref(storage, lambda _: self._entries.pop(key, None)))
        return self._entries[key]
