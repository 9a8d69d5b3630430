"""Orders: those of small graphs are as low as any, the bound is one, and a trace has none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import graphmem
from graphmem.errors import GraphmemError
from graphmem.plan_memory import Buffer, Graph, Node, orders, reorder
from tests.plan_memory.graphs import graphs, layered
from tests.support.examples import examples


def least_peak(graph: Graph) -> int:
    """By going through all sets of nodes that may have run, with the lowest way to each."""
    whole = (1 << len(graph.nodes)) - 1
    needs = [sum(1 << other for other in before) for before in graph.predecessors]
    users = [sum(1 << user for user in set(found)) for found in graph.users_of]

    def alive(run: int) -> int:
        return sum(
            one.bytes
            for buffer, one in enumerate(graph.buffers)
            if (graph.maker_of[buffer] < 0 or run >> graph.maker_of[buffer] & 1)
            and (graph.stays[buffer] or users[buffer] & ~run)
        )

    lowest = {0: alive(0)}
    for run in range(whole + 1):
        if run not in lowest:
            continue
        for number, node in enumerate(graph.nodes):
            if not run >> number & 1 and needs[number] & run == needs[number]:
                height = alive(run) + node.scratch + sum(graph.buffers[made].bytes for made in node.makes)
                then = run | 1 << number
                lowest[then] = min(lowest.get(then, 1 << 62), max(lowest[run], height))
    return max(lowest[whole], alive(whole))


@given(graphs(most_nodes=10))
@settings(max_examples=examples(150), deadline=None)
def test_small_graphs_have_the_lowest_of_all_orders(graph: Graph) -> None:
    found = reorder(graph, time_limit=20)
    assert found.is_optimal
    assert found.peak == graphmem.peak(graph, "live", found.order) == least_peak(graph)


@given(graphs(most_nodes=10))
@settings(max_examples=examples(50), deadline=None)
def test_without_time_the_bound_is_one(graph: Graph) -> None:
    found = reorder(graph, time_limit=0)
    assert found.lower_bound <= least_peak(graph) <= found.peak <= graphmem.peak(graph, "live")


def wide(branches: int, length: int) -> Graph:
    """So many chains beside each other, whose buffers grow and shrink, and a node that reads their ends."""
    buffers, nodes, ends = [Buffer("x", 1 << 10)], [], []
    for branch in range(branches):
        last = 0
        for step in range(length):
            buffers.append(Buffer(f"b{branch}.{step}", (1 << 20) * (1 + (step * 7 + branch * 3) % 5)))
            nodes.append(Node(f"n{branch}.{step}", (last,), (len(buffers) - 1,)))
            last = len(buffers) - 1
        ends.append(last)
    buffers.append(Buffer("y", 1 << 10))
    nodes.append(Node("join", tuple(ends), (len(buffers) - 1,)))
    steps = [nodes[branch * length + step] for step in range(length) for branch in range(branches)]
    return Graph((*steps, nodes[-1]), tuple(buffers), (len(buffers) - 1,))


def test_forty_nodes_are_proven() -> None:
    graph = wide(5, 8)
    found = reorder(graph, time_limit=30)
    assert found.is_optimal
    assert found.peak < graphmem.peak(graph, "live")


def test_parts_between_nodes_of_every_path_are_searched_apart() -> None:
    """Two graphs one behind the other: the first node of the second comes after all of the first."""
    nodes, buffers = [], [Buffer("x", 8)]
    for _ in range(3):
        last = len(buffers) - 1
        buffers += [Buffer(f"b{len(buffers) + offset}", size) for offset, size in enumerate((80, 10, 90, 20, 8))]
        b = last + 1
        nodes += [
            Node("wide", (last,), (b,)),
            Node("broad", (last,), (b + 2,)),
            Node("narrow", (b,), (b + 1,)),
            Node("small", (b + 2,), (b + 3,)),
            Node("join", (b + 1, b + 3), (b + 4,)),
        ]
    graph = Graph(tuple(nodes), tuple(buffers), (len(buffers) - 1,))
    assert [len(block) for block in orders._blocks(graph)] == [5, 5, 5]
    found = reorder(graph)
    assert (found.peak, found.is_optimal) == (118, True)


def test_large_graphs_have_an_order_and_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_MOST_SEARCHED", 100)
    monkeypatch.setattr(orders, "_MOST_PAIRED", 10)
    graph = layered(200, reach=30)
    found = reorder(graph, time_limit=2)
    assert graphmem.peak(graph, "live", found.order) == found.peak < graphmem.peak(graph, "live")
    assert found.lower_bound <= found.peak


def test_of_an_allocator_no_order_is_worse_than_the_own() -> None:
    graph = layered(25, reach=8)
    found = reorder(graph, "pytorch", time_limit=0.5)
    assert found.peak == graphmem.peak(graph, "pytorch", found.order) <= graphmem.peak(graph)
    assert found.lower_bound <= reorder(graph).peak <= found.peak


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((layered(2).trace(),), "a trace does not say which nodes depend on which; give a graphmem.plan_memory.Graph"),
        ((3,), "reorder takes a Graph, not int"),
        ((layered(2), "nvidia"), "unknown allocator 'nvidia'; accepted: live, pytorch"),
    ],
)
def test_questions_that_have_no_answer(asked: tuple[object, ...], words: str) -> None:
    with pytest.raises(GraphmemError, match=words):
        reorder(*asked)  # type: ignore[arg-type]


def test_an_empty_graph_has_an_order() -> None:
    assert reorder(Graph((), (Buffer("x", 5),))).peak == 5
