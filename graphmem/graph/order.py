"""The order in which ONNX Runtime executes the nodes of a graph."""

from __future__ import annotations

from collections.abc import Sequence

from graphmem.errors import SourceError
from graphmem.graph.model import Node


def execution_order(nodes: Sequence[Node], ranks: Sequence[int] | None = None) -> list[int]:
    """Indices of ``nodes`` in ONNX Runtime's default execution order; ``ranks`` are the nodes' indices in ONNX Runtime,
    by default those in ``nodes``.

    A depth-first walk against the data flow, from the nodes nobody consumes (``Graph::ReverseDFSFrom`` as called by
    ``GraphViewer``): the last leaf and the producer with the highest index are explored first. Checked against the
    executed order of 1.31.1. Raises :class:`SourceError` for a cycle or a tensor produced twice.
    """
    producers = _producers(nodes)
    rank = range(len(nodes)) if ranks is None else ranks
    inputs_of = [
        sorted({producers[name] for name in node.reads if name in producers}, key=rank.__getitem__) for node in nodes
    ]
    consumed = {producer for group in inputs_of for producer in group}
    leaves = sorted((index for index in range(len(nodes)) if index not in consumed), key=rank.__getitem__)
    stack = [(index, False) for index in leaves]
    visited: set[int] = set()
    order: list[int] = []
    while stack:
        index, leaving = stack.pop()
        if leaving:
            order.append(index)
        elif index not in visited:
            visited.add(index)
            stack.append((index, True))
            stack.extend((producer, False) for producer in inputs_of[index] if producer not in visited)
    _check(nodes, inputs_of, order)
    return order


def _producers(nodes: Sequence[Node]) -> dict[str, int]:
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            if name in producers:
                raise SourceError(f"{node} produces {name!r}, which {nodes[producers[name]]} produces already")
            producers[name] = index
    return producers


def _check(nodes: Sequence[Node], inputs_of: list[list[int]], order: list[int]) -> None:
    position = {index: step for step, index in enumerate(order)}
    for index, producers in enumerate(inputs_of):
        if index not in position or any(position.get(p, len(order)) >= position[index] for p in producers):
            raise SourceError(f"the graph has a cycle through {nodes[index]}")
