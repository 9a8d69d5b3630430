"""Graphs for tests: those that Hypothesis draws, and layered ones of any size."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from graphmem.plan_memory import Buffer, Graph, Node


@st.composite
def graphs(draw: st.DrawFn, most_nodes: int = 12) -> Graph:
    """Up to so many nodes, with inputs, held buffers, outputs, scratch, writes in place, nodes of several outputs."""
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
        nodes.append(Node(f"n{number}", reads, makes, updates, scratch, 1.0, after=after))
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
