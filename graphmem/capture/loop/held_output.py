"""Finds the tensors that stay alive as long as a variable of the loop holds the model's output.

Both loops (:data:`graphmem.training.LOOPS`) run the same operators; they differ in when the output and the loss are let
go. So one run gives both: the output and the loss are dropped as early as ``drop`` drops them, and the book
(:class:`~graphmem.capture.record.both_loops.BothLoops`) moves the frees of what ``hold`` would have kept to where its
variables are assigned again. That is exact where the tensors that the output keeps are known, :func:`held_by`:

- it is made of dictionaries, lists, tuples and plain objects that nothing else refers to, so what it holds does not
  change while it is held, and all of it is let go with it;
- its tensors' autograd nodes are nodes of the loss, which both loops keep alive beyond the backward pass. That pass
  runs them all and releases what they have saved (``release_variables``, torch/csrc/autograd/engine.cpp), so beyond it
  the output keeps the storages of its own tensors and no others;
- no node keeps a tensor in an attribute, which no backward pass releases.

In every other case the loop that was asked for is run as it is written. Hooks are not looked into: one that lets a node
of the graph refer to a tensor that others hold too, and let go between the optimizer step and the next loss, would be
freed there in both loops.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from graphmem.capture.torch_internals import FakeTensor

#: Values that hold no tensor.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format,
)  # fmt: skip
#: Objects inside objects, beyond which nobody looks.
_DEPTH = 12


class _Unknown(Exception):
    """The objects that a value holds are not known."""


def held_by(roots: tuple[object, ...], loss: object) -> list[int] | None:
    """The storages (``_cdata``) that an output keeps alive, in the order in which CPython lets them go; None where it
    is not known. ``roots`` is a tuple of the output alone, of which one variable holds it; ``loss`` is its loss."""
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
        return None
    walk = _Walk()
    try:
        walk.into(roots, _DEPTH)
        walk.check_owned(roots[0])
        _check_graph(loss.grad_fn, walk.tensors)
    except _Unknown:
        return None
    keys = [tensor.untyped_storage()._cdata for tensor in walk.tensors]
    last = {key: position for position, key in enumerate(keys)}
    return sorted(last, key=last.__getitem__)


def _references(items: Iterable[object]) -> Iterator[tuple[Any, int]]:
    """Every item with its count of references, as it is counted here."""
    for item in items:
        yield item, sys.getrefcount(item)


#: What :func:`_references` counts of an object that only the container refers to.
_OWNED = next(_references([object()]))[1]


class _Walk:
    """Everything that a value refers to: its tensors, in the order in which they are let go."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._met: Counter[int] = Counter()  # containers by id: how often
        self._held: dict[int, list[torch.Tensor]] = {}  # what they hold
        self._counted: dict[int, int] = {}  # their references
        self._constant: set[int] = set()  # those that cannot change

    def into(self, items: Iterable[object], depth: int) -> None:
        """Look into every item, in the order in which their container lets go of them."""
        for item, references in _references(items):
            if isinstance(item, torch.Tensor):
                self._note(item)
            elif not isinstance(item, _PLAIN):
                self._met[id(item)] += 1
                self._counted[id(item)] = references
                if id(item) in self._held:
                    self.tensors += self._held[id(item)]  # the last reference is the one that counts
                    continue
                before = len(self.tensors)
                self._into_one(item, depth)
                self._held[id(item)] = self.tensors[before:]
                if type(item) is tuple:
                    self._constant.add(id(item))

    def check_owned(self, root: object) -> None:
        """Raises :class:`_Unknown` where something else refers to one of the containers; ``root`` is in a variable."""
        for key, references in self._counted.items():
            if key not in self._constant:
                variables = 1 if key == id(root) else 0
                if references != _OWNED - 1 + self._met[key] + variables:
                    raise _Unknown

    def _into_one(self, value: object, depth: int) -> None:
        if not depth or isinstance(value, nn.Module) or callable(value):
            raise _Unknown
        if isinstance(value, (list, tuple)):  # from the last to the first: list_dealloc, tuple_dealloc
            attributes: Any = getattr(value, "__dict__", {})
            self.into(attributes.values(), depth - 1)
            self.into(reversed(value), depth - 1)
        elif isinstance(value, dict):
            self.into(getattr(value, "__dict__", {}).values(), depth - 1)
            self.into(value.values(), depth - 1)
        elif hasattr(value, "__dict__") and not any(vars(one).get("__slots__") for one in type(value).__mro__):
            self.into(vars(value).values(), depth - 1)
        else:
            raise _Unknown

    def _note(self, tensor: torch.Tensor) -> None:
        if type(tensor) not in (FakeTensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise _Unknown
        if tensor.retains_grad or (tensor.is_leaf and tensor.requires_grad and type(tensor) is not nn.Parameter):
            raise _Unknown  # its gradient goes with it
        if any(isinstance(value, torch.Tensor) for value in vars(tensor).values()):
            raise _Unknown
        self.tensors.append(tensor)


def _check_graph(root: Node, tensors: Iterable[torch.Tensor]) -> None:
    """Raises :class:`_Unknown` where a tensor has a node that is none of the loss, or a node holds tensors itself."""
    nodes = {root}
    to_visit = [root]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, torch.autograd.function.FunctionCtx):
            _check_context(node)
        for other, _ in node.next_functions:
            if other is not None and other not in nodes:
                nodes.add(other)
                to_visit.append(other)
    for tensor in tensors:
        for one in (tensor, tensor._base):
            if one is not None and one.grad_fn is not None and one.grad_fn not in nodes:
                raise _Unknown


def _check_context(context: object) -> None:
    for value in vars(context).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            raise _Unknown
