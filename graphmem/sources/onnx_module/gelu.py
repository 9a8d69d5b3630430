"""Put together the GELU that exporters before operator set 20 take apart.

``x / sqrt(2)``, ``erf``, ``+ 1``, ``* x``, ``* 0.5`` run one by one keep four tensors for the backward pass, the one
kernel that the model was written with keeps its input only. The exporters: torch.onnx, whose ``aten::gelu`` is written
as ``0.5 * x * (1 + erf(x / sqrt(2)))`` in any order of the products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphmem.graph.model import Graph, Node


def with_whole_gelus(graph: Graph) -> Graph:
    """``graph`` with each GELU that is written with ``Erf`` as one ``Gelu`` node, which takes the last one's place."""
    links = _Links(graph)
    gone: set[str] = set()
    whole: dict[str, Node] = {}
    for node in graph.nodes:
        parts = _parts(links, node) if node.op_type == "Erf" and not node.domain else None
        if parts is not None:
            source, members = parts
            last = members[-1]
            gone.update(member.outputs[0] for member in members[:-1])
            whole[last.outputs[0]] = Node(last.name, "Gelu", "", (source,), last.outputs)
    if not whole:
        return graph
    kept = (whole.get(node.outputs[0], node) for node in graph.nodes if node.outputs[0] not in gone)
    return replace(graph, nodes=tuple(kept))


@dataclass
class _Links:
    """Who makes and who reads each tensor."""

    graph: Graph
    makers: dict[str, Node] = field(default_factory=dict)
    readers: dict[str, list[Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            self.makers.update((name, node) for name in node.outputs)
            for name in node.inputs:
                self.readers.setdefault(name, []).append(node)

    def only_reader(self, node: Node, op_type: str) -> Node | None:
        """The node of this kind that alone reads ``node``'s output."""
        name = node.outputs[0]
        readers = self.readers.get(name, [])
        is_it = len(readers) == 1 and readers[0].op_type == op_type and name not in self.graph.outputs
        return readers[0] if is_it else None

    def other_than(self, node: Node, value: float) -> str | None:
        """The input of a binary node beside the constant ``value``."""
        for position in (0, 1):
            if _is_near(self.graph.values, node.inputs[position], value):
                return node.inputs[1 - position]
        return None


def _is_near(values: Mapping[str, Any], name: str, wanted: float) -> bool:
    array = values.get(name)
    return array is not None and array.size == 1 and math.isclose(array.item(), wanted, rel_tol=1e-3)


def _parts(links: _Links, erf: Node) -> tuple[str, list[Node]] | None:
    """GELU's input, and the nodes that make it up, the last one last; None where ``erf`` belongs to none."""
    scaled = links.makers.get(erf.inputs[0])
    if scaled is None or scaled.op_type not in ("Div", "Mul") or links.only_reader(scaled, "Erf") is None:
        return None
    source = links.other_than(scaled, math.sqrt(2) if scaled.op_type == "Div" else math.sqrt(0.5))
    if source is None or (scaled.op_type == "Div" and scaled.inputs[0] != source):
        return None
    plus = links.only_reader(erf, "Add")
    if plus is None or links.other_than(plus, 1.0) != erf.outputs[0]:
        return None
    product = links.only_reader(plus, "Mul")
    if product is None:
        return None
    ending = _ending(links, source, plus, product)
    return None if ending is None else (source, [scaled, erf, plus, *ending])


def _ending(links: _Links, source: str, plus: Node, product: Node) -> list[Node] | None:
    """The two products in the order they run: ``(x * (1 + erf)) * 0.5``, ``(0.5 * (1 + erf)) * x``, or ``x * 0.5`` and
    ``* (1 + erf)``."""
    other = next((name for name in product.inputs if name != plus.outputs[0]), "")
    after, before = links.only_reader(product, "Mul"), links.makers.get(other)
    if links.other_than(product, 0.5) == plus.outputs[0]:
        is_end = after is not None and set(after.inputs) == {source, product.outputs[0]}
        return [product, after] if after is not None and is_end else None
    if other == source:
        return [product, after] if after is not None and links.other_than(after, 0.5) == product.outputs[0] else None
    if before is None or before.op_type != "Mul" or links.only_reader(before, "Mul") is not product:
        return None
    return [before, product] if links.other_than(before, 0.5) == source else None
