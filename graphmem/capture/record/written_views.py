"""Views that were written to: on a card their gradients go through a buffer of their base's size.

After ``y.relu_()`` the history of a view ``y`` is made anew. Of an ordinary tensor it becomes
``AsStridedBackward0`` whatever made the view (``VariableHooks::grad_fn``, torch/csrc/autograd/variable.cpp), and that
one puts the gradient into zeros of the base's extent (``as_strided_backward``, FunctionsManual.cpp, 2.13). Of a tensor
that a mode in Python sees the view is called again, whose gradient is a view, too: it has no buffer, and gets it here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from graphmem.capture.torch_internals import FakeTensor, OpOverload, current_autograd_node, storage_use_count
from graphmem.capture.values.tensors import tensors_in

#: Nodes whose gradients are views; others (``SelectBackward0``, ``SliceBackward0``) make zeros of that size themselves.
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("View", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Alias")
) | {"SqueezeBackward1", "SqueezeBackward2"}
#: One of each kind: how many references there are to a gradient depends on the operator that takes it.
_MADE: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda base: base.view(1, 2),
    lambda base: base.t(),
    lambda base: base.transpose(0, 1),
    lambda base: base.permute(1, 0),
    lambda base: base.unsqueeze(0),
    lambda base: base.squeeze(1),
)
_MARK = "graphmem: base that was written to"


class WrittenViews:
    """``marked``: there are nodes whose gradients take a buffer."""

    def __init__(self) -> None:
        self.marked = False
        self.calibrating = False
        self._written: dict[int, weakref.ref[torch.Tensor]] = {}
        self.counts: dict[Any, tuple[int, int, int]] = {}

    def calibrate(self) -> None:
        """Learn the counts of references to a gradient that nobody else holds; its mode must be active."""
        self.calibrating = True
        leaf = torch.empty(2, 1, device="cuda", requires_grad=True)
        for make in _MADE:
            view = make(leaf * 1.0)
            view.relu_()
            (view * 2.0).sum().backward()
            del view
        del leaf
        self.calibrating = self.marked = False

    def note_write(self, tensor: torch.Tensor, args: Sequence[Any]) -> None:
        """An operator writes to its first argument now."""
        if isinstance(tensor, FakeTensor) and tensor._is_view() and any(t.requires_grad for t in tensors_in(args)):
            self._written[id(tensor)] = weakref.ref(tensor)

    def note_use(self, args: Sequence[Any]) -> None:
        """An operator that autograd follows has taken its arguments: the history of those written to is new."""
        for tensor in tensors_in(args):
            written = self._written.pop(id(tensor), None)
            view = None if written is None else written()
            if view is not None and view is tensor:
                self._mark(view.grad_fn, view._base)
        self._written = {key: ref for key, ref in self._written.items() if ref() is not None}

    @property
    def is_waiting(self) -> bool:
        """True if views were written to that nothing has used since."""
        return bool(self._written)

    def _mark(self, node: Node, base: torch.Tensor | None) -> None:
        """The node, if there is nothing but views from it to the base's."""
        first = node
        while node is not None and type(node).__name__ in _VIEWS:
            node = node.next_functions[0][0]
        if node is not first and node is not None and node.name().endswith("CopySlices") and base is not None:
            first.metadata[_MARK] = _extent(base)
            self.marked = True

    def extent(self) -> int | None:
        """Elements that the base stretches over, in the node of a view that was written to."""
        node = current_autograd_node()
        return None if node is None else node.metadata.get(_MARK)

    def holds_alone(self, func: OpOverload, gradient: torch.Tensor) -> bool:
        """True if only the node that calls ``func`` holds the gradient, which then ends with it. References are
        counted: whoever calls this must hold as many as when the counts were learnt."""
        in_storage = storage_use_count(gradient.untyped_storage()._cdata)
        counts = (gradient._use_count(), in_storage, sys.getrefcount(gradient))  # in place, as fan_in says
        if self.calibrating:
            self.counts[func] = counts
        alone = self.counts.get(func)
        return alone is not None and all(now <= then for now, then in zip(counts, alone, strict=True))


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one that a tensor has."""
    if not tensor.numel():
        return 0
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1
