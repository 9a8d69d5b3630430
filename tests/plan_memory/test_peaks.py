"""Peaks: of any order equal to a replay of its trace; after any changes and undos equal to a fresh count."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.allocators.ideal import IdealAllocator
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.errors import GraphError, UsageError
from graphmem.plan_memory import Buffer, Graph, Node, compiled
from graphmem.plan_memory.tables import Tables, live_bytes
from graphmem.replay import replay
from tests.plan_memory.graphs import graphs, layered
from tests.support.examples import examples


def any_order(graph: Graph, draw: random.Random) -> list[int]:
    left = [len(before) for before in graph.predecessors]
    ready, order = [number for number, count in enumerate(left) if not count], []
    while ready:
        order.append(ready.pop(draw.randrange(len(ready))))
        for after in graph.successors[order[-1]]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    return order


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=examples(150), deadline=None)
def test_peaks_of_an_order_are_those_of_its_trace(graph: Graph, draw: random.Random) -> None:
    order = any_order(graph, draw)
    trace = graph.trace(order)
    assert graphmem.peak(graph, "live", order) == graphmem.peak(trace, "live")
    assert graphmem.peak(graph, "live", order) == replay(trace, IdealAllocator()).peak_requested_bytes
    reserved = replay(trace, PyTorchCachingAllocator()).peak_reserved_bytes
    assert graphmem.peak(graph, "pytorch", order) == reserved
    assert graphmem.peak(trace) == reserved
    for name in ("tensorflow", "onnxruntime"):
        assert graphmem.peak(graph, name, order) == graphmem.peak(trace, name)


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=examples(50), deadline=None)
def test_compiled_and_interpreted_events_are_those_of_the_trace(graph: Graph, draw: random.Random) -> None:
    order = np.array(any_order(graph, draw), dtype=np.int64)
    tables, trace = Tables.of(graph), graph.trace(order.tolist())
    left = np.bincount(tables.uses.values, minlength=len(tables.sizes))
    for function in {compiled.events_of, getattr(compiled.events_of, "py_func", compiled.events_of)}:
        kinds, subjects = np.empty((2, 4 * len(graph.buffers) + 4 * len(graph.nodes)), dtype=np.int64)
        count = function(
            order,
            tables.makers,
            tables.stays,
            tables.scratch,
            *tables.makes,
            *tables.uses,
            left.copy(),
            kinds,
            subjects,
        )
        assert kinds[:count].tolist() == trace.kinds.tolist()
        sizes = np.concatenate([tables.sizes, tables.scratch])[subjects[:count]]
        assert sizes.tolist() == trace.columns.bytes[trace.subjects].tolist()


@given(graphs(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 40)), max_size=25))
@settings(max_examples=examples(200), deadline=None)
def test_changes_and_undos_are_those_of_a_fresh_count(graph: Graph, steps: list[tuple[int, int, int]]) -> None:
    now = graphmem.Peak(graph)
    before: list[tuple[tuple[int, ...], list[int]]] = []
    for kind, one, other in steps:
        state = (now.order, now.live_bytes.tolist())
        try:
            if kind == 0:
                now.swap(one)
            elif kind <= 2:
                now.move(one, other)
            elif kind == 3:
                now.recompute(one, before=other)
            elif before:
                now.undo()
                assert (now.order, now.live_bytes.tolist()) == before.pop()
                continue
        except GraphError:
            assert (now.order, now.live_bytes.tolist()) == state
            continue
        if kind < 4:
            before.append(state)
        made = now.graph()
        assert made.order == tuple(range(len(made.nodes)))
        assert now.live_bytes.tolist() == live_bytes(Tables.of(made), np.arange(len(made.nodes))).tolist()
        assert now.reserved() == graphmem.peak(made)
        assert now.copy().live == now.live
    while before:
        now.undo()
        assert (now.order, now.live_bytes.tolist()) == before.pop()
    assert now.reserved() == graphmem.peak(graph)


def test_every_change_that_the_dependencies_allow_is_one() -> None:
    graph = layered(30)
    for place in range(29):
        now = graphmem.Peak(graph)
        order = list(graph.order)
        order[place], order[place + 1] = order[place + 1], order[place]
        try:
            graph.checked(order)
        except GraphError:
            with pytest.raises(GraphError, match="cannot pass"):
                now.swap(place)
        else:
            now.swap(place)
            assert now.order == tuple(order)


def test_a_buffer_that_is_computed_again_dies_earlier() -> None:
    nodes = (Node("a", (0,), (1,)), Node("b", (1,), (2,)), Node("c", (2,), (3,)), Node("d", (1, 3), (4,)))
    graph = Graph(
        nodes,
        (Buffer("x", 1, held=True), *(Buffer(n, size) for n, size in zip("pqrs", (50, 30, 40, 5), strict=True))),
        (4,),
    )
    now = graphmem.Peak(graph)
    assert now.live_bytes.tolist() == [51, 81, 121, 96, 6]
    assert now.recompute(1, before=3) == 4
    assert now.order == (0, 1, 2, 4, 3)
    assert now.live_bytes.tolist() == [51, 81, 71, 91, 96, 6]
    assert [node.name for node in now.graph().nodes] == ["a", "b", "c", "a again", "d"]


def test_three_figures_of_one_order() -> None:
    now = graphmem.Peak(layered(40))
    figures = now.peaks()
    assert figures.live == now.live <= figures.planned
    assert figures.reserved == now.reserved() == graphmem.peak(now.graph())
    assert figures.live < figures.reserved


def test_what_a_copy_is_made_beside_is_not_held() -> None:
    nodes = (Node("a", (), (0, 1)), Node("b", (), (2,)), Node("c", (0,), (3,)))
    graph = Graph(nodes, (Buffer("p", 5), Buffer("q", 7, held=True), Buffer("r", 20), Buffer("s", 1)), (3,))
    now = graphmem.Peak(graph)
    now.recompute(0, before=2)
    assert now.live_bytes.tolist() == [12, 27, 19, 13, 8]
    assert live_bytes(Tables.of(now.graph()), np.arange(4)).tolist() == now.live_bytes.tolist()


@pytest.mark.parametrize(
    ("buffer", "before", "words"),
    [
        (0, 2, r"buffer 0 \('x'\) is an input"),
        (3, 2, r"buffer 3 \('r'\) is alive to the end"),
        (1, 0, r"nobody would read a copy of buffer 1 \('p'\) before node 0 \('a'\)"),
        (9, 0, "no buffer 9; buffers are 0 to 3"),
        (1, 7, "no node 7; nodes are 0 to 2"),
        (1, 2, r"node 1 \('b'\) writes in place what its maker reads or makes"),
    ],
)
def test_buffers_that_cannot_be_computed_again(buffer: int, before: int, words: str) -> None:
    nodes = (Node("a", (0,), (1,)), Node("b", (1,), (2,), updates=(0,)), Node("c", (1, 2), (3,)))
    graph = Graph(nodes, tuple(Buffer(name, 1) for name in "xpqr"), (3,))
    with pytest.raises(GraphError, match=words):
        graphmem.Peak(graph).recompute(buffer, before)


def test_questions_that_have_no_answer() -> None:
    graph = layered(3)
    with pytest.raises(UsageError, match="accepted: live, pytorch, tensorflow, onnxruntime"):
        graphmem.peak(graph, "ideal")
    with pytest.raises(UsageError, match="the allocator's function makes None"):
        graphmem.peak(graph, lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="takes a Trace or a Graph, not int"):
        graphmem.peak(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a trace has one order"):
        graphmem.peak(graph.trace(), "live", [0, 1, 2])
    with pytest.raises(GraphError, match=r"before node 0 \('n0'\)"):
        graphmem.peak(graph, "live", np.array([1, 0, 2]))
    with pytest.raises(GraphError, match="the order names node 'a'"):
        graphmem.peak(graph, "live", ["a", 0, 1])  # type: ignore[list-item]
    with pytest.raises(GraphError, match="there is no change to undo"):
        graphmem.Peak(graph).undo()


def test_settings_of_the_allocator_count() -> None:
    graph = Graph((Node("a", (), (0,)), Node("b", (), (1,))), (Buffer("p", 21 << 20), Buffer("q", 3 << 20)), (0, 1))
    assert graphmem.peak(graph) == (22 << 20) + (20 << 20)
    assert graphmem.peak(graph, alloc_conf="expandable_segments:True") == 40 << 20
    assert graphmem.Peak(graph).reserved(lambda: IdealAllocator()) == 24 << 20
