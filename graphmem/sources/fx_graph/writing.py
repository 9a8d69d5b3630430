"""A planned order written back into an fx graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Node
from graphmem.plan_memory.offloading import Offload
from graphmem.plan_memory.recompute.answer import Remat, check_same
from graphmem.sources.fx_graph.reading import FxGraph, read
from graphmem.sources.fx_graph.values import CALLS, tensors


def apply_order(module: fx.GraphModule, order: Sequence[int], *example_inputs: object) -> fx.GraphModule:
    """A copy of ``module`` whose calls run in ``order``: indices of the nodes of :func:`from_fx`'s graph.

    Raises :class:`graphmem.errors.GraphError` unless that is an order of them.
    """
    found = read(module, *example_inputs)
    return _written(found, found.graph.checked(order))


def apply_remat(module: fx.GraphModule, answer: Remat, *example_inputs: object) -> fx.GraphModule:
    """A copy of ``module`` that follows the steps of ``answer``: some of its calls run more than once.

    Names of what runs again end in ``_again``. The copy computes what ``module`` does.
    """
    found = read(module, *example_inputs)
    check_same(answer.source, found.graph)
    return _written(found, answer.steps)


def apply_offload(module: fx.GraphModule, answer: Offload, *example_inputs: object) -> fx.GraphModule:
    """A copy of ``module`` in which the buffers of ``answer`` are copied to the host and back.

    Raises :class:`graphmem.errors.GraphError` for buffers that a node writes in place: its results would keep them.
    """
    found = read(module, *example_inputs)
    check_same(answer.source, found.graph)
    written = {buffer for node in found.graph.nodes for buffer in node.updates}
    for move in answer.moves:
        if move.buffer in written:
            name = found.graph.buffers[move.buffer].name
            raise GraphError(f"{name} is written in place and cannot be moved; make the graph functional first")
    writer = _Writer(found)
    writes = {"to host": writer.to_host, "to device": writer.to_device}
    for what, number in answer.steps:
        if what == "run":
            writer.run(found.nodes[number])
        else:
            writes[what](number)
    return writer.finished()


def _written(found: FxGraph, steps: Sequence[int]) -> fx.GraphModule:
    writer = _Writer(found)
    for step in steps:
        writer.run(found.nodes[step])
    return writer.finished()


class _Writer:
    """Writes calls into a new graph. A reader is given the newest run of what it reads; views of something older are
    written once more."""

    def __init__(self, found: FxGraph) -> None:
        self._found = found
        self._graph = fx.Graph(tracer_cls=found.source._tracer_cls)
        self._graph._codegen = found.source._codegen
        self._newest: dict[fx.Node, fx.Node] = {}
        self._runs: dict[int, int] = {}  # of a buffer: how often it has been made
        self._seen: dict[fx.Node, tuple[int, ...]] = {}  # the runs of its buffers that a written node refers to
        self._on_host: dict[int, fx.Node] = {}
        self._is_backward = False  # of a joint graph: its backward part has begun
        for node in found.source.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._newest[node] = self._graph.node_copy(node, self._current)

    def run(self, node: fx.Node) -> None:
        """Write a step; a view that a reader has needed already is there."""
        if not (self._is_view(node) and self._seen.get(node) == self._versions(node)):
            self._emit(node)

    def _emit(self, node: fx.Node) -> None:
        is_again = node in self._newest
        made = self._graph.node_copy(node, self._current)
        self._tag(made)
        if is_again:
            made.name = self._graph._graph_namespace.create_name(f"{node.name}_again", None)
        for buffer in self._step(node).makes:
            self._runs[buffer] = self._runs.get(buffer, 0) + 1
        self._newest[node], self._seen[node] = made, self._versions(node)

    def to_host(self, buffer: int) -> None:
        """Copy a buffer to the host: the tensor that its maker gave."""
        self._on_host[buffer] = self._copied(self._current(self._base(buffer)), torch.device("cpu"))

    def to_device(self, buffer: int) -> None:
        """Copy it back: from now on that is what everybody reads."""
        base = self._base(buffer)
        device = next(tensors(self._found.values[base])).device
        self._runs[buffer] = self._runs.get(buffer, 0) + 1
        self._newest[base] = self._copied(self._on_host.pop(buffer), device)
        self._seen[base] = self._versions(base)

    def _copied(self, node: fx.Node, device: torch.device) -> fx.Node:
        return self._graph.call_function(torch.ops.aten._to_copy.default, (node,), {"device": device})

    def _base(self, buffer: int) -> fx.Node:
        """The first node whose value is one tensor in this buffer: what made it, or what picks it out of several."""
        return next(node for node in self._found.nodes if self._found.buffers[node] == (buffer,))

    def _tag(self, made: fx.Node) -> None:
        """AOTAutograd's partitioners go by a tag: what runs after the backward part has begun is part of it."""
        tag = made.meta.get("partitioner_tag")
        self._is_backward = self._is_backward or tag == "is_backward"
        if tag == "is_forward" and self._is_backward:
            made.meta["partitioner_tag"] = "is_backward"

    def finished(self) -> fx.GraphModule:
        output = next(node for node in self._found.source.nodes if node.op == "output")
        self._graph.node_copy(output, self._current)
        self._graph.lint()
        module = fx.GraphModule(self._found.owner, self._graph)
        module.meta.update(getattr(self._found.owner, "meta", {}))
        return module

    def _current(self, node: fx.Node) -> fx.Node:
        if self._is_view(node) and self._seen.get(node) != self._versions(node):
            self._emit(node)
        return self._newest[node]

    def _is_view(self, node: fx.Node) -> bool:
        return node.op in CALLS and not (self._step(node).makes or self._step(node).updates)

    def _versions(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self._runs.get(buffer, 0) for buffer in self._found.buffers[node])

    def _step(self, node: fx.Node) -> Node:
        return self._found.graph.nodes[self._found.numbers[node]]
