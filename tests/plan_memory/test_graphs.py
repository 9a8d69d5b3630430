"""Graphs: what lives when, which orders hold, and one line for each graph that is none."""

from __future__ import annotations

import pytest

from graphmem.allocators.ideal import IdealAllocator
from graphmem.errors import GraphError
from graphmem.plan_memory import Buffer, Graph, Node
from graphmem.replay import replay


def chain() -> Graph:
    """x (10 bytes) -> a -> y (20) -> b, with 7 bytes of scratch -> z (5), which is the output."""
    nodes = (Node("a", (0,), (1,)), Node("b", (1,), (2,), scratch=7))
    return Graph(nodes, (Buffer("x", 10), Buffer("y", 20), Buffer("z", 5)), (2,))


def test_what_lives_after_every_event() -> None:
    live = replay(chain().trace(), IdealAllocator()).requested_bytes
    assert live.tolist() == [10, 30, 20, 25, 32, 25, 5]


def test_held_buffers_and_unused_inputs_stay_and_unused_outputs_of_a_node_die() -> None:
    nodes = (Node("a", (0,), (2,)), Node("b", (0,), (3,)))
    graph = Graph(nodes, (Buffer("w", 10, held=True), Buffer("unused", 3), Buffer("y", 20), Buffer("z", 5)), (3,))
    assert replay(graph.trace(), IdealAllocator()).requested_bytes.tolist() == [10, 13, 33, 13, 18]


def test_users_of_a_buffer_keep_their_sides_of_its_updates() -> None:
    nodes = (Node("early", (0,)), Node("step", updates=(0,)), Node("late", (0,)), Node("later", (0,)))
    graph = Graph(nodes, (Buffer("w", 8, held=True),))
    assert graph.predecessors == [[], [0], [1], [1]]
    with pytest.raises(
        GraphError, match=r"runs node 1 \('step'\) before node 0 \('early'\), while buffer 0 \('w'\) is"
    ):
        graph.checked((1, 0, 2, 3))
    assert graph.checked([0, 1, 3, 2]) == (0, 1, 3, 2)


def test_nodes_may_stand_in_any_order() -> None:
    nodes = (Node("b", (1,), (2,)), Node("c", (2,)), Node("a", (0,), (1,)))
    graph = Graph(nodes, (Buffer("x", 1), Buffer("y", 1), Buffer("z", 1)))
    assert graph.order == (2, 0, 1)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((1, 0), r"runs node 1 \('b'\) before node 0 \('a'\), which makes buffer 1 \('y'\)"),
        ((0,), r"leaves out node 1 \('b'\)"),
        ((0, 0), r"has node 0 \('a'\) twice"),
        ((0, 2), r"names node 2; this graph has 0 to 1"),
    ],
)
def test_orders_that_are_none(order: tuple[int, ...], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        chain().trace(order)


@pytest.mark.parametrize(
    ("nodes", "buffers", "words"),
    [
        ((), (Buffer("x", -1),), r"buffer 0 \('x'\) has -1 bytes; accepted: whole numbers"),
        ((), (Buffer("x", 1.5),), r"buffer 0 \('x'\) has 1\.5 bytes"),  # type: ignore[arg-type]
        ((), (Buffer("x", 2**62), Buffer("y", 2**62)), "more than any memory"),
        ((Node("a", scratch=-2),), (), r"the scratch of node 0 \('a'\) has -2 bytes"),
        ((Node("a", (3,)),), (Buffer("x", 1),), r"node 0 \('a'\) reads buffer 3; buffers are 0 to 0"),
        ((Node("a", after=(1,)),), (), r"node 0 \('a'\) runs after node 1; nodes are 0 to 0"),
        ((Node("a", cost=float("nan")),), (), r"node 0 \('a'\) costs nan"),
        ((Node("a", (), (0,)), Node("b", (), (0,))), (Buffer("x", 1),), r"made twice, by node 0 \('a'\) and node 1"),
        ((Node("a", (0,), (0,)),), (Buffer("x", 1),), r"a cycle: node 0 \('a'\), and again the first"),
        (
            (Node("a", (1,), (0,)), Node("b", (0,), (1,))),
            (Buffer("x", 1), Buffer("y", 1)),
            r"node 1 \('b'\), node 0 \('a'\), and again the first, which waits for node 0 \('a'\), which makes",
        ),
    ],
)
def test_graphs_that_are_none(nodes: tuple[Node, ...], buffers: tuple[Buffer, ...], words: str) -> None:
    with pytest.raises(GraphError, match=words) as caught:
        Graph(nodes, buffers)
    assert "\n" not in str(caught.value)


def test_a_long_cycle_is_named_in_short() -> None:
    count = 100_000
    nodes = tuple(Node(f"n{i}", ((i - 1) % count,), (i,)) for i in range(count))
    with pytest.raises(GraphError, match="99995 more") as caught:
        Graph(nodes, tuple(Buffer(f"b{i}", 1) for i in range(count)))
    assert len(str(caught.value)) < 500
