"""The recorded operators as a ``torch.fx`` graph: one ``call_function`` node an operator, in the order they ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from graphmem.capture.torch_internals import OpOverload


class GraphRecorder:
    """Builds the graph while a step is recorded.

    Tensors that existed before their first use (parameters, inputs, literals) become placeholders. A node's ``meta``
    holds ``operator`` (index into ``Trace.operators``), ``module``, ``source``, ``phase`` (text), and the outputs'
    ``shape`` and ``dtype`` (nested as the output is).
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None

    def record(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        out: object,
        meta: dict[str, object],
    ) -> None:
        """Add the node of one operator call."""
        arguments = tuple(self._argument(value) for value in args)
        keywords = {name: self._argument(value) for name, value in kwargs.items()}
        node = self.graph.call_function(func, arguments, keywords)
        node.meta.update(meta, shape=_map(out, lambda t: tuple(t.shape)), dtype=_map(out, lambda t: t.dtype))
        if isinstance(out, torch.Tensor):
            self._nodes[id(out)] = node
        elif isinstance(out, (list, tuple)):
            self._name_items(node, out)

    def _name_items(self, node: fx.Node, out: Sequence[object]) -> None:
        import operator

        for position, item in enumerate(out):
            if isinstance(item, torch.Tensor):
                self._nodes[id(item)] = self.graph.call_function(operator.getitem, (node, position))

    def _argument(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            known = self._nodes.get(id(value))
            return known if known is not None else self._placeholder(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, dict):
            return {key: self._argument(item) for key, item in value.items()}
        return value

    def _placeholder(self, tensor: torch.Tensor) -> fx.Node:
        """Placeholders stand together at the top, where ``torch.fx`` wants them."""
        anchor = self._last_placeholder
        with self.graph.inserting_after(anchor) if anchor is not None else self.graph.inserting_before(self._first()):
            node = self.graph.placeholder(f"tensor_{len(self._nodes)}")
        node.meta.update(shape=tuple(tensor.shape), dtype=tensor.dtype)
        self._last_placeholder = self._nodes[id(tensor)] = node
        return node

    def _first(self) -> fx.Node | None:
        return next(iter(self.graph.nodes), None)


def _map(value: object, function: Callable[[torch.Tensor], object]) -> object:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return tuple(_map(item, function) for item in value)
    return None
