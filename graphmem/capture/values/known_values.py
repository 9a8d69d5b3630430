"""Values that a program knows before it runs on a card: masks, ids, lengths, positions, and what follows from them.

A small tensor made from host numbers keeps its values here, beside the fake tensor, and every operator on such tensors
is also computed on the host. So what the program reads back (``attention_mask.all()``, the size of ``nonzero()``, the
longest of some lengths) is what a card would answer. Values belong to storages: views share them, and writing into a
view changes them for all.

Random integers are a possible draw. Floating-point values of any size to speak of, and whatever a model computes, stay
unknown.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.capture.values.tensors import tensors_in

_aten = torch.ops.aten

#: Largest tensors whose values are followed, in elements. Integers and booleans decide what a program does (masks of a
#: batch of 128 sequences of 8,192 tokens fit); floats seldom do, and cost time.
INTEGER_LIMIT, FLOAT_LIMIT = 1 << 20, 1 << 12

#: Operators whose results have no values yet.
_UNWRITTEN = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default, _aten.resize_.default, _aten.resize_as_.default,
}  # fmt: skip
#: Operators that write every element of their first argument and read none of it.
_OVERWRITING = {
    "aten::copy_", "aten::fill_", "aten::zero_", "aten::random_", "aten::uniform_", "aten::normal_", "aten::bernoulli_",
    "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_",
}  # fmt: skip


class _Operator:
    """What following needs to know of an operator: which arguments it writes, and whether its results are views."""

    __slots__ = ("follows", "is_random", "is_view", "overwrites", "written")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.written = tuple(
            (position, argument.name, argument.is_out)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        aliases = [returned.alias_info for returned in schema.returns]
        self.is_view = not self.written and bool(aliases) and all(alias is not None for alias in aliases)
        self.overwrites = schema.name in _OVERWRITING
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.follows = func.namespace == "aten" and func not in _UNWRITTEN and bool(schema.returns or self.written)


class _Mirror:
    """The bytes of one storage on the host, for as long as the storage lives."""

    __slots__ = ("bytes", "reference")

    def __init__(self, storage: torch.UntypedStorage, forget: Callable[[Any], None]) -> None:
        self.reference = weakref.ref(storage, forget)
        self.bytes = torch.UntypedStorage(storage.nbytes())


class KnownValues:
    """The values of one capture's tensors, by storage."""

    def __init__(self, seed: int = 0) -> None:
        self._mirrors: dict[int, _Mirror] = {}
        self._operators: dict[Any, _Operator] = {}
        with unset_fake_temporarily():
            self._draws = torch.Generator().manual_seed(seed)

    # --- asking -------------------------------------------------------------------------------------------------------

    def of(self, tensor: Any) -> torch.Tensor | None:
        """The tensor's values as a host tensor of its shape and strides, which shares memory with what is kept here;
        None where they are not known."""
        if tensor.layout is not torch.strided:
            return None
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" and _fits(tensor) else None
        storage = tensor.untyped_storage()
        mirror = self._mirrors.get(storage._cdata)
        if mirror is None:
            return None
        if mirror.bytes.nbytes() != storage.nbytes():  # resized in place
            self.forget(tensor)
            return None
        return _view(mirror.bytes, tensor)

    def result(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What ``func`` returns for these arguments, computed on the host; None where one is not known."""
        if not self._mirrors and not _has_real(args):
            return None
        return self._computed(func, args, kwargs)

    # --- following ----------------------------------------------------------------------------------------------------

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Note what is known after ``func`` has run on fake tensors and returned ``out``."""
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _Operator(func)
        if operator.is_view:
            return
        if operator.written:
            self._write(operator, func, args, kwargs)
        elif operator.follows:
            self._make(operator, func, args, kwargs, out)

    def _make(self, operator: _Operator, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        outputs = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
        fakes = [tensor for tensor in outputs if isinstance(tensor, FakeTensor)]
        if not fakes or not all(_fits(tensor) and tensor.layout is torch.strided for tensor in fakes):
            return
        computed = self._computed(func, args, kwargs, operator.is_random)
        if computed is None:
            return
        values = [computed] if isinstance(computed, torch.Tensor) else list(tensors_in(computed))
        if len(values) != len(outputs):
            return
        for tensor, value in zip(outputs, values, strict=True):
            if isinstance(tensor, FakeTensor) and tensor.shape == value.shape and tensor.dtype is value.dtype:
                self.learn(tensor, value)

    def learn(self, tensor: FakeTensor, value: torch.Tensor) -> None:
        """From now on the tensor has these values."""
        mirror = self._mirror(tensor)
        if mirror is not None:
            with unset_fake_temporarily(), torch.no_grad():
                _view(mirror.bytes, tensor).copy_(value)

    def assume_all(self, mask: Any) -> None:
        """Unknown elements were taken to be nonzero, every one: from now on they are, so that what is asked of them
        next, or computed of their positions, agrees."""
        if self._is_whole(mask):
            with unset_fake_temporarily():
                ones = torch.ones(tuple(mask.shape), dtype=mask.dtype)
            self.learn(mask, ones)

    def _write(self, operator: _Operator, func: Any, args: Any, kwargs: Any) -> None:
        targets = [
            kwargs.get(name) if is_out or position >= len(args) else args[position]
            for position, name, is_out in operator.written
        ]
        tensors = [tensor for target in targets for tensor in tensors_in(target) if isinstance(tensor, FakeTensor)]
        if operator.overwrites and len(tensors) == 1 and self._is_whole(tensors[0]):
            if not self._known_sources(args[1:], kwargs) or self._mirror(tensors[0]) is None:
                return self._forget_all(tensors)
        elif not self._mirrors or all(self.of(tensor) is None for tensor in tensors):
            return None
        if self._computed(func, args, kwargs, operator.is_random) is None:
            self._forget_all(tensors)
        return None

    def _known_sources(self, args: Any, kwargs: Any) -> bool:
        return all(self.of(tensor) is not None for tensor in (*tensors_in(args), *tensors_in(list(kwargs.values()))))

    def _is_whole(self, tensor: Any) -> bool:
        """Whether a tensor of a moderate size is all of its storage."""
        if not isinstance(tensor, FakeTensor) or not _fits(tensor) or tensor.layout is not torch.strided:
            return False
        return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())

    def _computed(self, func: Any, args: Any, kwargs: Any, is_random: bool = False) -> Any:
        """``func`` on the host, writing into what is kept here; None where an argument is not known or it fails."""
        known: dict[int, torch.Tensor] = {}
        for tensor in (*tensors_in(args), *tensors_in(list(kwargs.values()))):
            value = self.of(tensor)
            if value is None:
                return None
            known[id(tensor)] = value
        host_args = _on_host(args, known)
        host_kwargs = {name: _on_host(value, known) for name, value in kwargs.items() if name != "pin_memory"}
        if is_random:
            func = _with_generator(func)
            if func is None:
                return None
            host_kwargs["generator"] = self._draws
        try:
            with unset_fake_temporarily(), torch.no_grad():
                return func(*host_args, **host_kwargs)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return None  # the host cannot, or will not: then nothing is known of the result

    # --- the book -----------------------------------------------------------------------------------------------------

    def _mirror(self, tensor: FakeTensor) -> _Mirror | None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if storage.nbytes() > 8 * INTEGER_LIMIT:
            return None
        mirror = self._mirrors.get(key)
        if mirror is None or mirror.bytes.nbytes() != storage.nbytes():

            def died(_: Any) -> None:
                self._mirrors.pop(key, None)

            mirror = self._mirrors[key] = _Mirror(storage, died)
        return mirror

    def forget(self, tensor: Any) -> None:
        """Nobody knows the values of the tensor's storage any longer."""
        if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            self._mirrors.pop(tensor.untyped_storage()._cdata, None)

    def _forget_all(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            self.forget(tensor)


def _with_generator(func: Any) -> Any:
    """The overload of a random operator that takes a generator: draws here must not disturb the process's own. None if
    there is none."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = func._overloadname
    return getattr(func.overloadpacket, "generator" if name == "default" else f"{name}_generator", None)


def _fits(tensor: torch.Tensor) -> bool:
    limit = FLOAT_LIMIT if tensor.is_floating_point() or tensor.is_complex() else INTEGER_LIMIT
    return bool(tensor.numel() <= limit)


def _view(data: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    with unset_fake_temporarily():
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(data, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_host(value: Any, known: dict[int, torch.Tensor]) -> Any:
    """``value`` with what is known in place of tensors, and the host in place of devices."""
    if isinstance(value, torch.Tensor):
        return known[id(value)]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [_on_host(item, known) for item in value]
    return value


def _has_real(args: Any) -> bool:
    return any(not isinstance(tensor, FakeTensor) for tensor in tensors_in(args))
