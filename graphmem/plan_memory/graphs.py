"""The Graph: nodes that make, read and overwrite buffers. What a Trace has decided, the order, is open here.

A buffer that no node makes is an input, alive from the beginning. Every other lives from the node that makes it until
its last user has run; outputs, held buffers and inputs that nobody uses live to the end. A view is no buffer of its
own: its readers read the base. All sizes are requested bytes: rounding is an allocator's business.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import GraphError
from graphmem.trace import MAX_STORAGE_BYTES, Category, Trace, TraceBuilder

#: The most nodes of a cycle that an error names.
_MOST_NAMED = 6


@public_value(frozen=True, slots=True)
class Buffer:
    """Memory that nodes share: ``bytes`` as requested. ``held``: it is the caller's and never freed, as weights are."""

    name: str
    bytes: int
    held: bool = False


@public_value(frozen=True, slots=True)
class Node:
    """One step of the computation. ``reads``, ``makes`` and ``updates`` (written in place) are indices of buffers.

    ``scratch``: bytes held only while it runs. ``cost``: what running it once more costs, in one unit throughout a
    graph (FLOPs, or seconds). ``after``: indices of nodes that must run before it, beyond what the buffers say.
    ``repeatable``: run again it makes the same, so that what it makes can be recomputed. ``module`` and ``source`` are
    for people.
    """

    name: str
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    scratch: int = 0
    cost: float = 0.0
    module: str = ""
    source: str = ""
    after: tuple[int, ...] = ()
    repeatable: bool = True

    @property
    def uses(self) -> tuple[int, ...]:
        """The buffers that must be alive before it runs, each once."""
        return tuple(dict.fromkeys((*self.reads, *self.updates)))


