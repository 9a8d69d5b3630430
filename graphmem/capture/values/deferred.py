"""Values of host tensors that are computed when somebody reads them: batches of random numbers, and what transforms
make of them, are moved to the card unread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from graphmem.capture.values.generators import Mark

#: Bound before a library puts its own there (``deepspeed.zero.Init``).
_empty = torch.empty
#: Larger results wait until they are read, in elements.
LEAST = 1 << 14
#: The longest chain of operators that waits; what follows is computed.
_LONGEST = 32


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    offset: int
    size: Sequence[int]
    stride: Sequence[int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        return cls(tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def on(self, data: torch.UntypedStorage) -> torch.Tensor:
        """A host tensor that lies so in ``data``. No mode may be on."""
        return _empty(0, dtype=self.dtype).set_(data, self.offset, self.size, self.stride)


class _Part(NamedTuple):
    """A tensor in a storage whose values wait too."""

    storage: Deferred
    geometry: Geometry


class Deferred:
    """The values of one whole storage: an operator, its arguments as they were, and the point that a random one draws
    from. It does not change; who writes into the storage computes it first."""

    __slots__ = ("_args", "_func", "_geometry", "_is_in_place", "_kwargs", "_length", "_mark", "_nbytes")

    def __init__(
        self, func: Any, args: Any, kwargs: Any, target: torch.Tensor, is_in_place: bool, mark: Mark | None
    ) -> None:
        self._func, self._args, self._kwargs, self._mark, self._is_in_place = func, args, kwargs, mark, is_in_place
        self._geometry = Geometry.of(target)
        self._nbytes = target.untyped_storage().nbytes()
        self._length: int = 1 + max((part.storage._length for part in _parts((args, kwargs))), default=0)

    @property
    def may_wait(self) -> bool:
        """Whether the chain that ends here is short enough."""
        return self._length <= _LONGEST

    def part(self, geometry: Geometry) -> Any:
        """A tensor of this storage, as it stands among another operator's arguments."""
        return _Part(self, geometry)

    def compute(self, done: dict[int, torch.UntypedStorage] | None = None) -> torch.UntypedStorage:
        """The values. No mode may be on. Raises what the operator raises."""
        done = {} if done is None else done
        known = done.get(id(self))
        if known is not None:
            return known
        args = _computed(self._args, done)
        kwargs = {name: _computed(value, done) for name, value in self._kwargs.items()}
        if self._mark is not None:
            kwargs["generator"] = self._mark.generator()
        data = torch.UntypedStorage(self._nbytes)
        target = self._geometry.on(data)
        if self._is_in_place:
            self._func(target, *args, **kwargs)
        else:
            target.copy_(self._func(*args, **kwargs))
        done[id(self)] = data
        return data


def _parts(value: Any) -> list[_Part]:
    if isinstance(value, _Part):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _parts(item)]
    return []


def _computed(value: Any, done: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _Part):
        return value.geometry.on(value.storage.compute(done))
    if isinstance(value, list):
        return [_computed(item, done) for item in value]
    return value
