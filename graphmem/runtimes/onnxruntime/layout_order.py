"""The orders in which sessions of one file may execute what the layout optimizer changed.

``NchwcTransformerImpl::Finalize`` (``core/optimizer/nchwc_transformer.cc``) walks a map by address, so each process
numbers the conversions back to rows of channels otherwise; of two producers the one with the higher number goes first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphmem.graph.model import Graph, Node
from graphmem.graph.order import execution_order

Sessions = Sequence[Sequence[Graph]]
NAME = "order of layout conversions"
SOURCE = "the layout optimizer of ONNX Runtime numbers its conversions by their addresses"
_CONVERSION = "com.microsoft.nchwc.ReorderOutput"
#: Orders beside the first two that are tried: it and its reverse.
DRAWS = 4


def orders_of(sessions: Sessions) -> list[Sessions]:
    """``sessions`` with their nodes in some of the possible orders, each once; the first is the same in all processes
    that optimize the same file."""
    found: dict[tuple[tuple[str, ...], ...], Sessions] = {}
    for draw in range(DRAWS + 2):
        changed = [_ordered(graphs, draw) for graphs in sessions]
        key = tuple(tuple(node.key for node in graphs[0].nodes) for graphs in changed)
        found.setdefault(key, changed)
    return list(found.values())


def _ordered(graphs: Sequence[Graph], draw: int) -> Sequence[Graph]:
    nodes = graphs[0].nodes
    places = [i for i, node in enumerate(nodes) if node.operator == _CONVERSION]
    if len(places) < 2 or not graphs[0].is_ordered:
        return graphs
    order = list(_order(nodes, places, draw))
    changed = tuple(nodes[index] for index in order)
    return [replace(graph, nodes=changed) for graph in graphs]


def _order(nodes: Sequence[Node], places: Sequence[int], draw: int) -> Iterator[int]:
    """The nodes as they stand tell the numbers of all but the conversions: the later, the lower."""
    named = sorted(places, key=lambda index: nodes[index].key)
    if draw == 1:
        named.reverse()
    elif draw:
        random.Random(draw).shuffle(named)
    ranks = [-index for index in range(len(nodes))]
    for index, place in zip(named, sorted(places), strict=True):
        ranks[index] = -place
    yield from execution_order(nodes, ranks)