@public_value(frozen=True)
class Graph:
    """A whole computation; ``outputs`` are the buffers that live at the end.

    Nodes that use a buffer which some node updates keep the sides of that node on which they stand in ``nodes``. Raises
    :class:`graphmem.errors.GraphError` for cycles, buffers that do not exist or have two makers, and sizes that are no
    whole numbers from 0 to 2^63 - 1.
    """

    nodes: tuple[Node, ...]
    buffers: tuple[Buffer, ...]
    outputs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_types(self)
        _check_buffers(self)
        _check_nodes(self)
        if len(self.order) < len(self.nodes):
            raise GraphError(_cycle(self))

    # --- what follows from the nodes, worked out once -----------------------------------------------------------------

    @cached_property
    def maker_of(self) -> list[int]:
        """The node that makes each buffer; -1 for inputs."""
        makers = [-1] * len(self.buffers)
        for number, node in enumerate(self.nodes):
            for buffer in node.makes:
                makers[buffer] = number
        return makers

    @cached_property
    def users_of(self) -> list[list[int]]:
        """The nodes that read or update each buffer, as they stand."""
        users: list[list[int]] = [[] for _ in self.buffers]
        for number, node in enumerate(self.nodes):
            for buffer in node.uses:
                users[buffer].append(number)
        return users

    @cached_property
    def stays(self) -> list[bool]:
        """Whether each buffer lives to the end: outputs, held buffers, inputs that nobody uses."""
        stays = [one.held for one in self.buffers]
        for buffer in self.outputs:
            stays[buffer] = True
        for buffer, (maker, users) in enumerate(zip(self.maker_of, self.users_of, strict=True)):
            stays[buffer] = stays[buffer] or (maker < 0 and not users)
        return stays

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """The nodes that must run before each one, those that are known to come before others left in; ascending."""
        updated = {buffer for node in self.nodes for buffer in node.updates}
        last_update: dict[int, int] = {}
        readers_since: dict[int, list[int]] = {}
        found = []
        for number, node in enumerate(self.nodes):
            before = {*node.after, *(self.maker_of[buffer] for buffer in node.uses)}
            for buffer in updated.intersection(node.uses):
                before.add(last_update.get(buffer, -1))
                if buffer in node.updates:
                    before.update(readers_since.pop(buffer, ()))
                    last_update[buffer] = number
                else:
                    readers_since.setdefault(buffer, []).append(number)
            before.discard(-1)
            found.append(sorted(before))
        return found

    @cached_property
    def successors(self) -> list[list[int]]:
        """The nodes that must run after each one; ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, before in enumerate(self.predecessors):
            for other in before:
                found[other].append(number)
        return found

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The nodes as they stand where that is an order, else the nearest to it: always the first that can run."""
        if all(not before or before[-1] < number for number, before in enumerate(self.predecessors)):
            return tuple(range(len(self.nodes)))
        missing = [len(before) for before in self.predecessors]
        ready = [number for number, count in enumerate(missing) if not count]
        order = []
        while ready:
            order.append(heapq.heappop(ready))
            for after in self.successors[order[-1]]:
                missing[after] -= 1
                if not missing[after]:
                    heapq.heappush(ready, after)
        return tuple(order)

    # --- orders -------------------------------------------------------------------------------------------------------

    def checked(self, order: Iterable[int] | None = None) -> tuple[int, ...]:
        """``order`` (indices of nodes; None: :attr:`order`) as a tuple.

        Raises :class:`graphmem.errors.GraphError` unless it has every node once, after all that must run before it.
        """
        if order is None:
            return self.order
        order = tuple(order)
        places = [-1] * len(self.nodes)
        for place, number in enumerate(order):
            if not is_index(number, places):
                raise GraphError(f"the order names node {shown(number)}; this graph has 0 to {len(places) - 1}")
            if places[number] >= 0:
                raise GraphError(f"the order has {self._node(number)} twice")
            places[number] = place
        for number, before in enumerate(self.predecessors):
            if places[number] < 0:
                raise GraphError(f"the order leaves out {self._node(number)}")
            for other in before:
                if places[other] > places[number]:
                    why = self._why(other, number)
                    raise GraphError(f"the order runs {self._node(number)} before {self._node(other)}, {why}")
        return order

    def trace(self, order: Sequence[int] | None = None) -> Trace:
        """The allocations and frees of the nodes in ``order`` (None: :attr:`order`).

        Inputs are there first. A node's outputs are made, then its scratch is taken and given back, then what it was
        the last to use dies, and what it made in vain.
        """
        order = self.checked(order)
        builder = TraceBuilder("graph")
        phase = builder.phase(1, "run")
        storages: dict[int, int] = {}
        begin = builder.operator("inputs", phase=phase)
        for buffer, maker in enumerate(self.maker_of):
            if maker < 0:
                one = self.buffers[buffer]
                category = Category.PARAMETER if one.held else Category.INPUT
                storages[buffer] = builder.alloc(int(one.bytes), begin, category, label=one.name)
        for number, dying in zip(order, self.deaths(order), strict=True):
            node = self.nodes[number]
            now = builder.operator(node.name, node.module, phase, node.source)
            for buffer in node.makes:
                one = self.buffers[buffer]
                storages[buffer] = builder.alloc(int(one.bytes), now, Category.ACTIVATION, label=one.name)
            if node.scratch:
                builder.free(builder.alloc(int(node.scratch), now, Category.WORKSPACE), now)
            for buffer in dying:
                builder.free(storages[buffer], now)
        return builder.build()

    def deaths(self, order: Sequence[int]) -> list[list[int]]:
        """The buffers that die after each node of ``order``, which is one of this graph's, in that order: first what it
        used, then what it made in vain."""
        left = [len(users) for users in self.users_of]
        found = []
        for number in order:
            node = self.nodes[number]
            dying = []
            for buffer in node.uses:
                left[buffer] -= 1
                if not left[buffer] and not self.stays[buffer]:
                    dying.append(buffer)
            dying += (buffer for buffer in node.makes if not self.users_of[buffer] and not self.stays[buffer])
            found.append(dying)
        return found

    # --- words --------------------------------------------------------------------------------------------------------

    def _node(self, number: int) -> str:
        return f"node {number} ({shown(self.nodes[number].name)})"

    def _why(self, before: int, after: int) -> str:
        """Why one node must run before another."""
        one, other = self.nodes[before], self.nodes[after]
        for buffer in other.uses:
            if buffer in one.makes:
                return f"which makes {_buffer(self, buffer)}"
        for buffer in (*one.updates, *other.updates):
            if buffer in one.uses and buffer in other.uses:
                return f"while {_buffer(self, buffer)} is written in place"
        return "which it must run after"


# --- checks -----------------------------------------------------------------------------------------------------------


def is_index(number: object, table: Sequence[object]) -> bool:
    """Whether this is the number of a row of a table."""
    return isinstance(number, int) and 0 <= number < len(table)


