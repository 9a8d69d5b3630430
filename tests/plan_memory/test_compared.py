"""Peaks before and after a change, and what makes the difference."""

from __future__ import annotations

from hypothesis import given, settings

from graphmem.plan_memory import Buffer, Graph, Node, compare_graphs
from tests.plan_memory.graphs import chain, graphs, peak_of
from tests.support.examples import examples


@settings(max_examples=examples(50), deadline=None)
@given(graphs(), graphs())
def test_the_difference_of_the_peaks_is_that_of_the_buffers(before: Graph, after: Graph) -> None:
    found = compare_graphs(before, after)
    assert (found.before, found.after) == (peak_of(before), peak_of(after))
    scratch = [{node.name: node.scratch for node in graph.nodes} for graph in (before, after)]
    more = sum(size for _, size in found.came) - sum(size for _, size in found.gone)
    assert found.change == more + scratch[1].get(found.node_after, 0) - scratch[0].get(found.node_before, 0)


def test_a_pass_that_shrinks_a_buffer() -> None:
    graph = chain(3)
    smaller = Graph(graph.nodes, (*graph.buffers[:2], Buffer("a1", 4), *graph.buffers[3:]), graph.outputs)
    found = compare_graphs(graph, smaller)
    assert (found.change, found.gone, found.came) == (-6, (("a1", 10),), (("a1", 4),))
    assert str(found) == "peak 60 B at b2 -> 54 B at b2 (-6 B); gone: a1 10 B; came: a1 4 B"
    assert compare_graphs(graph, graph).change == 0


def test_graphs_without_nodes() -> None:
    empty, one = Graph((), ()), Graph((Node("n", (), (0,)),), (Buffer("b", 5),))
    assert str(compare_graphs(empty, one)) == "peak 0 B at the beginning -> 5 B at n (+5 B); came: b 5 B"
