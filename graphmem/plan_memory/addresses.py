"""Static addresses: where each buffer of a trace, or of a graph in one order, lies in one block of memory.

Addresses and sizes are bytes from the beginning of that block. The least height that could do is the most that is alive
together (each size rounded up to the alignment), with the forbidden ranges below it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graphmem.base.documents import shown
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.plan_memory import packing
from graphmem.plan_memory.compiled import IS_COMPILED
from graphmem.plan_memory.graphs import Graph
from graphmem.plan_memory.packing import FOUND, IMPOSSIBLE, Lives, Numbers, State
from graphmem.plan_memory.tables import Tables, as_order, deadline, lives_of
from graphmem.trace import MAX_STORAGE_BYTES, Place, Trace

#: Pairs of buffers alive together, or of buffers and obstacles, that are kept in lists. Where there are more, buffers
#: are placed as they are born.
_MOST_PAIRS = 20_000_000 if IS_COMPILED else 200_000
#: Buffers alive together, at most, that are searched: the search goes as deep.
_MOST_SEARCHED = 2_000 if IS_COMPILED else 300
#: Steps of the first attempts of a search, some 10 ms where they are compiled and some 100 ms where they are not.
_FIRST_STEPS = 4_000 if IS_COMPILED else 40


@public_value(frozen=True)
class AddressPlan:
    """Addresses in bytes. ``addresses``: of every storage of the trace, or buffer of the graph; None for those that are
    not on the device or have no bytes. ``scratch``: of every node of the graph.

    ``height``: the bytes of the block; ``lower_bound``: that no plan can be lower. ``by``: what found it.
    """

    addresses: tuple[int | None, ...]
    scratch: tuple[int | None, ...]
    height: int
    lower_bound: int
    by: str
    capacity: int | None = None

    @property
    def is_optimal(self) -> bool:
        """Whether no plan is lower."""
        return self.height == self.lower_bound

    @property
    def fits(self) -> bool:
        """Whether it is no higher than the capacity, if there is one."""
        return self.capacity is None or self.height <= self.capacity


def offsets(
    trace_or_graph: Trace | Graph,
    *,
    order: Iterable[int] | Numbers | None = None,
    alignment: int = 512,
    pinned: Mapping[int, int] | None = None,
    forbidden: Iterable[tuple[int, int]] = (),
    capacity: int | None = None,
    time_limit: float = 10.0,
) -> AddressPlan:
    """Addresses of all that lives on the device, in one block that is as low as could be found.

    ``order``: of a graph's nodes (None: as they stand). ``alignment``: bytes that every address is a multiple of.
    ``pinned``: addresses of storages, or buffers, by index. ``forbidden``: ranges (begin, end) that nothing may touch.
    With a ``capacity`` (bytes) the first plan that fits is taken; if none was found, :attr:`AddressPlan.fits` is False.

    Buffers are placed in several orders, by size, by length of life and as they are born, each in the lowest gap and in
    the one that it fills best; if none of these plans is proven, a search goes on for up to ``time_limit`` seconds (0:
    not at all). Raises :class:`graphmem.errors.GraphmemError` for arguments that are none, and for pinned buffers that
    meet each other or a forbidden range.
    """
    until = deadline(time_limit)
    demand = _demand(trace_or_graph, order)
    asked = _Asked(demand, alignment, {} if pinned is None else pinned, forbidden, capacity)
    plan = _placed(asked, until if time_limit > 0 else None)
    whole = np.full(len(demand.sizes), -1, dtype=np.int64)
    whole[asked.pins] = asked.pinned_at
    whole[asked.free] = plan.addresses * alignment
    found = [None if address < 0 else address for address in whole.tolist()]
    height = max(plan.height * alignment, asked.pinned_height)
    bound = max(plan.bound * alignment, asked.pinned_height)
    return AddressPlan(tuple(found[: demand.buffers]), tuple(found[demand.buffers :]), height, bound, plan.by, capacity)


class _Demand(NamedTuple):
    """What asks for addresses: bytes (0: nothing), and the time from birth to death, excluded; first the buffers, then
    scratch."""

    sizes: Numbers
    births: Numbers
    deaths: Numbers
    buffers: int


def _demand(trace_or_graph: Trace | Graph, order: Iterable[int] | Numbers | None) -> _Demand:
    if isinstance(trace_or_graph, Graph):
        tables, nodes = Tables.of(trace_or_graph), as_order(trace_or_graph, order)
        births, deaths = lives_of(tables, nodes)
        places = np.empty_like(nodes)
        places[nodes] = np.arange(len(nodes))
        sizes = np.concatenate([tables.sizes, tables.scratch])
        return _Demand(sizes, np.concatenate([births, places]), np.concatenate([deaths, places]) + 1, len(births))
    if not isinstance(trace_or_graph, Trace):
        raise UsageError(f"offsets takes a Trace or a Graph, not {type(trace_or_graph).__name__}")
    if order is not None:
        raise UsageError("a trace has one order; give a Graph to ask for another")
    trace = trace_or_graph
    on_device = trace.columns.places == Place.DEVICE
    on_device &= trace.birth_of < len(trace)
    sizes = np.where(on_device, trace.columns.bytes, 0)
    return _Demand(sizes, trace.birth_of, trace.death_of, len(sizes))


class _Asked:
    """The arguments, checked; ``sizes`` and ``obstacles`` in units of the alignment.

    ``free``: indices of what is to be placed; ``pins``: of what is pinned, at ``pinned_at`` (bytes).
    """

    def __init__(
        self,
        demand: _Demand,
        alignment: int,
        pinned: Mapping[int, int],
        forbidden: Iterable[tuple[int, int]],
        capacity: int | None,
    ) -> None:
        if not _is_whole(alignment) or alignment < 1:
            raise UsageError(f"the alignment is {shown(alignment)}; accepted: whole bytes from 1 on")
        if capacity is not None and (not _is_whole(capacity) or capacity < 0):
            raise UsageError(f"the capacity is {shown(capacity)}; accepted: whole bytes from 0 on")
        if not isinstance(pinned, Mapping):
            raise UsageError(f"pinned is {shown(pinned)}; accepted: a mapping from indices to addresses")
        if not isinstance(forbidden, Iterable):
            raise UsageError(f"forbidden is {shown(forbidden)}; accepted: ranges (begin, end) in bytes")
        ranges = [_checked_range(one) for one in forbidden]
        for index, address in pinned.items():
            if not _is_whole(index) or not 0 <= index < demand.buffers or not demand.sizes[index]:
                raise UsageError(f"pinned names {shown(index)}, which asks for no bytes here")
            if not _is_whole(address) or not 0 <= address <= MAX_STORAGE_BYTES or address % alignment:
                raise UsageError(f"{index} is pinned at {shown(address)}; accepted: multiples of {alignment} from 0 on")
        units = -(-demand.sizes // alignment)
        if float(units.sum()) * alignment > MAX_STORAGE_BYTES / 2:
            raise UsageError("all sizes together are more than 2^62 bytes, more than any memory")
        self.demand, self.alignment, self.capacity = demand, alignment, capacity
        self.pins = np.array(sorted(pinned), dtype=np.int64)
        self.pinned_at = np.array([pinned[index] for index in sorted(pinned)], dtype=np.int64)
        ends = self.pinned_at + demand.sizes[self.pins]
        self._refuse_clashes(ranges, ends)
        is_free = demand.sizes > 0
        is_free[self.pins] = False
        self.free = np.flatnonzero(is_free)
        self.sizes, self.births, self.deaths = units[self.free], demand.births[self.free], demand.deaths[self.free]
        self.forbidden = _joined([(low // alignment, -(-high // alignment)) for low, high in ranges])
        self.pin_units = np.column_stack([self.pinned_at // alignment, -(-ends // alignment)])
        self.pinned_height = alignment * int(self.pin_units[:, 1].max()) if len(ends) else 0

    def obstacles(self, members: Numbers) -> tuple[Numbers, Numbers]:
        """What each of some buffers must not touch, as rows: where each begins, and begins and ends of addresses."""
        if not len(self.pins) and not len(self.forbidden):
            return np.zeros(len(members) + 1, dtype=np.int64), self.forbidden
        pins_from, pins_to = self.demand.births[self.pins], self.demand.deaths[self.pins]
        rows = []
        for one in members.tolist():
            meets = (pins_from < self.deaths[one]) & (self.births[one] < pins_to)
            rows.append(np.array(sorted([*self.forbidden.tolist(), *self.pin_units[meets].tolist()]), dtype=np.int64))
        starts = np.concatenate([[0], np.cumsum([len(one) for one in rows])])
        return starts, np.concatenate([one.reshape(-1, 2) for one in rows])

    def pins_between(self, begin: int, end: int) -> tuple[Numbers, Numbers, Numbers]:
        """Births, deaths and units of what is pinned and alive at some time between."""
        births, deaths = self.demand.births[self.pins], self.demand.deaths[self.pins]
        meets = (births < end) & (begin < deaths)
        units = self.pin_units[:, 1] - self.pin_units[:, 0]
        return births[meets], deaths[meets], units[meets]

    def _refuse_clashes(self, ranges: list[tuple[int, int]], ends: Numbers) -> None:
        pins, births, deaths = self.pins, self.demand.births[self.pins], self.demand.deaths[self.pins]
        for one, index in enumerate(pins.tolist()):
            low, high = int(self.pinned_at[one]), int(ends[one])
            for begin, end in ranges:
                if begin < high and low < end:
                    raise UsageError(f"{index} is pinned to {low}..{high}, in the forbidden range {begin}..{end}")
            meets = (births < deaths[one]) & (births[one] < deaths) & (self.pinned_at < high) & (low < ends)
            meets[one] = False
            if meets.any():
                other = int(pins[int(np.argmax(meets))])
                raise UsageError(f"{index} and {other} are pinned to addresses that overlap while both are alive")


def _joined(ranges: list[tuple[int, int]]) -> Numbers:
    """Ranges in order, those that touch or overlap joined."""
    found: list[list[int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1]:
            found[-1][1] = max(found[-1][1], high)
        else:
            found.append([low, high])
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _checked_range(given: Any) -> tuple[int, int]:
    try:
        low, high = given
    except (TypeError, ValueError):
        low = high = None
    if not (_is_whole(low) and _is_whole(high) and 0 <= low < high <= MAX_STORAGE_BYTES):
        raise UsageError(
            f"a forbidden range is {shown(given)}; accepted: (begin, end) in bytes, 0 or more, begin first"
        )
    return int(low), int(high)


# --- placing ----------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """Addresses of what was to be placed, the height and its lower bound in units, and what found them."""

    addresses: Numbers
    height: int
    bound: int
    by: str


def _placed(asked: _Asked, until: float | None) -> _Found:
    """The best plan by that time of the monotonic clock; None: without a search."""
    if not len(asked.free):
        return _Found(np.empty(0, dtype=np.int64), 0, 0, "nothing to place")
    parts = _parts(asked)
    if parts is None:
        return _as_born(asked)
    for part in parts:
        part.place_greedily()
    if until is not None:
        _improve(parts, None if asked.capacity is None else asked.capacity // asked.alignment, until)
    addresses = np.empty(len(asked.free), dtype=np.int64)
    for part in parts:
        addresses[part.members] = part.addresses
    highest = max(parts, key=lambda part: part.height)
    return _Found(addresses, highest.height, max(part.bound for part in parts), highest.by)


def _parts(asked: _Asked) -> list[_Part] | None:
    """What is to be placed, by parts that share no time; None where too much is alive together to be kept in lists."""
    by_birth = np.argsort(asked.births, kind="stable")
    latest = np.maximum.accumulate(asked.deaths[by_birth])
    splits = 1 + np.flatnonzero(asked.births[by_birth][1:] >= latest[:-1])
    parts, left = [], _MOST_PAIRS - len(asked.free) * (len(asked.forbidden) + len(asked.pins))
    if left < 0:
        return None
    for members in np.split(by_birth, splits):
        first, end = sections(asked.births[members], asked.deaths[members])
        counts, births = np.zeros(len(members), dtype=np.int64), np.arange(len(members))
        left -= packing.count_neighbours(first, end, births, counts, left)
        if left < 0:
            return None
        starts = np.concatenate([[0], np.cumsum(counts)])
        others = np.empty(int(starts[-1]), dtype=np.int64)
        packing.write_neighbours(first, end, births, starts[:-1].copy(), others)
        rows = asked.obstacles(members)
        lives = Lives(first, end, asked.sizes[members], starts, others, rows[0], rows[1])
        times = asked.deaths[members] - asked.births[members]
        parts.append(_Part(members, lives, times, _lower_bound(asked, members)))
    return parts


def sections(births: Numbers, deaths: Numbers) -> tuple[Numbers, Numbers]:
    """The sections in which buffers are alive, from the first to the end, excluded: a new one begins with each birth
    that follows a death. Deaths come before births of the same time."""
    count = len(births)
    order = np.lexsort([np.repeat([1, 0], count), np.concatenate([births, deaths])])
    is_birth = order < count
    begins = is_birth & np.concatenate([[True], ~is_birth[:-1]])
    number = np.empty(2 * count, dtype=np.int64)
    number[order] = np.cumsum(begins)
    return number[:count] - 1, number[count:]


def _lower_bound(asked: _Asked, members: Numbers) -> int:
    """The least height of any plan of these buffers: the most that is alive together, with pinned ones, and above the
    forbidden ranges that lie below."""
    births, deaths, sizes = asked.births[members], asked.deaths[members], asked.sizes[members]
    with_pins = asked.pins_between(int(births.min()), int(deaths.max()))
    times = np.concatenate([births, with_pins[0], deaths, with_pins[1]])
    moved = np.concatenate([sizes, with_pins[2], -sizes, -with_pins[2]])
    height = int(np.cumsum(moved[np.lexsort([moved, times])]).max())
    for low, high in asked.forbidden.tolist():  # ascending
        height += high - low if low < height else 0
    return height


def _as_born(asked: _Asked) -> _Found:
    """Of very many: each in the smallest gap when it is born, above everything that is pinned or forbidden."""
    count = len(asked.free)
    order = np.lexsort([np.repeat([1, 0], count), np.concatenate([asked.births, asked.deaths])])
    events = np.where(order < count, order, order - 2 * count)
    placed = np.empty(count, dtype=np.int64)
    base = max((int(rows[:, 1].max()) for rows in (asked.forbidden, asked.pin_units) if len(rows)), default=0)
    height = packing.fit_in_time(asked.sizes, events, placed)
    return _Found(placed + base, height + base, _lower_bound(asked, np.arange(count)), "as they are born")


class _Part:
    """Buffers that are alive together with no others. ``members``: their indices, by birth; ``times``: how long each
    lives; the best ``addresses`` so far, their ``height``, and the ``bound`` of any, in units."""

    def __init__(self, members: Numbers, lives: Lives, times: Numbers, bound: int) -> None:
        self.members, self.lives, self.times, self.bound = members, lives, times, bound
        self.addresses, self.height, self.by = np.empty(0, dtype=np.int64), 1 << 62, ""
        waiting = np.zeros(int(lives.end.max()) + 1, dtype=np.int64)
        np.add.at(waiting, lives.first, lives.sizes)
        np.subtract.at(waiting, lives.end, lives.sizes)
        self._waiting = np.cumsum(waiting)
        self._attempts = self._attempt_forever(np.random.default_rng(0))  # the same plan for the same question

    def place_greedily(self) -> None:
        """Several plans by the size, the length of life and the birth of the buffers; keep the lowest."""
        sizes, lengths = self.lives.sizes, self.lives.end - self.lives.first
        keys = {
            "size": (lengths, sizes),
            "length of life": (sizes, lengths),
            "area": (sizes, sizes * lengths),
            "birth": (),
        }
        for name, by in keys.items():
            order = np.lexsort([-key for key in by]) if by else np.arange(len(sizes))
            for is_best in (False, True):
                placed = np.full(len(sizes), -1, dtype=np.int64)
                height = packing.fit(order, self.lives, is_best, placed)
                self._take(placed, int(height), f"{'best' if is_best else 'first'} fit by {name}")
                if self.height == self.bound:
                    return

    def search(self, capacity: int, until: float) -> bool:
        """Look for a plan no higher than this until some time. If there is none, the bound says so."""
        if len(self.members) > _MOST_SEARCHED:
            return False
        while self.height > capacity >= self.bound and time.monotonic() < until:
            order, is_by_waiting, steps = next(self._attempts)
            lives, count = _renamed(self.lives, order), len(order)
            lowest = np.array([packing.lifted(lives, one, 0) for one in range(count)], dtype=np.int64)
            state = State(
                np.full(count, -1, dtype=np.int64), lowest, lowest.copy(), self._waiting.copy(), self._waiting.copy()
            )
            ranked = np.arange(count)
            if is_by_waiting:
                ranked = packing.by_waiting(ranked, lives, state.waiting)
            answer = packing.search(ranked, 0, 0, lives, state, capacity, is_by_waiting, np.array([steps]))
            if answer == FOUND:
                addresses = np.empty(count, dtype=np.int64)
                addresses[order] = state.placed
                self._take(addresses, int((addresses + self.lives.sizes).max()), "search")
            elif answer == IMPOSSIBLE:
                self.bound = capacity + 1
        return self.height <= capacity

    def _take(self, addresses: Numbers, height: int, by: str) -> None:
        if height < self.height:
            self.addresses, self.height, self.by = addresses, height, by

    def _attempt_forever(self, draw: np.random.Generator) -> Iterator[tuple[Numbers, bool, int]]:
        """Orders of the buffers, each with whether those in the fullest sections come first, and the steps after which
        it is given up. By turns fixed ones, with ever more steps, and ever more that are drawn, with few: a plan is
        often near in one order and far in the next."""
        sizes, lengths = self.lives.sizes, self.lives.end - self.lives.first
        keys = [lengths, self.times, sizes * lengths, sizes, np.diff(self.lives.starts) + 1]
        fixed = [((2, 0), True), ((1, 0), True), ((0, 2), True), ((1, 0), False)]
        scores = np.stack([_standard(np.log(values)) for values in keys])
        for doubled in itertools.count():
            for chosen, is_by_waiting in fixed:
                yield np.lexsort([-keys[key] for key in chosen]), is_by_waiting, _FIRST_STEPS << doubled
            for _ in range(8 << doubled):
                score = draw.dirichlet(np.ones(len(keys))) @ scores
                yield np.lexsort([-score]), True, _FIRST_STEPS


def _standard(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    made: npt.NDArray[np.float64] = (values - values.mean()) / (values.std() or 1.0)
    return made


def _renamed(lives: Lives, order: Numbers) -> Lives:
    """The same lives with buffers named by their place in ``order``."""
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    starts, others = _reordered(lives.starts, rank[lives.others], order)
    obstacle_starts, obstacles = _reordered(lives.obstacle_starts, lives.obstacles, order)
    return Lives(lives.first[order], lives.end[order], lives.sizes[order], starts, others, obstacle_starts, obstacles)


def _reordered(starts: Numbers, values: Numbers, order: Numbers) -> tuple[Numbers, Numbers]:
    """Rows of values in another order."""
    lengths = np.diff(starts)[order]
    made = np.concatenate([[0], np.cumsum(lengths)])
    return made, values[np.repeat(starts[:-1][order] - made[:-1], lengths) + np.arange(made[-1])]


def _improve(parts: list[_Part], capacity: int | None, until: float) -> None:
    """Search for lower plans: first for the lowest that could be, or one that fits, for half of the time or more; then
    midway between what was not found and the best, and so on."""

    def goal() -> int:
        return max(max(part.bound for part in parts), capacity or 0)

    failed, share = goal() - 1, 2.0 if capacity is None else 4 / 3
    while (height := max(part.height for part in parts)) > goal() and time.monotonic() < until:
        target = goal() if failed < goal() else (failed + height) // 2
        if target == failed or (capacity is not None and goal() > capacity):
            failed = goal() - 1
            continue
        now = time.monotonic()
        slot = now + max((until - now) / share, 0.05)
        share = 4.0
        if not all(part.search(target, min(until, slot)) for part in parts if part.height > target):
            failed = target