def _buffer(graph: Graph, number: int) -> str:
    return f"buffer {number} ({shown(graph.buffers[number].name)})"


def _size(value: object, where: str) -> int:
    """The whole number that a size is. Raises :class:`GraphError` naming ``where`` it stands."""
    try:
        size = operator.index(value)  # type: ignore[arg-type]  # NumPy's whole numbers are taken, too
    except TypeError:
        size = -1
    if not 0 <= size <= MAX_STORAGE_BYTES:
        raise GraphError(f"{where} has {shown(value)} bytes; accepted: whole numbers from 0 to {MAX_STORAGE_BYTES}")
    return size


def _check_types(graph: Graph) -> None:
    for kind, table in ((Node, graph.nodes), (Buffer, graph.buffers)):
        for number, one in enumerate(table):
            if not isinstance(one, kind):
                name = kind.__name__
                raise GraphError(f"{name.lower()} {number} is {shown(one)}; accepted: graphmem.plan_memory.{name}")
    for number, node in enumerate(graph.nodes):
        for numbers in (node.reads, node.makes, node.updates, node.after):
            if not isinstance(numbers, (tuple, list)):
                raise GraphError(f"{graph._node(number)} has {shown(numbers)} for a tuple of indices")


def _check_buffers(graph: Graph) -> None:
    total = sum(_size(one.bytes, _buffer(graph, number)) for number, one in enumerate(graph.buffers))
    total += max(
        (_size(one.scratch, f"the scratch of {graph._node(n)}") for n, one in enumerate(graph.nodes)), default=0
    )
    if total > MAX_STORAGE_BYTES:
        raise GraphError(f"the buffers have {total} bytes together, more than 2^63 - 1, more than any memory")
    for buffer in graph.outputs:
        if not is_index(buffer, graph.buffers):
            raise GraphError(f"the outputs name buffer {shown(buffer)}; {_there_are(graph.buffers, 'buffers')}")


def _check_nodes(graph: Graph) -> None:
    makers: dict[int, int] = {}
    for number, node in enumerate(graph.nodes):
        for role, buffers in (("reads", node.reads), ("makes", node.makes), ("updates", node.updates)):
            for buffer in buffers:
                if not is_index(buffer, graph.buffers):
                    known = _there_are(graph.buffers, "buffers")
                    raise GraphError(f"{graph._node(number)} {role} buffer {shown(buffer)}; {known}")
        for other in node.after:
            if not is_index(other, graph.nodes):
                known = _there_are(graph.nodes, "nodes")
                raise GraphError(f"{graph._node(number)} runs after node {shown(other)}; {known}")
        for buffer in node.makes:
            if buffer in makers:
                two = f"{graph._node(makers[buffer])} and {graph._node(number)}"
                raise GraphError(
                    f"{_buffer(graph, buffer)} is made twice, by {two}; write `updates` for writes in place"
                )
            makers[buffer] = number
        if not (isinstance(node.cost, (int, float)) and math.isfinite(node.cost) and node.cost >= 0):
            raise GraphError(f"{graph._node(number)} costs {shown(node.cost)}; accepted: finite numbers from 0 on")


def _there_are(table: Sequence[object], what: str) -> str:
    return f"{what} are 0 to {len(table) - 1}" if table else f"there are no {what}"


def _cycle(graph: Graph) -> str:
    """Some nodes that wait for each other, in words."""
    waiting = set(range(len(graph.nodes))).difference(graph.order)
    walk = list(_back(graph, waiting))
    cycle = walk[walk.index(walk[-1]) : -1][::-1]
    names = [graph._node(number) for number in cycle]
    if len(names) > _MOST_NAMED:
        names[_MOST_NAMED - 1 :] = [f"{len(names) - _MOST_NAMED + 1} more"]
    why = graph._why(cycle[-1], cycle[0])
    last = graph._node(cycle[-1])
    return f"the graph has a cycle: {', '.join(names)}, and again the first, which waits for {last}, {why}"


def _back(graph: Graph, waiting: set[int]) -> Iterator[int]:
    """From one waiting node to one that it waits for, until one comes again."""
    number, seen = min(waiting), set[int]()
    while number not in seen:
        yield number
        seen.add(number)
        number = next(before for before in graph.predecessors[number] if before in waiting)
    yield number
