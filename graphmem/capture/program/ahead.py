"""Which numbers of a long loop are followed beside its first, by what its body computes of each, known ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from graphmem.capture.values.tensors import parts_of

#: Numbers of one loop that are followed; of more, these are spread over what differs, with the least and the largest.
MOST_RUNS = 25
#: Numbers of a long loop that are looked at, and how many of those follow that are alike.
MOST_TESTED, _OTHERS = 100_000, 2
#: Numbers for which sizes are computed ahead, and those of tensors and rows of data, which take longer.
MOST_COMPUTED, MOST_TAKEN = 10_000, 1_000

_PLAIN = (int, float, str, bool, type(None))

#: A value that the body of a loop computes from its item, as :func:`value_of` has it.
Key = Callable[[Any], object]
_ValuesOf = Callable[[int], tuple[object, ...]]
#: What the body of a loop computes from one of its numbers: all of it, or by the keys at these places.
Values = Callable[[int, "Collection[int] | None"], tuple[object, ...]]


class Sizes(tuple[int, ...]):
    """The sizes of a tensor or an array that the body takes by a number: ``data[order[i : i + 64]]``."""


def unlike(seen: Iterable[tuple[object, ...]], rest: range, values: Values) -> list[int]:
    """Of the rest of a loop's numbers those at which its body does something else than at those before: a test comes
    out otherwise, or what it takes is of another size, as a last batch is. ``seen``: the values of those before."""
    rows = [*seen]
    taken = [place for place, value in enumerate(rows[-1] if rows else ()) if isinstance(value, Sizes)]
    others = [place for place in range(len(rows[-1]) if rows else 0) if place not in taken]
    found = tested([_at(row, others) for row in rows], rest, lambda one: values(one, others))
    if taken:
        few = evenly(rest, MOST_TAKEN)
        found += sized([_at(row, taken) for row in rows], few, lambda one: values(one, taken))
    return sorted({*found})


def _at(row: tuple[object, ...], places: Iterable[int]) -> tuple[object, ...]:
    return tuple(row[place] for place in places if place < len(row))


def tested(seen: Iterable[tuple[object, ...]], rest: Sequence[int], values: _ValuesOf) -> list[int]:
    """Of the rest of a loop's numbers those at which its body finds true what it did not of those before (``if step %
    500 == 0``), each with the one behind it; twice, as what it leaves the first time may still be there. What it found
    of the first number alone follows once more: nothing was there yet that the first step leaves. ``seen``: the values
    of those before."""
    first, *others = [*map(_truths, seen)] or [""]
    known, found, places = set(others), Counter([first]), set[int]()
    for place, one in enumerate(rest[:MOST_TESTED]):
        truths = _truths(values(one))
        if truths in known or found[truths] == _OTHERS:
            continue
        found[truths] += 1
        places |= {place, min(place + 1, len(rest) - 1)}
    return [rest[place] for place in sorted(places)[: MOST_RUNS - 1]]


def sized(seen: Iterable[tuple[object, ...]], rest: Sequence[int], values: _ValuesOf) -> list[int]:
    """Of the rest of a loop's numbers one for every value that its body computes of none before, the largest among
    them, and the last two, which may be alike; none if it computes nothing new."""
    known, chosen = set(map(repr, seen)), dict[int, list[float]]()
    few = evenly(rest, MOST_COMPUTED)
    for one in few:
        computed = values(one)
        if repr(computed) not in known:
            known.add(repr(computed))
            chosen[one] = numbers_in([part or 0 for part in computed])
    spread_ = spread(list(chosen), list(chosen.values()))
    return [*spread_, *(one for one in few[-2:] if one not in spread_)] if chosen else []


def _truths(values: tuple[object, ...]) -> str:
    """What the body finds true of a number, and what false."""
    return repr([value for value in values if isinstance(value, bool)])


# --- what a body computes ---------------------------------------------------------------------------------------------


def computed(keys: Sequence[Key], item: Any, places: Iterable[int] | None = None) -> tuple[object, ...]:
    """What the body computes from an item: all of it, or by the keys at these places."""
    return tuple(key(item) for key in (keys if places is None else (keys[place] for place in places)))


def value_of(compute: Callable[[Any], object], item: Any) -> object:
    """What the body computes from an item, of tensors and arrays their sizes; None for fractions, which are no sizes,
    and for what cannot be known."""
    try:
        value = _described(compute(item))
    except Exception:
        return None
    return None if isinstance(value, float) or not is_plain(value) else value


def _described(value: object) -> object:
    if isinstance(value, (list, tuple)) and not isinstance(value, Sizes) and len(value) <= MOST_RUNS:
        parts = [*map(_described, value)]
        return Sizes(map(int, numbers_in(parts))) if any(isinstance(part, Sizes) for part in parts) else value
    shape = None if isinstance(value, type) else getattr(value, "shape", None)
    return Sizes(map(int, shape)) if isinstance(shape, tuple) else value


def is_plain(value: object) -> bool:
    """Whether a value is a number, a word or a few of them."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return len(parts_of(value)) <= MOST_RUNS and all(map(is_plain, parts_of(value)))
    return isinstance(value, (*_PLAIN, range))


# --- a few of many ----------------------------------------------------------------------------------------------------


def spread(items: list[Any], rows: list[list[float]]) -> list[Any]:
    """Fewer than :data:`MOST_RUNS` of the items in their order: for every number in their rows those where it is
    largest and least, the first and the last, and others between."""
    most = MOST_RUNS - 1
    if len(items) <= most:
        return items
    places = range(len(items))
    wanted = {places[-1]: None, 0: None}
    for column in range(min(map(len, rows))):
        by_column = sorted(places, key=lambda at: rows[at][column])
        wanted |= {by_column[-1]: None, by_column[0]: None}
    by_sum = sorted(places, key=lambda at: -sum(rows[at]))
    wanted |= dict.fromkeys(by_sum[:2]) | dict.fromkeys(evenly(places, most))
    return [items[at] for at in sorted(list(wanted)[:most])]


def evenly(numbers: Sequence[int], most: int) -> Sequence[int]:
    """At most so many of the numbers, the first and the last among them."""
    if len(numbers) <= most:
        return numbers
    return [numbers[at * (len(numbers) - 1) // (most - 1)] for at in range(most)]


def numbers_in(item: Any) -> list[float]:
    """The numbers that an item consists of."""
    if isinstance(item, (int, float)):
        return [item]
    parts = item.values() if isinstance(item, dict) else parts_of(item) if isinstance(item, (list, tuple)) else ()
    return [number for part in parts for number in numbers_in(part)]
