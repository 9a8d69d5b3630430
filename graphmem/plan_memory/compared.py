"""Two graphs beside each other, as before and after a pass: their peaks, and what is alive at one of them only."""

from __future__ import annotations

from collections import Counter

from graphmem.base.records import public_value
from graphmem.plan_memory.graphs import Graph
from graphmem.units import format_bytes

#: Buffers that the text names.
_NAMED = 5


@public_value(frozen=True, slots=True)
class PeakChange:
    """Requested bytes at the two peaks and the nodes that run then; ``gone`` and ``came``: names and bytes of buffers
    that are alive at the first peak only, and at the second only, the largest first."""

    before: int
    after: int
    node_before: str
    node_after: str
    gone: tuple[tuple[str, int], ...]
    came: tuple[tuple[str, int], ...]

    @property
    def change(self) -> int:
        return self.after - self.before

    def __str__(self) -> str:
        sign = "+" if self.change >= 0 else "-"
        before = f"{format_bytes(self.before)} at {self.node_before}"
        after = f"{format_bytes(self.after)} at {self.node_after}"
        text = f"peak {before} -> {after} ({sign}{format_bytes(abs(self.change))})"
        for what, buffers in (("gone", self.gone), ("came", self.came)):
            if buffers:
                named = ", ".join(f"{name} {format_bytes(size)}" for name, size in buffers[:_NAMED])
                more = f" and {len(buffers) - _NAMED} more" if len(buffers) > _NAMED else ""
                text += f"; {what}: {named}{more}"
        return text


def compare_graphs(before: Graph, after: Graph) -> PeakChange:
    """The peaks of two graphs in the orders in which they stand. Buffers are the same if their names and sizes are."""
    one, other = _at_peak(before), _at_peak(after)
    return PeakChange(one[0], other[0], one[1], other[1], _sorted(one[2] - other[2]), _sorted(other[2] - one[2]))


def _sorted(buffers: Counter[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(buffers.elements(), key=lambda one: (-one[1], one[0])))


def _at_peak(graph: Graph) -> tuple[int, str, Counter[tuple[str, int]]]:
    """The peak, the node that runs then, and the buffers that are alive."""
    alive = {buffer for buffer, maker in enumerate(graph.maker_of) if maker < 0}
    live = sum(graph.buffers[buffer].bytes for buffer in alive)
    most, where, then = live, "the beginning", frozenset(alive)
    for number, dying in zip(graph.order, graph.deaths(graph.order), strict=True):
        node = graph.nodes[number]
        alive.update(node.makes)
        live += sum(graph.buffers[buffer].bytes for buffer in node.makes)
        if live + node.scratch > most:
            most, where, then = live + node.scratch, node.name, frozenset(alive)
        alive.difference_update(dying)
        live -= sum(graph.buffers[buffer].bytes for buffer in dying)
    sizes = ((graph.buffers[buffer].name, int(graph.buffers[buffer].bytes)) for buffer in then)
    return most, where, Counter(one for one in sizes if one[1])
