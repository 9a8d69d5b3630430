"""Graphs for tests: those that Hypothesis draws, chains, and layered ones of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from graphmem.allocators.ideal import IdealAllocator
from graphmem.plan_memory import Buffer, Graph, Node
from graphmem.replay import replay


def peak_of(graph: Graph, order: Sequence[int] | None = None) -> int:
    """The most bytes alive at once, by the trace and its replay: not by what is tested."""
    return replay(graph.trace(order), IdealAllocator()).peak_reserved_bytes


def chain(length: int) -> Graph:
    """A training step of ``length`` layers whose activations have 10 bytes each; a layer costs 1, its backward 2."""
    buffers = [Buffer("x", 10, held=True), *(Buffer(f"a{layer}", 10) for layer in range(length)), Buffer("loss", 10)]
    nodes = [Node(f"f{layer}", (layer,), (layer + 1,), cost=1.0) for layer in range(length)]
    nodes.append(Node("loss", (length,), (length + 1,), cost=1.0))
    for layer in reversed(range(length)):
        buffers.append(Buffer(f"g{layer}", 10))
        nodes.append(Node(f"b{layer}", (len(buffers) - 2, layer, layer + 1), (len(buffers) - 1,), cost=2.0))
    return Graph(tuple(nodes), tuple(buffers), (len(buffers) - 1,))


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 12) -> Graph:
    """Up to so many nodes, with inputs, held buffers, outputs, scratch, writes in place, nodes of several
    outputs or of none, and such as may not run again."""
    sizes = st.integers(0, 6).map(lambda power: 700 << power)
    buffers = [Buffer(f"x{number}", draw(sizes), held=draw(st.booleans())) for number in range(draw(st.integers(1, 3)))]
    nodes: list[Node] = []
    for number in range(draw(st.integers(0, most_nodes))):
        there = st.integers(0, len(buffers) - 1)
        reads = tuple(draw(st.lists(there, max_size=3, unique=True)))
        updates = tuple(draw(st.lists(there, max_size=1))) if draw(st.integers(0, 5)) == 0 else ()
        makes = tuple(range(len(buffers), len(buffers) + draw(st.sampled_from((1, 1, 1, 2, 0)))))
        buffers += [Buffer(f"b{one}", draw(sizes), held=draw(st.integers(0, 9)) == 0) for one in makes]
        after = (draw(st.integers(0, number - 1)),) if number and draw(st.integers(0, 9)) == 0 else ()
        scratch = draw(st.sampled_from((0, 0, 0, 5000)))
        cost, repeatable = float(draw(st.integers(0, 5))), draw(st.integers(0, 4)) > 0
        nodes.append(Node(f"n{number}", reads, makes, updates, scratch, cost, after=after, repeatable=repeatable))
    outputs = draw(st.lists(st.integers(0, len(buffers) - 1), max_size=2, unique=True))
    return Graph(tuple(nodes), tuple(buffers), tuple(outputs))


def layered(nodes: int, seed: int = 0, reach: int = 12) -> Graph:
    """So many nodes, each with one output and one to three inputs among the last ``reach`` outputs."""
    draw = random.Random(seed)
    buffers = [Buffer("x", 1 << 20)]
    made = []
    for number in range(nodes):
        back = draw.sample(range(max(0, number - reach), number + 1), min(number + 1, draw.randint(1, 3)))
        buffers.append(Buffer(f"b{number}", draw.randint(1, 1 << 22)))
        made.append(Node(f"n{number}", tuple(back), (number + 1,), scratch=draw.choice((0, 0, 1 << 20)), cost=1.0))
    return Graph(tuple(made), tuple(buffers), (nodes,))
