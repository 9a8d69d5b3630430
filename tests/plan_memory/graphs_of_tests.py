"""Graphs that several tests plan."""

from __future__ import annotations

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
def graphs(draw: st.DrawFn, most: int = 12) -> Graph:
    """Any graph: nodes of one to two results that read a few earlier ones, some written in place, some random."""
    buffers = [Buffer("w", 3, held=True), Buffer("x", 4)]
    nodes: list[Node] = []
    for number in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.integers(0, len(buffers) - 1), min_size=1, max_size=3, unique=True))
        kind = draw(st.sampled_from(("plain", "plain", "plain", "plain", "random", "in place", "view")))
        made = (
            () if kind in ("in place", "view") else tuple(range(len(buffers), len(buffers) + draw(st.integers(1, 2))))
        )
        buffers += (Buffer(f"b{one}", draw(st.integers(0, 9))) for one in made)
        after = tuple(one for one in range(number) if not nodes[one].makes and set(nodes[one].reads) & set(reads))
        nodes.append(
            Node(
                f"n{number}",
                tuple(reads[1:]) if kind == "in place" else tuple(reads),
                made,
                tuple(reads[:1]) if kind == "in place" else (),
                scratch=draw(st.integers(0, 3)) if made else 0,
                cost=float(draw(st.integers(0, 5))),
                after=after,
                repeatable=kind != "random",
            )
        )
    outputs = draw(st.lists(st.integers(0, len(buffers) - 1), max_size=3, unique=True))
    return Graph(tuple(nodes), tuple(buffers), tuple(outputs))
