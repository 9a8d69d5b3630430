"""Whose work an operator is: the module that runs, the user's line, and the node of the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.script import BoundRule
from graphmem.capture.operators.facts import OperatorFacts
from graphmem.capture.operators.gradient_formulas import OTHER_WAYS
from graphmem.capture.record.storages import StorageRef, Storages
from graphmem.capture.torch_internals import FakeTensor, current_autograd_node, next_sequence_number
from graphmem.capture.values.callers import called_by_engine, user_line
from graphmem.capture.values.tensors import tensors_in
from graphmem.diagnostics import Diagnostic


class OperatorCall:
    """``rule`` is the operator's, or that of the one in whose place this one runs."""

    __slots__ = ("args", "facts", "func", "in_backward", "kwargs", "rule")

    def __init__(self, facts: OperatorFacts, args: Sequence[Any], kwargs: dict[str, Any], in_backward: bool) -> None:
        self.facts = facts
        self.func = facts.func
        self.args = args
        self.kwargs = kwargs
        self.in_backward = in_backward
        self.rule: BoundRule | None = facts.rule


#: From an operator's line to the caller of the recorder: :meth:`Attribution.note`, and two of the recorder's.
_OWN_FRAMES = 3
_ADD = torch.ops.aten.add.Tensor


class Attribution:
    """Writes the operators of a trace.

    In the backward pass an operator belongs to the module and line of the forward operator that made its node, found
    by autograd's sequence number. ``module`` is the path of the module whose ``forward`` runs now, ``module_depth`` how
    many are on the stack.
    """

    def __init__(self, storages: Storages) -> None:
        self.module = ""
        self.module_depth = 0
        self._storages = storages
        self._streams = storages.streams
        self._by_sequence: dict[int, tuple[str, str]] = {}
        self._first_gradient: int | None = None  # while gradients are computed: the first storage that is one
        self._node_start = ((-1, ""), 0)  # number and name of the backward node, storages before it
        #: What is assumed of nodes whose formulas go another way than on a card, and how often.
        self.assumed: Counter[Diagnostic] = Counter()

    def note(self, call: OperatorCall, phase: int) -> None:
        """The operator is called now: storages born from here on are its work."""
        builder, in_backward = self._storages.builder, call.in_backward
        if in_backward:
            module, source = self.module, ""
            node = current_autograd_node()
            if node is not None:
                sequence = node._sequence_nr()
                module, source = self._by_sequence.get(sequence, (module, ""))
                named = (sequence, type(node).__name__)  # nodes of two threads may have the same number
                if named != self._node_start[0]:
                    self._node_start = (named, len(builder.storage_bytes))
                    if type(node).__name__ in OTHER_WAYS:
                        self.assumed[OTHER_WAYS[type(node).__name__]] += 1
        if not in_backward or self.module_depth:  # a module that runs in the backward pass is being recomputed
            module = self.module
            source = user_line(_OWN_FRAMES)
            if torch.is_grad_enabled():
                # The first operator after a node was made is the one it belongs to; later ones may make no node.
                last = next_sequence_number() - 1
                self._by_sequence.setdefault(last, (module, source))
                self._streams.note_forward(last, call.args)
        self._storages.operator = builder.operator(call.facts.name, module, phase, source)
        if self._streams.used:
            self._gradients_change_stream(call)

    def is_of_node(self, ref: StorageRef) -> bool:
        """True if the storage was made by the node of the backward pass that runs now."""
        return ref.index >= self._node_start[1]

    def adds_in_formula(self, tensor: torch.Tensor) -> bool:
        """True if an addition to ``tensor`` is part of a gradient's formula, which adds up its own results.

        The engine adds to a tensor of an earlier node, unless one node has two gradients for one input.
        """
        node = current_autograd_node()
        ref = self._storages.of(tensor) if isinstance(tensor, FakeTensor) else None
        if node is None or ref is None or not self.is_of_node(ref):
            return False
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        return len(set(inputs)) == len(inputs)

    def _gradients_change_stream(self, call: OperatorCall) -> None:
        """The engine calls ``record_stream`` on a gradient that a node on another stream will use
        (torch/csrc/autograd/input_buffer.cpp)."""
        builder = self._storages.builder
        storages = builder.storage_bytes
        if not call.in_backward:
            self._first_gradient = None
            return
        if self._first_gradient is None:
            self._first_gradient = len(storages) - 1  # the one of the loss, made just before
        end = self._node_start[1]
        if call.func is _ADD and called_by_engine():
            self._streams.add_gradients(call.args[0])
            end = len(storages)
        for tensor in tensors_in(call.args):
            ref = self._storages.of(tensor) if tensor.layout is torch.strided else None
            if ref is None or not self._first_gradient <= ref.index < end:
                continue
            if builder.streams[ref.index] != self._streams.current:
                self._storages.record_stream(tensor, self._streams.current)
