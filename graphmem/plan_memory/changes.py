"""The peak of a graph that changes a little: nodes change places, a buffer is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphmem.allocators.base import Allocator
from graphmem.base.documents import shown
from graphmem.errors import GraphError
from graphmem.plan_memory.graphs import Buffer, Graph, is_index
from graphmem.plan_memory.peaks import Peaks, Replays, maker_of_allocators, replays_of
from graphmem.plan_memory.tables import Numbers, Tables, as_order, live_bytes, places_of

#: What undoes a step.
_Undo = Callable[[], None]


class Peak:
    """The peak of a graph under one order, and after each change of it: a change costs what it changes.

    ``Peak(graph, order)`` begins with an order of the graph (None: as its nodes stand). Nodes and buffers keep their
    numbers; a node that runs again, and what it makes, have the next ones. A change that the dependencies do not allow
    raises :class:`graphmem.errors.GraphError` and leaves everything as it was.
    """

    def __init__(self, graph: Graph, order: Iterable[int] | Numbers | None = None) -> None:
        self._order = as_order(graph, order).copy()
        tables = Tables.of(graph)
        self._place = places_of(self._order)
        self._live = live_bytes(tables, self._order)
        self._taken: list[int] = tables.taken.tolist()
        self._sizes: list[int] = tables.sizes.tolist()
        self._nodes, self._buffers, self._outputs = list(graph.nodes), list(graph.buffers), graph.outputs
        self._makers, self._stays, self._users = list(graph.maker_of), list(graph.stays), list(graph.users_of)
        self._before, self._after = list(graph.predecessors), list(graph.successors)
        #: Of buffers that were computed again: what they are copies of, and all copies of a buffer.
        self._original: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}
        self._undo: list[_Undo] = []
        #: The graph that was given while its nodes are those of now; afterwards the replays of now.
        self._given: Graph | None = graph
        self._replays: dict[tuple[str, str], Replays] = {}

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """The most requested bytes that are alive together: the least that any allocator could do with."""
        return int(self._live.max())

    @property
    def live_bytes(self) -> Numbers:
        """Requested bytes alive while the node at each place runs; after these, those alive at the end."""
        return self._live.copy()

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the nodes as they run."""
        return tuple(self._order.tolist())

    def reserved(self, allocator: str | Callable[[], Allocator] = "pytorch", *, alloc_conf: str = "") -> int:
        """The most bytes that an allocator reserves; arguments and errors as those of :func:`graphmem.peak`."""
        if allocator == "live":
            return self.live
        if self._given is not None:
            return replays_of(self._given, allocator, alloc_conf).reserved(self._order)
        found = self._replays.get((allocator, alloc_conf)) if isinstance(allocator, str) else None
        if found is None:
            lists = (self._sizes, self._makers, self._stays, self._users, self._before)
            make = maker_of_allocators(allocator, alloc_conf)
            found = Replays(Tables.made(self._nodes, *lists), make, lambda _: self.graph().trace())
            if isinstance(allocator, str):
                self._replays[allocator, alloc_conf] = found
        return found.reserved(self._order)

    def peaks(self, allocator: str | Callable[[], Allocator] = "pytorch", *, alloc_conf: str = "") -> Peaks:
        """What is live, what planned addresses need by the quickest plan, and what an allocator reserves."""
        from graphmem.plan_memory.addresses import offsets

        planned = offsets(self.graph(), time_limit=0).height
        return Peaks(self.live, planned, self.reserved(allocator, alloc_conf=alloc_conf))

    def graph(self) -> Graph:
        """The graph as it is now. Its nodes stand as they run, so that their numbers are their places."""
        places = self._place.tolist()
        nodes = (self._nodes[number] for number in self._order.tolist())
        moved = (replace(node, after=tuple(places[n] for n in node.after)) if node.after else node for node in nodes)
        return Graph(tuple(moved), tuple(self._buffers), self._outputs)

    def copy(self) -> Peak:
        """Another one in this state; the steps so far cannot be undone there."""
        made = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(made, name, value.copy() if isinstance(value, (list, dict, np.ndarray)) else value)
        made._copies = {buffer: list(copies) for buffer, copies in self._copies.items()}
        made._undo, made._replays = [], {}
        return made

    # --- changes ------------------------------------------------------------------------------------------------------

    def swap(self, place: int) -> None:
        """The node at ``place`` and the one after it change places."""
        self.move(place, place + 1)

    def move(self, place: int, to: int) -> None:
        """The node at ``place`` comes to place ``to``; those between move by one, to where it was."""
        if not (is_index(place, self._nodes) and is_index(to, self._nodes)):
            raise GraphError(
                f"no move from place {shown(place)} to {shown(to)}; places are 0 to {len(self._nodes) - 1}"
            )
        number = self._order.item(place)
        for other in self._after[number] if to > place else self._before[number]:
            if min(place, to) <= self._place.item(other) <= max(place, to):
                raise GraphError(f"{self._named(number)} cannot pass {self._named(other)}: one needs the other")
        self._move(place, to)
        self._undo.append(lambda: self._move(to, place))

    def recompute(self, buffer: int, before: int) -> int:
        """The node that makes ``buffer`` runs once more, just before node ``before``; from there on its users read the
        copy, and the buffer dies with the last one earlier. The number of the new node.

        It reads the newest copy of each of its inputs. Refused where nobody would read the copy, and where running it
        again gives something else, as somebody writes in place what it reads or makes.
        """
        place, later = self._recomputable(buffer, before)
        maker = self._nodes[self._makers[buffer]]
        number, first = len(self._nodes), len(self._buffers)
        newest = {one: self._newest(one, place) for one in maker.reads}
        made = {one: first + offset for offset, one in enumerate(maker.makes)}
        reads = tuple(newest.values())
        touched = list(dict.fromkeys((*reads, buffer)))
        writers = [user for one in reads for user in self._users[one] if one in self._nodes[user].updates]
        writes = [*(self._makers[one] for one in reads if self._makers[one] >= 0), *writers]
        before_it = [other for other in writes if self._place.item(other) < place]
        after_it = [*later, *(other for other in writers if self._place.item(other) >= place)]

        self._add(touched, -1)
        changed = _Changed()
        for user in later:
            node = self._nodes[user]
            reading = tuple(made[buffer] if one == buffer else one for one in node.reads)
            changed.put(self._nodes, user, replace(node, reads=reading))
        for user in after_it:
            changed.put(self._before, user, [*self._before[user], number])
        for one in reads:
            changed.put(self._users, one, [*self._users[one], number])
        changed.put(self._users, buffer, [user for user in self._users[buffer] if user not in set(later)])
        for other in before_it:
            changed.put(self._after, other, [*self._after[other], number])
        again = replace(maker, name=f"{maker.name} again", reads=reads, makes=tuple(made.values()), after=())
        changed.extend(self._nodes, [again])
        changed.extend(self._taken, [self._taken[self._makers[buffer]]])
        changed.extend(self._before, [before_it])
        changed.extend(self._after, [after_it])
        changed.extend(self._buffers, [self._copy(one) for one in maker.makes])
        changed.extend(self._sizes, [self._sizes[one] for one in maker.makes])
        changed.extend(self._makers, [number] * len(made))
        changed.extend(self._stays, [False] * len(made))
        changed.extend(self._users, [later if one == buffer else [] for one in maker.makes])
        self._insert(place, number)
        self._add((*touched, *made.values()), 1)
        original = self._original.get(buffer, buffer)
        self._original[made[buffer]] = original
        self._copies.setdefault(original, []).append(made[buffer])
        given, self._given, self._replays = self._given, None, {}

        def undo() -> None:
            self._add((*touched, *made.values()), -1)
            self._delete(self._place.item(number))
            changed.undo()
            self._add(touched, 1)
            self._copies[original].pop()
            self._given, self._replays = given, {}

        self._undo.append(undo)
        return number

    def undo(self) -> None:
        """Take the last change back that was not yet taken back."""
        if not self._undo:
            raise GraphError("there is no change to undo")
        self._undo.pop()()

    # --- lives --------------------------------------------------------------------------------------------------------

    def _add(self, buffers: Iterable[int], sign: int) -> None:
        """The bytes of some buffers come to, or leave, the places at which these are alive."""
        live, last = self._live, len(self._order)
        for buffer in buffers:
            maker, users = self._makers[buffer], self._users[buffer]
            begin = self._place.item(maker) if maker >= 0 else 0
            end = last if self._stays[buffer] else self._last(users) if users else begin
            live[begin : end + 1] += sign * self._sizes[buffer]

    def _last(self, users: Sequence[int]) -> int:
        """The last place of some nodes."""
        if len(users) <= 8:  # fewer are quicker one by one than as an array
            return max(map(self._place.item, users))
        return int(self._place[users].max())

    def _move(self, place: int, to: int) -> None:
        number, order, places, live = self._order.item(place), self._order, self._place, self._live
        node, makers, stays = self._nodes[number], self._makers, self._stays
        touched = [one for one in (*node.uses, *node.makes) if makers[one] >= 0 or not stays[one]]
        self._add(touched, -1)
        if place < to:
            between = order[place + 1 : to + 1].copy()
            order[place:to], live[place:to] = between, live[place + 1 : to + 1].copy()
            places[between] -= 1
        else:
            between = order[to:place].copy()
            order[to + 1 : place + 1], live[to + 1 : place + 1] = between, live[to:place].copy()
            places[between] += 1
        order[to], places[number] = number, to
        live[to] = self._resting(to + 1) + node.scratch
        self._add(touched, 1)

    def _resting(self, place: int) -> int:
        """Bytes alive just before a place, of buffers that the node before it does not touch."""
        taken = self._taken[self._order.item(place)] if place < len(self._order) else 0
        return self._live.item(place) - taken

    def _insert(self, place: int, number: int) -> None:
        """A new node at a place; what it touches is not counted there."""
        self._place = np.append(self._place, place)
        self._place[self._order[place:]] += 1
        alive = self._resting(place) + self._nodes[number].scratch
        self._order, self._live = np.insert(self._order, place, number), np.insert(self._live, place, alive)

    def _delete(self, place: int) -> None:
        """The last node goes from its place."""
        self._order, self._live = np.delete(self._order, place), np.delete(self._live, place)
        self._place = self._place[:-1].copy()
        self._place[self._order[place:]] -= 1

    # --- copies -------------------------------------------------------------------------------------------------------

    def _recomputable(self, buffer: int, before: int) -> tuple[int, list[int]]:
        """The place of a copy of ``buffer``, and who would read it. Raises :class:`GraphError` where there is none."""
        if not is_index(buffer, self._buffers):
            raise GraphError(f"no buffer {shown(buffer)}; buffers are 0 to {len(self._buffers) - 1}")
        if not is_index(before, self._nodes):
            raise GraphError(f"no node {shown(before)}; nodes are 0 to {len(self._nodes) - 1}")
        maker, what = self._makers[buffer], f"buffer {buffer} ({shown(self._buffers[buffer].name)})"
        if maker < 0 or self._stays[buffer]:
            raise GraphError(f"{what} is {'an input' if maker < 0 else 'alive to the end'} and cannot be recomputed")
        place, made_at = self._place.item(before), self._place.item(maker)
        later = [user for user in self._users[buffer] if self._place.item(user) >= place]
        if not later or place <= made_at:
            raise GraphError(f"nobody would read a copy of {what} before {self._named(before)}")
        node = self._nodes[maker]
        written = next(
            (user for one in node.makes for user in self._users[one] if one in self._nodes[user].updates), -1
        )
        for one in node.reads:
            for user in self._users[one]:
                if one in self._nodes[user].updates and made_at <= self._place.item(user) < place:
                    written = user
        if not node.repeatable:
            raise GraphError(f"{what} cannot be recomputed: {self._named(maker)} does not make the same again")
        if node.updates or written >= 0:
            writer = self._named(maker if node.updates else written)
            raise GraphError(f"{what} cannot be recomputed: {writer} writes in place what its maker reads or makes")
        return place, later

    def _newest(self, buffer: int, place: int) -> int:
        """Of a buffer and its copies the one that was made last before a place."""
        original = self._original.get(buffer, buffer)
        copies = (original, *self._copies.get(original, ()))
        made = ((self._place.item(self._makers[one]), one) for one in copies if self._makers[one] >= 0)
        return max((one for one in made if one[0] < place), default=(0, buffer))[1]

    def _copy(self, buffer: int) -> Buffer:
        one = self._buffers[buffer]
        return replace(one, name=f"{one.name} again", held=False)

    def _named(self, number: int) -> str:
        return f"node {number} ({shown(self._nodes[number].name)})"


class _Changed:
    """What lists were before some of their values changed and others were added."""

    def __init__(self) -> None:
        self._undo: list[_Undo] = []

    def put(self, values: list[Any], index: int, value: Any) -> None:
        before, values[index] = values[index], value
        self._undo.append(lambda: values.__setitem__(index, before))

    def extend(self, values: list[Any], more: Sequence[Any]) -> None:
        count = len(values)
        values.extend(more)
        self._undo.append(lambda: values.__delitem__(slice(count, None)))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
