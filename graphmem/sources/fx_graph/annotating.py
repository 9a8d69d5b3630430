"""What an fx graph holds while each of its nodes runs, written to the nodes."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import fx

from graphmem.base.records import public_value
from graphmem.plan_memory.graphs import Graph
from graphmem.sources.fx_graph.reading import FxGraph, read

#: The key in ``node.meta``.
KEY = "graphmem"


@public_value(frozen=True, slots=True)
class NodeMemory:
    """Memory while one node runs, in requested bytes.

    ``live_bytes``: all that is alive then, its outputs and scratch among it; ``births`` and ``deaths``: names and bytes
    of the buffers that it makes, and of those that are freed after it; ``is_peak``: nowhere in the graph is more alive.
    Of a placeholder or an attribute, which is there from the beginning, ``live_bytes`` are those of all inputs.
    """

    live_bytes: int
    births: tuple[tuple[str, int], ...] = ()
    deaths: tuple[tuple[str, int], ...] = ()
    is_peak: bool = False


def annotate(module: Any, *example_inputs: object) -> Graph:
    """Write a :class:`NodeMemory` to ``node.meta["graphmem"]`` of every node but the output; gives the graph.

    Arguments and errors as of :func:`from_fx`. Nothing else in the nodes is changed.
    """
    found = read(module, *example_inputs)
    for node, memory in memory_of_nodes(found).items():
        node.meta[KEY] = memory
    return found.graph


def memory_of_nodes(found: FxGraph) -> dict[fx.Node, NodeMemory]:
    """What is alive at every node but the output, in the order of the graph."""
    graph = found.graph
    sizes = [(one.name, one.bytes) for one in graph.buffers]
    inputs = sum(sizes[number][1] for number, maker in enumerate(graph.maker_of) if maker < 0)
    births = [tuple(sizes[buffer] for buffer in node.makes) for node in graph.nodes]
    deaths = [tuple(sizes[buffer] for buffer in dying) for dying in graph.deaths(range(len(graph.nodes)))]
    made = [sum(size for _, size in here) for here in births]
    freed = [sum(size for _, size in here) for here in deaths]
    kept = list(accumulate((one - other for one, other in zip(made, freed, strict=True)), initial=inputs))
    live = [before + here + node.scratch for before, here, node in zip(kept, made, graph.nodes, strict=False)]
    most = max((inputs, *live))
    memory = map(NodeMemory, live, births, deaths, (here == most for here in live))
    at_beginning = {
        node: NodeMemory(inputs, tuple(sizes[buffer] for buffer in found.buffers[node]), (), inputs == most)
        for node in found.source.nodes
        if node.op in ("placeholder", "get_attr")
    }
    return {**at_beginning, **dict(zip(found.nodes, memory, strict=True))}
