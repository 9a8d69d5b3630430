"""The state of a generation from token to token, made longer or shorter: tensors, and the lists in which a loop of the
program's own collects tokens."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from graphmem.capture.program.tokens import ALIKE_TOKENS
from graphmem.capture.record.storages import Storages
from graphmem.capture.torch_internals import FakeTensor

#: Items of lists of numbers and words: a value for a token, which is repeated for those that are not followed.
_VALUES = (int, float, str, bool, type(None))


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrowingShape:
    """The shape of something that the loop keeps: ``sizes`` without the dimension ``dim``, which is ``more`` than the
    tokens are."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim: int
    more: int

    @property
    def is_attended(self) -> bool:
        """Whether it may be keys or values, which are attended to with the token that they were made for; of ids only
        the older ones have been."""
        return bool(self.dtype.is_floating_point)


def tensors_over(storages: Storages, wanted: set[int]) -> dict[int, list[Any]]:
    """The tensors over storages of the trace, by the storages' indices."""
    keys = {ref.key: ref.index for ref in storages.live.values() if ref.index in wanted}
    found: dict[int, list[Any]] = {}
    for candidate in gc.get_objects():
        if type(candidate) is FakeTensor and candidate.layout is torch.strided:
            index = keys.get(candidate.untyped_storage()._cdata)
            if index is not None:
                found.setdefault(index, []).append(candidate)
    return found


def growing_shape(tensors: list[torch.Tensor], growth: int, length: int) -> GrowingShape | None:
    """The shape of tensors over one storage that grows by ``growth`` bytes a token; None where it cannot be told."""
    for whole in _whole(tensors):
        bytes_ = whole.numel() * whole.element_size()
        fitting = [dim for dim, size in enumerate(whole.shape) if size > ALIKE_TOKENS and bytes_ // size == growth]
        if len(fitting) == 1 and not whole.requires_grad:
            dim = fitting[0]
            return GrowingShape(whole.dtype, _without(whole, dim), dim, whole.shape[dim] - length)
    return None


def sized(tensors: list[torch.Tensor], shapes: set[GrowingShape], length: int) -> tuple[Any, int, GrowingShape] | None:
    """Which of ``shapes`` the tensors over one storage have after ``length`` tokens: the tensor that shows it, its size
    in the dimension that grows, the shape. One that is smaller has come to its end: a window, say."""
    found = None
    for whole in _whole(tensors):
        for shape in shapes:
            if whole.dtype is not shape.dtype or whole.dim() <= shape.dim or _without(whole, shape.dim) != shape.sizes:
                continue
            size = whole.shape[shape.dim]
            if size == length + shape.more:
                return whole, size, shape
            if size < length + shape.more and found is None:
                found = whole, size, shape
    return found


def resize(tensors: list[torch.Tensor], whole: torch.Tensor, dim: int, size: int) -> object:
    """Give the tensors over one storage, of which ``whole`` shows all, another ``size``, on a new storage; returns a
    tensor that shows all of it. What shows a part shows as much of the new one."""
    by = size - whole.shape[dim]
    with torch.no_grad():
        if by > 0:
            more = list(whole.shape)
            more[dim] = by
            other = torch.cat([whole, whole.narrow(dim, 0, 1).expand(more)], dim)
        else:
            other = whole.narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
        views = [_shown_again(other, tensor, whole) for tensor in tensors]
    for old, new in zip(tensors, views, strict=True):
        torch.utils.swap_tensors(old, new)
    return other


def _shown_again(other: torch.Tensor, tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if tensor.shape == whole.shape:
        return other.detach()
    rows = other.numel() // max(1, math.prod(tensor.shape[1:]))
    if (
        tensor.numel() == whole.numel()
        and tensor.is_contiguous()
        and rows * math.prod(tensor.shape[1:]) == other.numel()
    ):
        return other.view(rows, *tensor.shape[1:])
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if last < other.numel():
        return other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return other.as_strided(tensor.shape, [0] * tensor.dim(), 0)


def shows_all(tensors: list[torch.Tensor]) -> bool:
    """Whether one of the tensors over a storage shows all of it. Of which a part is left, that part has served."""
    return any(True for _ in _whole(tensors))


def _whole(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """The tensors that show all of their storage."""
    for tensor in tensors:
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
            yield tensor


def _without(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


# --- lists ------------------------------------------------------------------------------------------------------------


class Lists:
    """The lists that a loop appends to once a token, among those that its function knows by name."""

    def __init__(self) -> None:
        # A list that has grown with the last token, and the lengths of all: others may hold what is to be freed.
        self._lengths: dict[int, tuple[list[Any] | None, list[int]]] = {}
        self._of_values: list[list[Any]] = []
        self._of_tensors: list[tuple[list[Any], int]] = []  # with the length at which probing began

    def note(self, lists: Iterable[list[Any]]) -> None:
        """Note the lengths of the lists after a token."""
        before, self._lengths = self._lengths, {}
        for found in lists:
            _, lengths = before.get(id(found), (None, []))
            grows = bool(lengths) and lengths[-1] < len(found)
            self._lengths[id(found)] = found if grows else None, [*lengths[-ALIKE_TOKENS:], len(found)]

    def sort_growing(self) -> bool:
        """Sort the lists that grow into those of values and those of tensors. False where one of them grows by
        other than one item a token, or holds what cannot be made longer."""
        self._of_values, self._of_tensors = [], []
        for found, lengths in self._lengths.values():
            if len(lengths) <= ALIKE_TOKENS or lengths[0] == lengths[-1]:
                continue
            if found is None or {b - a for a, b in pairwise(lengths)} != {1}:
                return False
            last = found[-ALIKE_TOKENS:]
            if all(type(item) in _VALUES for item in last):
                self._of_values.append(found)
            elif all(type(item) is FakeTensor and item.shape == last[0].shape for item in last):
                self._of_tensors.append((found, len(found)))
            else:
                return False
        return True

    def held(self, storages: Storages) -> set[int]:
        """The storages that their last items hold."""
        refs = (storages.of(item) for found, _ in self._of_tensors for item in found[-ALIKE_TOKENS:])
        return {ref.index for ref in refs if ref is not None}

    def stretch(self, by: int) -> None:
        """Make the lists of values as long as they are ``by`` tokens later, or earlier if it is negative."""
        for found in self._of_values:
            if by > 0:
                found.extend(found[-1:] * by)
            else:
                del found[by:]

    def drop_probes(self) -> None:
        """Drop from the lists of tensors what was appended since probing began, but for the last token's."""
        for found, length in self._of_tensors:
            del found[length:-1]

    def last_items(self) -> list[Any]:
        """The last token's items, in which an order that is always the same."""
        return [found[-1] for found, _ in self._of_tensors]

    def insert(self, tokens: list[list[Any]]) -> None:
        """Insert before the last item those of the tokens that were not followed, each token's in the order of
        :meth:`last_items`, in place of those that probing appended."""
        for number, (found, length) in enumerate(self._of_tensors):
            found[length:-1] = [items[number] for items in tokens]
