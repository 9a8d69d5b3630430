"""Values of host tensors, by storage: bytes beside the fake tensors, and the room that they take. Batches of random
numbers, and what transforms make of them, are moved to the card unread: they are computed when somebody reads them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphmem.capture.torch_internals import FakeTensor, unset_fake_temporarily
from graphmem.capture.values.generators import Mark
from graphmem.capture.values.host_operators import FAILURES
from graphmem.capture.values.uniform_numbers import UniformNumbers
from graphmem.units import MIB

#: Bound before a library puts its own there (``deepspeed.zero.Init``).
_empty = torch.empty
#: Larger results wait until they are read, in elements.
LEAST = 1 << 14
#: The longest chain of operators that waits; what follows is computed.
_LONGEST = 32


@dataclass(frozen=True)
class Budget:
    """How many bytes of host tensors are real: of one, and of all together."""

    one: int = 64 * MIB
    together: int = 512 * MIB


class Mirror:
    """The values of one storage, for as long as it lives: its bytes, or how to compute them. Of ``blank`` memory
    nothing has been written yet; a parameter's is never followed."""

    __slots__ = ("bytes", "drawn", "is_blank", "is_weight", "later", "nbytes", "reference")

    def __init__(self, storage: torch.UntypedStorage, forget: Callable[[object], None]) -> None:
        self.reference = weakref.ref(storage, forget)
        self.nbytes = storage.nbytes()
        self.bytes: torch.UntypedStorage | None = None
        self.later: Deferred | None = None
        self.is_blank = True
        self.is_weight = False
        self.drawn = 0  # the kind of random numbers that have a part in it; those of the card are possible ones

    @property
    def is_known(self) -> bool:
        return not (self.is_blank or self.is_weight)


class Mirrors:
    """The mirrors of one capture, and the numbers of storages that are full of one."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.exceeded = 0  # host tensors that found no room in the budget
        self.waiting: set[int] = set()  # storages whose values wait, and some that did
        self.numbers = UniformNumbers()
        self._held = 0  # bytes
        self._mirrors: dict[int, Mirror] = {}

    def __len__(self) -> int:
        return len(self._mirrors)

    @property
    def room(self) -> int:
        """The bytes of one more tensor, at most."""
        return min(self.budget.one, self.budget.together - self._held)

    def current(self, tensor: torch.Tensor) -> Mirror | None:
        """The mirror of a fake tensor's storage, if there is one."""
        if not isinstance(tensor, FakeTensor):
            return None
        storage = tensor.untyped_storage()
        mirror = self._mirrors.get(storage._cdata)
        if mirror is not None and mirror.nbytes != storage.nbytes():  # resized in place
            self.forget(tensor)
            return None
        return mirror

    def before_resizing(self, tensor: FakeTensor) -> Mirror | None:
        """The mirror of a storage that has been resized in place, as it was; None where it was not."""
        storage = tensor.untyped_storage()
        mirror = self._mirrors.get(storage._cdata)
        return mirror if mirror is not None and mirror.nbytes != storage.nbytes() else None

    def of(self, tensor: FakeTensor) -> Mirror | None:
        """The mirror of a tensor's storage, made if there is none; None where it is too large."""
        mirror = self.current(tensor)
        if mirror is not None:
            return mirror
        if tensor.untyped_storage().nbytes() > self.budget.one:
            return None
        return self.new(tensor)

    def new(self, tensor: FakeTensor) -> Mirror:
        """A mirror of a tensor's storage, of any size."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def died(_: object) -> None:
            mirror = self._mirrors.pop(key, None)
            self.waiting.discard(key)
            if mirror is not None and mirror.bytes is not None:
                self._held -= mirror.nbytes

        mirror = self._mirrors[key] = Mirror(storage, died)
        return mirror

    def read(self, mirror: Mirror) -> torch.UntypedStorage | None:
        """The bytes, computed if they waited; None where they are not known, or there is no room."""
        if mirror.bytes is not None or mirror.later is None or not self._reserve(mirror):
            return mirror.bytes
        try:
            with unset_fake_temporarily(), torch.no_grad():
                mirror.bytes = mirror.later.compute()
        except FAILURES:
            self._held -= mirror.nbytes
            return None
        mirror.later = None
        return mirror.bytes

    def write(self, tensor: FakeTensor) -> torch.UntypedStorage | None:
        """The bytes of a tensor's storage, to be written into; None where there is no room."""
        mirror = self.of(tensor)
        if mirror is None or mirror.is_weight:
            return None
        if self.read(mirror) is None and self._reserve(mirror):
            with unset_fake_temporarily():
                mirror.bytes = torch.UntypedStorage(mirror.nbytes)
        if mirror.bytes is not None:
            mirror.is_blank = False
        return mirror.bytes

    def wait(self, mirror: Mirror, tensor: torch.Tensor, later: Deferred) -> None:
        """What is known of a tensor's storage is computed ``later``."""
        self.release(mirror)
        self.waiting.add(tensor.untyped_storage()._cdata)
        mirror.later, mirror.is_blank = later, False

    def hold_real(self, tensor: torch.Tensor) -> None:
        """A real tensor takes room as long as it lives."""
        size = tensor.untyped_storage().nbytes()
        self._held += size
        weakref.finalize(tensor.untyped_storage(), self._let_go, size).atexit = False

    def _let_go(self, size: int) -> None:
        self._held -= size

    def _reserve(self, mirror: Mirror) -> bool:
        if mirror.nbytes >= MIB and self._held + mirror.nbytes > self.budget.together:
            self.exceeded += 1
            return False
        self._held += mirror.nbytes
        return True

    def release(self, mirror: Mirror) -> None:
        """Give up the bytes."""
        if mirror.bytes is not None:
            self._held -= mirror.nbytes
            mirror.bytes = None

    def forget(self, tensor: FakeTensor) -> None:
        """Nobody knows the values of a fake tensor's storage any longer."""
        key = tensor.untyped_storage()._cdata
        self.numbers.forget(tensor)
        mirror = self._mirrors.pop(key, None)
        self.waiting.discard(key)
        if mirror is not None:
            self.release(mirror)


# --- values that wait -------------------------------------------------------------------------------------------------


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
