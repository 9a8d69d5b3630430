"""Operators as they are computed on the host: the tensors they write, bounds of their results, their random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from graphmem.capture.torch_internals import FakeTensor, OpOverload, unset_fake_temporarily
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
#: Errors of a host operator: then nothing is known of its result.
FAILURES = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)


#: Operators that take a few elements out of a tensor of any size.
LOOK_UPS = {_aten.index.Tensor, _aten.index_select.default, _aten.embedding.default, _aten.gather.default}
_FROM_ZERO = {_aten.randint.default, _aten.randint.generator}


class HostOperator:
    """The properties of an operator that following needs: which arguments it writes, whether its results are views."""

    __slots__ = ("follows", "is_random", "is_unwritten", "is_view", "name", "overwrites", "written")

    def __init__(self, func: OpOverload) -> None:
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

    def targets(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
        """The tensors that a call writes into."""
        for position, name, is_out in self.written:
            yield from tensors_in(kwargs.get(name) if is_out or position >= len(args) else args[position])


host_operator = cache(HostOperator)


class HostCall(NamedTuple):
    """A call of an operator, to be computed on the host."""

    func: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def operator(self) -> HostOperator:
        return host_operator(self.func)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return list(tensors_in((self.args, self.kwargs)))

    @property
    def targets(self) -> list[torch.Tensor]:
        """The tensors that it writes into."""
        return list(self.operator.targets(self.args, self.kwargs))

    def on_host(self, known: Mapping[int, object], **options: object) -> HostCall:
        """The same with ``known`` in place of tensors, by identity, the host in place of devices, and ``options``."""
        kwargs = {name: on_host(value, known) for name, value in self.kwargs.items() if name != "pin_memory"}
        return HostCall(self.func, on_host(self.args, known), {**kwargs, **options})

    def run(self) -> object:
        """The operator's result. Raises what it raises."""
        return self.func(*self.args, **self.kwargs)

    def draw(self) -> object:
        """A random operator's result on real tensors, from the generator that it is given, else the program's."""
        if not self.operator.is_random or generators.named(self.kwargs.get("generator")) is not None:
            return self.run()
        host = generators.current()
        seeded = self.drawing_from(host.settled())
        if seeded is not None:
            return seeded.run()
        with generators.in_place_of_default(host.settled()):
            return self.run()

    def drawing_from(self, generator: object) -> HostCall | None:
        """The call of the overload that takes a generator: draws here must not disturb the process's own. None if
        there is none."""
        func = self.func
        if all(argument.name != "generator" for argument in func._schema.arguments):
            name = func._overloadname
            func = getattr(func.overloadpacket, "generator" if name == "default" else f"{name}_generator", None)
        return None if func is None else HostCall(func, self.args, {**self.kwargs, "generator": generator})

    def words_drawn(self, target: FakeTensor) -> int | None:
        """The words that a random operator draws on the host for its result; None where the shape does not show it."""
        name = self.operator.name
        if name == "aten::randint":  # ``random_from_to``, ATen/native/cpu/DistributionTemplates.h
            low, high = (0, self.args[0]) if self.func in _FROM_ZERO else self.args[:2]
            return int(target.numel()) if high - low < 1 << 28 else None
        if name == "aten::randperm":
            return max(0, int(target.numel()) - 1)
        if name in _UNIFORM:
            return generators.words_of_uniform(target.numel(), target.dtype)
        if name in _NORMAL and target.is_contiguous() and not target.is_complex():
            return generators.words_of_normal(target.numel(), target.dtype)
        return None

    def elements_at_most(self) -> int:
        """More elements than the result can have, mostly: the product of all arguments."""
        if torch.Tag.pointwise in self.func.tags:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(self.args)]
            return int(math.prod(max(sizes) for sizes in _aligned(shapes)))
        return int(math.prod(_elements(value) for value in self.args))

    def bytes_on_meta(self) -> int:
        """Bytes of the result, from shapes; where they are data, as many as the arguments have."""
        tensors = self.tensors
        with unset_fake_temporarily(), torch.no_grad():
            try:
                like = {
                    id(tensor): torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                    for tensor in tensors
                }
                meta = {"device": torch.device("meta")} if "device" in self.kwargs else {}
                kept = {name: value for name, value in self.kwargs.items() if name != "generator"}
                out = HostCall(self.func, self.args, kept).on_host(like, **meta).run()
                return sum(int(tensor.nbytes) for tensor in tensors_in(out))
            except FAILURES:
                return sum(int(8 * max(1, tensor.dim()) * tensor.numel()) for tensor in tensors)

    def names_device(self) -> bool:
        """Whether a device other than the host is named: by position in ``aten.to.device``, which arrives whole in
        inference mode."""
        named = (*(value for value in self.args if isinstance(value, torch.device)), self.kwargs.get("device"))
        places = [torch.device(device) for device in named if device is not None]
        return any(place.type != "cpu" or place == NOWHERE for place in places)


def _aligned(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[int]]:
    for position in range(1, max(map(len, shapes), default=0) + 1):
        yield [shape[-position] if position <= len(shape) else 1 for shape in shapes]


def _elements(value: object) -> int:
    """The elements that an argument may stand for; at least 1."""
    if isinstance(value, torch.Tensor):
        return max(1, int(value.numel()))
    if isinstance(value, int):
        return max(1, abs(value))
    if not isinstance(value, (list, tuple)):
        return 1
    tensors = [item for item in value if isinstance(item, torch.Tensor)]
    if tensors:
        return max(1, sum(int(tensor.numel()) for tensor in tensors))
    return math.prod(max(1, abs(item)) for item in value if isinstance(item, int))


def on_host(value: object, known: Mapping[int, object]) -> Any:
    """``value`` with what is known in place of tensors, and the host in place of devices."""
    if isinstance(value, torch.Tensor):
        return known[id(value)]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return [on_host(item, known) for item in value]
    return value


def has_real(args: Iterable[object]) -> bool:
    """Whether one of the tensors is no fake."""
    return any(not isinstance(tensor, FakeTensor) for tensor in tensors_in(args))
