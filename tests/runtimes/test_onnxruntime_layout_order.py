"""Orders of conversions between layouts: every process draws one, and all are known to each."""

from __future__ import annotations

from dataclasses import replace

from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.onnxruntime.orders import orders_of

NCHWC = "com.microsoft.nchwc"


def two_branches() -> Graph:
    """An image through two convolutions, each converted back, and their sum."""
    nodes = []
    for name in "ab":
        nodes.append(Node(f"conv {name}", "Conv", NCHWC, ("x",), (f"c{name}",)))
        nodes.append(Node(f"back {name}", "ReorderOutput", NCHWC, (f"c{name}",), (f"r{name}",)))
    nodes.append(Node("sum", "Add", "", ("ra", "rb"), ("y",)))
    names = ["x", *(output for node in nodes for output in node.outputs)]
    tensors = {name: TensorSpec(name, "float32", (1, 16, 8, 8)) for name in names}
    return Graph("two", tuple(nodes), tensors, ("x",), ("y",), (), is_ordered=True)


def names_of(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_either_branch_may_go_first_and_the_one_that_is_shown_is_always_the_same() -> None:
    graph = two_branches()
    other = replace(graph, nodes=(*graph.nodes[2:4], *graph.nodes[:2], graph.nodes[4]))
    orders = [[names_of(sessions[0][0]) for sessions in orders_of([[drawn]])] for drawn in (graph, other)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted([names_of(graph), names_of(other)])
    assert orders[0][0] == orders[1][0]


def test_one_conversion_has_one_order() -> None:
    graph = two_branches()
    one = replace(graph, nodes=tuple(replace(n, op_type="Conv") if n.name == "back a" else n for n in graph.nodes))
    assert len(orders_of([[one]])) == 1
