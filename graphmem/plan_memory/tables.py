"""A graph as arrays, and what an order of it comes to: when each buffer dies, and what lives while each node runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.plan_memory.graphs import Graph, Node

Numbers = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """Lists of different lengths in one array: row ``i`` is ``values[starts[i] : starts[i + 1]]``."""

    starts: Numbers
    values: Numbers

    @staticmethod
    def of(lists: Sequence[Sequence[int]]) -> Rows:
        """The rows of these lists."""
        starts = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists)), out=starts[1:])
        values = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(starts[-1]))
        return Rows(starts, values)

    @property
    def owners(self) -> Numbers:
        """The row of each value."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))


class Tables(NamedTuple):
    """A graph's buffers and nodes. ``taken``: bytes that come while a node runs, its outputs and its scratch; ``users``
    has the nodes that use each buffer, its maker where nobody does, none for buffers that stay."""

    sizes: Numbers
    stays: npt.NDArray[np.bool_]
    makers: Numbers
    scratch: Numbers
    taken: Numbers
    makes: Rows
    uses: Rows
    users: Rows
    befores: Numbers
    afters: Numbers

    @staticmethod
    def of(graph: Graph) -> Tables:
        """The tables of a graph, which keeps them."""
        kept = vars(graph)
        if "_tables" not in kept:
            sizes = [one.bytes for one in graph.buffers]
            lists = (graph.maker_of, graph.stays, graph.users_of, graph.predecessors)
            kept["_tables"] = Tables.made(graph.nodes, sizes, *lists)
        found: Tables = kept["_tables"]
        return found

    @staticmethod
    def made(
        nodes: Sequence[Node],
        sizes: Sequence[int],
        makers: Sequence[int],
        stays: Sequence[bool],
        users: Sequence[Sequence[int]],
        predecessors: Sequence[Sequence[int]],
    ) -> Tables:
        """The tables of what a :class:`Graph` says of its nodes and buffers."""
        bytes_of, scratch = np.array(sizes, dtype=np.int64), np.array([one.scratch for one in nodes], dtype=np.int64)
        makes, before = Rows.of([one.makes for one in nodes]), Rows.of(predecessors)
        taken = scratch.copy()
        np.add.at(taken, makes.owners, bytes_of[makes.values])
        rows = zip(users, stays, makers, strict=True)
        return Tables(
            sizes=bytes_of,
            stays=np.array(stays, dtype=bool),
            makers=np.array(makers, dtype=np.int64),
            scratch=scratch,
            taken=taken,
            makes=makes,
            uses=Rows.of([one.uses for one in nodes]),
            users=Rows.of([[] if stay else found or [maker] for found, stay, maker in rows]),
            befores=before.values,
            afters=before.owners,
        )


def deadline(time_limit: float) -> float:
    """The moment of the monotonic clock after so many seconds. Raises :class:`UsageError` for what is no number of
    seconds."""
    if not isinstance(time_limit, (int, float)) or not time_limit >= 0:
        raise UsageError(f"time_limit is {shown(time_limit)}; accepted: seconds from 0 on")
    return time.monotonic() + time_limit


def as_order(graph: Graph, order: Iterable[int] | Numbers | None) -> Numbers:
    """The order as an array, checked as by :meth:`Graph.checked`."""
    if not isinstance(graph, Graph):
        raise UsageError(f"a graph is asked for, not {type(graph).__name__}")
    if order is None:
        kept = vars(graph)
        if "_order" not in kept:
            kept["_order"] = np.array(graph.order, dtype=np.int64)
        found: Numbers = kept["_order"]
        return found
    tables = Tables.of(graph)
    count = len(tables.taken)
    given = order if isinstance(order, (np.ndarray, list, tuple)) else list(order)
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different lengths
        array = np.empty(0)
    if array.dtype.kind in "iu" and array.shape == (count,) and count and array.min() >= 0 and array.max() < count:
        places = places_of(array)
        if (places >= 0).all() and (places[tables.befores] < places[tables.afters]).all():
            return array.astype(np.int64, copy=False)
    given = given.tolist() if isinstance(given, np.ndarray) else given
    return np.array(graph.checked(given), dtype=np.int64)  # says what is wrong


def places_of(order: Numbers) -> Numbers:
    """The place of each node; -1 where it has none."""
    places = np.full(len(order), -1, dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def lives_of(tables: Tables, order: Numbers) -> tuple[Numbers, Numbers]:
    """The first and the last place of an order at which each buffer is alive; the end, after all nodes, is a place."""
    places = places_of(order)
    births = np.where(tables.makers < 0, 0, places[tables.makers]) if len(order) else np.zeros_like(tables.makers)
    deaths = np.full(len(tables.sizes), len(order), dtype=np.int64)
    if len(tables.users.values):
        dies = np.diff(tables.users.starts) > 0
        deaths[dies] = np.maximum.reduceat(places[tables.users.values], tables.users.starts[:-1][dies])
    return births, deaths


def live_bytes(tables: Tables, order: Numbers) -> Numbers:
    """Requested bytes alive while each node of an order runs; after these, those alive at the end."""
    births, deaths = lives_of(tables, order)
    moved = np.zeros(len(order) + 2, dtype=np.int64)
    np.add.at(moved, births, tables.sizes)
    np.subtract.at(moved, deaths + 1, tables.sizes)
    live = np.cumsum(moved[:-1])
    live[:-1] += tables.scratch[order]
    return live
