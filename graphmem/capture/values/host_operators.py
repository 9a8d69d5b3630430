"""Operators as they are computed on the host: what they write, what they may return, what they draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmem.capture.torch_internals import FakeTensor, unset_fake_temporarily
from graphmem.capture.values import generators
from graphmem.capture.values.tensors import NOWHERE, tensors_in

_aten = torch.ops.aten

#: Operators whose results have no values yet.
_UNWRITTEN = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default, _aten.new_empty.default,
    _aten.new_empty_strided.default, _aten.empty_permuted.default,
}  # fmt: skip
#: Operators that give a storage another size.
RESIZING = {_aten.resize_.default, _aten.resize_as_.default}
#: Operators that write every element of their first argument and read none of it.
_OVERWRITING = {
    "aten::copy_", "aten::fill_", "aten::zero_", "aten::random_", "aten::uniform_", "aten::normal_", "aten::bernoulli_",
    "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_",
}  # fmt: skip
#: Random operators whose draws are counted by shape.
_UNIFORM = {"aten::uniform_", "aten::rand", "aten::rand_like"}
_NORMAL = {"aten::normal_", "aten::randn", "aten::randn_like", "aten::normal"}
#: What a host operator may raise: then nothing is known of its result.
FAILURES = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)


class HostOperator:
    """What following needs to know of an operator: which arguments it writes, and whether its results are views."""

    __slots__ = ("follows", "is_random", "is_unwritten", "is_view", "name", "overwrites", "written")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name
        self.written = tuple(
            (position, argument.name, argument.is_out)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        aliases = [returned.alias_info for returned in schema.returns]
        self.is_view = not self.written and bool(aliases) and all(alias is not None for alias in aliases)
        self.overwrites = schema.name in _OVERWRITING
        takes_generator = any(argument.name == "generator" for argument in schema.arguments)
        self.is_random = takes_generator or torch.Tag.nondeterministic_seeded in func.tags
        self.is_unwritten = func in _UNWRITTEN
        known = func.namespace == "aten" and func not in RESIZING
        self.follows = known and bool(schema.returns or self.written)

    def targets(self, args: Any, kwargs: Any) -> Iterator[Any]:
        """The tensors that a call writes into."""
        for position, name, is_out in self.written:
            yield from tensors_in(kwargs.get(name) if is_out or position >= len(args) else args[position])


#: Operators that take a few elements out of a tensor of any size.
LOOK_UPS = {_aten.index.Tensor, _aten.index_select.default, _aten.embedding.default, _aten.gather.default}


_FROM_ZERO = {_aten.randint.default, _aten.randint.generator}


def words_drawn(operator: HostOperator, func: Any, args: Any, target: FakeTensor) -> int | None:
    """The words that a random operator draws on the host for what it makes; None where its shape does not tell."""
    if operator.name == "aten::randint":  # ``random_from_to``, ATen/native/cpu/DistributionTemplates.h
        low, high = (0, args[0]) if func in _FROM_ZERO else args[:2]
        return int(target.numel()) if high - low < 1 << 28 else None
    if operator.name == "aten::randperm":
        return max(0, int(target.numel()) - 1)
    if operator.name in _UNIFORM:
        return generators.words_of_uniform(target.numel(), target.dtype)
    if operator.name in _NORMAL and target.is_contiguous() and not target.is_complex():
        return generators.words_of_normal(target.numel(), target.dtype)
    return None


def drawing(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A random operator on real tensors: it draws from the generator that it is given, else from the program's."""
    if generators.named(kwargs.get("generator")) is not None:
        return func(*args, **kwargs)
    host = generators.current()
    with_generator = overload_with_generator(func)
    if with_generator is not None:
        return with_generator(*args, **{**kwargs, "generator": host.settled()})
    with generators.in_place_of_default(host.settled()):
        return func(*args, **kwargs)


def overload_with_generator(func: Any) -> Any:
    """The overload of a random operator that takes a generator: draws here must not disturb the process's own. None if
    there is none."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = func._overloadname
    return getattr(func.overloadpacket, "generator" if name == "default" else f"{name}_generator", None)


def elements_at_most(func: Any, args: Any) -> int:
    """More elements than the result of an operator can have, mostly: the product of all that it is given."""
    if torch.Tag.pointwise in func.tags:
        shapes = [tuple(tensor.shape) for tensor in tensors_in(args)]
        return _product(max(sizes) for sizes in _aligned(shapes))
    elements = 1
    for value in args:
        if isinstance(value, torch.Tensor):
            elements *= max(1, value.numel())
        elif isinstance(value, int):
            elements *= max(1, abs(value))
        elif isinstance(value, (list, tuple)):
            if any(isinstance(item, torch.Tensor) for item in value):
                elements *= max(1, sum(item.numel() for item in value if isinstance(item, torch.Tensor)))
            else:
                elements *= _product(max(1, abs(item)) for item in value if isinstance(item, int))
    return elements


def _aligned(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    for position in range(1, max(map(len, shapes), default=0) + 1):
        yield [shape[-position] if position <= len(shape) else 1 for shape in shapes]


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def bytes_on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes of what an operator returns, from shapes; where they are data, as many as its arguments have."""
    tensors = list(tensors_in((args, list(kwargs.values()))))
    with unset_fake_temporarily(), torch.no_grad():
        try:
            like = {
                id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                for tensor in tensors
            }
            named = {"device": torch.device("meta")} if "device" in kwargs else {}
            kept = {name: on_host(v, like) for name, v in kwargs.items() if name not in ("pin_memory", "generator")}
            out = func(*on_host(args, like), **{**kept, **named})
            return sum(tensor.nbytes for tensor in tensors_in(out))
        except FAILURES:
            return sum(8 * max(1, tensor.dim()) * tensor.numel() for tensor in tensors)


def on_host(value: Any, known: dict[int, Any]) -> Any:
    """``value`` with what is known in place of tensors, and the host in place of devices."""
    if isinstance(value, torch.Tensor):
        return known[id(value)]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [on_host(item, known) for item in value]
    return value


def names_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call names a device other than the host: by position in ``aten.to.device``, which arrives whole in
    inference mode."""
    named = (*(value for value in args if isinstance(value, torch.device)), kwargs.get("device"))
    places = [torch.device(device) for device in named if device is not None]
    return any(place.type != "cpu" or place == NOWHERE for place in places)


def has_real(args: Any) -> bool:
    """Whether one of the tensors is no fake."""
    return any(not isinstance(tensor, FakeTensor) for tensor in tensors_in(args))
