"""The calls of kernels' rules, noted while a step is captured, and made once more for other sizes.

A rule looks at shapes, strides and numbers. A noted call keeps these apart: a ``form``, which is the same whatever the
size of the step, and the ``numbers`` in it, which change with the size. No tensor is kept: storages die as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from graphmem.capture.device.fake_tensors import device_tensor
from graphmem.capture.kernels.parts.script import BoundRule, Card, Script
from graphmem.capture.torch_internals import FakeTensor, FakeTensorMode, disable_current_modes, dispatch_modes
from graphmem.capture.values.tensors import on_device
from graphmem.trace import TraceBuilder

#: A value without its numbers: nested tuples that begin with the kind of the value.
Form = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call that a rule was asked about.

    ``index``: of its operator in the trace. ``rows``: the first of its events there, and the first behind it.
    ``born``: the storages that were born as its outputs, by the number of the output. ``place``: the stream, and the
    private pool, of its buffers.
    """

    operator: str
    index: int
    rule: BoundRule
    rows: tuple[int, int]
    born: tuple[tuple[int, int], ...]
    place: tuple[int, int]
    script: Script | None
    state: tuple[bool, bool]  # whether it is captured into a CUDA graph, and called by autograd's engine
    form: Form = ()
    numbers: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()


@dataclass
class CallLog:
    """All calls of a capture. ``refused``: why the capture cannot serve a template; "" where it can."""

    calls: list[NotedCall] = field(default_factory=list)
    refused: str = ""
    builder: TraceBuilder | None = None  # of the trace whose calls are noted
    flags: set[Flags] = field(default_factory=set)  # that calls were made under

    def begin(self, builder: TraceBuilder) -> None:
        """A run begins, perhaps once more."""
        self.calls, self.refused, self.builder, self.flags = [], "", builder, set()

    def note(self, call: NotedCall, values: Form, card: Card) -> None:
        """A call, without its ``values``: its arguments, keyword arguments and outputs."""
        self.flags.add(flags_now())
        if card.timed:
            self.refused = self.refused or "cuDNN times its plans (cudnn.benchmark)"
        parts = _Parts()
        try:
            form = parts.form(values)
        except _Unknown as value:
            self.refused = self.refused or f"{call.operator} is called with {value}"
            return
        self.calls.append(replace(call, form=form, numbers=tuple(parts.numbers), floats=tuple(parts.floats)))


#: Switches of PyTorch that rules read.
Flags = tuple[bool, ...]


def flags_now() -> Flags:
    """The switches of PyTorch that rules read, as they stand."""
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


class _Unknown(Exception):
    """A value that has no form."""


class _Parts:
    """A value taken apart: its numbers in order, whole ones and others."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.floats: list[float] = []
        self._storages: dict[int, int] = {}

    def form(self, value: Any) -> Form:
        """The form of a value, whose numbers are put behind those before."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if type(value) is int:
            self.numbers.append(value)
            return ("int",)
        if type(value) is float:
            self.floats.append(value)
            return ("float",)
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return (kind, *[self.form(item) for item in value])
        if isinstance(value, dict):
            return ("dict", *[(key, self.form(item)) for key, item in value.items()])
        return ("value", value)

    def _of_tensor(self, tensor: torch.Tensor) -> Form:
        if type(tensor) not in (FakeTensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise _Unknown(f"a {type(tensor).__name__} of the layout {tensor.layout}")
        storage = tensor.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        self.numbers += (*tensor.shape, *tensor.stride(), tensor.storage_offset(), storage.nbytes())
        where = "card" if on_device(tensor) else "host" if isinstance(tensor, FakeTensor) else tensor.device.type
        return ("tensor", tensor.dtype, tensor.dim(), number, tensor.requires_grad, where)


class Asked(NamedTuple):
    """What a rule said of a call, and the shapes of convolutions whose plans it predicted."""

    script: Script | None
    predicted: set[object]


class Asker:
    """Asks the rules of noted calls again, with other numbers. Inside a capture only, whose modes it uses."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._tensors = _Tensors(next(mode for mode in dispatch_modes() if isinstance(mode, FakeTensorMode)))
        self._used: dict[tuple[bool, bool], Card] = {}  # by the state of the call

    def ask(self, calls: Sequence[tuple[NotedCall, Sequence[int]]]) -> list[Asked]:
        """What is said of each call with these numbers."""
        with disable_current_modes():
            values = [
                _Rebuilt(iter(numbers), iter(call.floats), self._tensors).value(call.form) for call, numbers in calls
            ]
        return [self._asked(call, *value) for (call, _), value in zip(calls, values, strict=True)]

    def _asked(self, call: NotedCall, args: Any, kwargs: Any, outputs: Any) -> Asked:
        if call.state not in self._used:
            captured, backward = call.state
            fresh = replace(self._card, timed=set(), predicted=set())
            self._used[call.state] = fresh.used(in_graph_capture=captured, in_backward=backward)
        own = self._used[call.state]
        own.predicted.clear()
        return Asked(call.rule(args, kwargs, outputs, own), set(own.predicted))


class _Rebuilt:
    """The values of one call, made of their form and numbers."""

    def __init__(self, numbers: Iterator[int], floats: Iterator[float], tensors: _Tensors) -> None:
        self._numbers, self._floats, self._tensors = numbers, floats, tensors
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._alike = Counter[Hashable]()  # tensors of storages of their own

    def value(self, form: Form) -> Any:
        kind, *rest = form
        if kind == "tensor":
            return self._tensor(*rest)
        if kind == "int":
            return next(self._numbers)
        if kind == "list":
            return [self.value(one) for one in rest]
        if kind == "tuple":
            return tuple(self.value(one) for one in rest)
        if kind == "dict":
            return {key: self.value(one) for key, one in rest}
        return next(self._floats) if kind == "float" else rest[0]

    def _tensor(self, dtype: torch.dtype, rank: int, number: int, grad: bool, where: str) -> torch.Tensor:
        geometry = tuple(islice(self._numbers, 2 * rank + 2))
        if number in self._storages:
            return self._tensors.made(self._storages[number], dtype, geometry, grad, where)
        key = dtype, geometry, grad, where
        self._alike[key] += 1
        made = self._tensors.own(self._alike[key], *key)
        self._storages[number] = made.untyped_storage()
        return made


class _Tensors:
    """Tensors without memory, of a ``geometry``: their shape, strides, offset, and bytes of their storage. Those of
    storages of their own are made once: calls have many alike."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._own: dict[Hashable, torch.Tensor] = {}

    def own(self, number: int, dtype: torch.dtype, geometry: tuple[int, ...], grad: bool, where: str) -> torch.Tensor:
        """The tensor of this ``number`` among those alike in one call, with a storage of its own."""
        key = number, dtype, geometry, grad, where
        if key not in self._own:
            storage = torch.UntypedStorage(geometry[-1], device="meta")
            self._own[key] = self.made(storage, dtype, geometry, grad, where)
        return self._own[key]

    def made(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, geometry: tuple[int, ...], grad: bool, where: str
    ) -> torch.Tensor:
        """A tensor over a storage."""
        rank, offset = len(geometry) // 2 - 1, geometry[-2]
        made = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, geometry[:rank], geometry[rank:-2])
        if grad:
            made.requires_grad_()
        if where == "meta":  # a list in a subscript is the one kind that is not fake
            return made
        return device_tensor(FakeTensor, self._mode, made) if where == "card" else FakeTensor(self._mode, made, _HOST)


_HOST = torch.device("cpu")
