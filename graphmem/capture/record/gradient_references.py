"""Gradients that nobody else holds, found by reference counts: sums that the engine makes in place, written views.

A tensor used several times gets several gradients, and the engine adds them up. It writes into the first one when it
holds the last reference to it and its storage and the pass is not recorded for another one (``create_graph``), except
under a dispatch mode, which every capture is (``torch/csrc/autograd/input_buffer.cpp``, ``accumulate`` and
``can_accumulate_inplace``).

After ``y.relu_()`` the history of a view ``y`` is made anew. Of an ordinary tensor it becomes
``AsStridedBackward0`` whatever made the view (``VariableHooks::grad_fn``, torch/csrc/autograd/variable.cpp), and that
one puts the gradient into zeros of the base's extent (``as_strided_backward``, FunctionsManual.cpp, 2.13). Of a tensor
that a mode in Python sees the view is called again, whose gradient is a view, too: it has no buffer, and gets it here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from graphmem.capture.kernels.parts.layout import is_dense
from graphmem.capture.torch_internals import FakeTensor, OpOverload, current_autograd_node, storage_use_count
from graphmem.capture.values.callers import called_by_engine
from graphmem.capture.values.tensors import tensors_in


class FanIn:
    """Finds by reference counts whether nobody else holds the first gradient.

    The counts of that case, seen from a dispatch mode, are the same for every fan-in of one build of PyTorch.
    """

    def __init__(self) -> None:
        self.calibrating = False
        self.counts: list[tuple[int, int, int]] = []

    def calibrate(self) -> None:
        """Learn the counts from a fan-in whose gradients nobody holds; its mode must be active."""
        self.calibrating = True
        leaf = torch.empty(2, device="cuda", requires_grad=True)
        shared = leaf * 1.0
        (shared * 2.0 + shared * 3.0).sum().backward()
        del leaf, shared
        self.calibrating = False

    def adds_in_place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if eager mode would have written this engine addition into its first argument.

        References are counted: whoever calls this must hold as many as when the counts were learnt.
        """
        if kwargs or len(args) != 2 or torch.is_grad_enabled() or not called_by_engine():
            return False
        old, new = args
        if type(old) is not FakeTensor or not isinstance(new, FakeTensor) or old.shape != new.shape:
            return False
        if old.layout is not torch.strided or new.layout is not torch.strided:
            return False
        # Not a function of its own: the references that a Python call holds depend on whether it is inlined,
        # which it no longer is once torch.compile has set a frame evaluator. The same in ``WrittenViews``.
        in_storage = storage_use_count(old.untyped_storage()._cdata)
        counts = (old._use_count(), in_storage, sys.getrefcount(old))
        if self.calibrating:
            self.counts.append(counts)
            return False
        if not self.counts or old.dtype != new.dtype:
            return False
        return counts == self.counts[0] and is_dense(old)


# --- views that were written to ---------------------------------------------------------------------------------------


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

    def note_write(self, tensor: torch.Tensor, args: Sequence[object]) -> None:
        """An operator writes to its first argument now."""
        if isinstance(tensor, FakeTensor) and tensor._is_view() and any(t.requires_grad for t in tensors_in(args)):
            self._written[id(tensor)] = weakref.ref(tensor)

    def note_use(self, args: Sequence[object]) -> None:
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
        counts = (gradient._use_count(), in_storage, sys.getrefcount(gradient))  # in place, as above
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
