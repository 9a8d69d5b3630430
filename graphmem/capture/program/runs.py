"""Loops around training: lists of runs, of which each is followed, its own loops shortened.

``for size in (8, 16, 64): train(size)``, folds, grids, a phase and then another: a list of runs is told by an optimizer
that is made in its body, or by items that decide how it trains. Numbers of a range are counters, as epochs are; what
the body computes from them and tests (``if epoch == 5: unfreeze()``, ``64 * 2**epoch``) says where a run differs, and
is evaluated for all of them ahead (``keys``, from :func:`graphmem.capture.program.loops.derived`).
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

#: Items of one loop that are followed; of more, these are spread over what differs, with the least and the largest.
MOST_RUNS = 25
#: Runs in a row whose peaks are equal, after which a list without an end that is known, or of counters, is left.
ALIKE_RUNS = 5
#: As many items of one key are rare.
_RARE = 3
#: Numbers of a long loop that are looked at, and how many of those follow that are alike.
_MOST_TESTED, _OTHERS = 100_000, 2
_PLAIN = (int, float, str, bool, type(None))
_COMBINATIONS = (itertools.product, itertools.permutations, itertools.combinations)
_LONGEST_LABEL = 60
#: Items of a range for which values are computed ahead.
MOST_COMPUTED = 10_000
#: Stands for an item that is not plain.
_OTHER = object()

#: A value that the body of a loop computes from its item.
Key = Callable[[Any], object]


class Runs:
    """The items of a loop; ``items`` is None for a ``while`` loop. ``name``: the loop's target as it is written."""

    def __init__(
        self, items: object = None, name: str = "", numbers: range | None = None, keys: Sequence[Key] = (),
        is_handed_on: bool = False,
    ) -> None:  # fmt: skip
        self._items, self._name, self._numbers, self._keys = items, name, numbers, keys
        self._is_handed_on = is_handed_on
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] | None = None  # the items to follow, once that is decided
        self._item: Any = None  # the last one, if it is plain: others may hold memory of the card
        self._is_setting = False
        self._peaks: list[int] = []
        self.jumped = 0  # items of a loop with steps of its own that are followed beside the first
        self.skipped = 0  # items; unknown ones count as 1
        self.differ = False  # whether those are other items than those that are followed

    @property
    def followed(self) -> int:
        """How many items were runs."""
        return len(self._peaks)

    def over(self, items: Iterator[Any]) -> None:
        """The iterator over all items."""
        self._iterator = items

    def take(self, fetch: Callable[[Iterator[Any]], Any]) -> Any:
        """The next item. Raises :class:`StopIteration`."""
        if self._ahead is not None and not self._ahead:
            raise StopIteration
        item = fetch(self._iterator) if self._ahead is None else self._ahead.pop(0)
        self._item, self._is_setting = item if _is_plain(item) else _OTHER, _is_setting(item)
        return item

    # --- what the items are ---

    @property
    def varies(self) -> bool:
        """Whether an item decides how its run goes, and is no batch."""
        if self._items is None:
            return False
        return any(key is not None for key in self._key(self._item)) if self._is_counter else self._is_setting

    @property
    def are_settings(self) -> bool:
        """Whether the items are a few plain values, written down to be tried."""
        few = isinstance(self._items, (list, tuple)) and len(self._items) <= MOST_RUNS
        return few and not self._is_counter and _is_plain(self._item)

    @property
    def _is_counter(self) -> bool:
        """Whether the items are counted, as epochs are: numbers of a range, or those that an iterator gives."""
        if self._numbers is not None or self._items is None:
            return True
        if not isinstance(self._items, (list, tuple)):
            return isinstance(self._item, int) and not isinstance(self._items, _COMBINATIONS)
        count = len(self._items)
        return count > 2 and isinstance(self._item, int) and all(map(operator.is_, self._items, range(count)))

    def _key(self, item: Any) -> tuple[object, ...]:
        return tuple(_value(key, item) for key in self._keys)

    @property
    def label(self) -> str:
        """The item that was a run, for people."""
        if self._items is None:
            return f"iteration {len(self._peaks) + 1}"
        shown = repr(self._item) if _is_plain(self._item) else f"item {len(self._peaks) + 1}"
        return f"{self._name} = {shown}"[:_LONGEST_LABEL]

    # --- which are followed ---

    def go_on(self, peak: int, is_new: bool) -> bool:
        """An item has been a run with this peak, with optimizers that it made if it ``is_new``; whether another one may
        follow."""
        self._peaks.append(peak)
        is_alike = len(self._peaks) >= ALIKE_RUNS and len(set(self._peaks[-ALIKE_RUNS:])) == 1
        rest = self._known_rest() if self._ahead is None else None
        if rest is not None:
            self._choose(rest, is_new)
        if self._ahead is not None:
            if is_alike and self._is_counter and self.skipped:
                self._ahead, self.differ = self._ahead[-1:], False
            return bool(self._ahead)
        if is_alike or len(self._peaks) >= MOST_RUNS:
            self.skipped, self.differ = 1, not is_alike
            return False
        return True

    def go_to_tested(self, steps_itself: bool) -> bool:
        """The last numbers that were taken are alike: whether others may follow, at which the body tests something
        that it has not found before (``if step % 500 == 0``; twice, as what it leaves the first time may still be
        there), and the next and the last, if others are told the number."""
        if self._numbers is None or self._ahead is not None or not isinstance(self._item, int):
            return bool(self._ahead)
        at = self._numbers.index(self._item) + 1
        rest, found = self._numbers[at:][:_MOST_TESTED], Counter[str]()
        seen, places = {self._tested(item) for item in self._numbers[:at][-_MOST_TESTED:]}, set[int]()
        for place, item in enumerate(rest if steps_itself and self._keys else ()):
            tested = self._tested(item)
            found[tested] += tested not in seen
            if 0 < found[tested] <= _OTHERS and tested not in seen:
                places |= {place, min(place + 1, len(rest) - 1)}
        self._ahead = [rest[place] for place in sorted(places)[: MOST_RUNS - 1]]
        if self._is_handed_on and at < len(self._numbers) and self._numbers[-1] not in self._ahead:
            self._ahead += dict.fromkeys((*(() if steps_itself else rest[:1]), self._numbers[-1]))
        if not self._ahead:
            self._ahead = None
        return bool(self._ahead)

    def _tested(self, item: Any) -> str:
        """What the body finds true of an item, and what false."""
        return repr([value for value in self._key(item) if isinstance(value, bool)])

    def _known_rest(self) -> list[Any] | None:
        """The items that are left, where they can be listed without doing anything."""
        if isinstance(self._items, _COMBINATIONS):
            return list(self._iterator)
        items = self._items if self._numbers is None else self._numbers
        if not (isinstance(items, Sized) and isinstance(items, Iterable) and hasattr(items, "__getitem__")):
            return None
        return list(items)[1:]

    def _choose(self, rest: list[Any], is_new: bool) -> None:
        of_counter = rest if is_new else self._of_other_keys(rest)
        chosen = of_counter if self._is_counter else _distinct(rest)
        self._ahead = _spread(chosen, list(map(_numbers_in, chosen)))
        self.differ = len(self._ahead) < len(chosen)
        self.skipped = len(rest) - len(self._ahead) if self.differ else 0

    def go_to_others(self) -> bool:
        """Whether other items of a range follow whose own steps differ: one for every value that the body computes of
        none before, the largest among them, and the last two, which may be alike."""
        if self._ahead is None and self._numbers is not None:
            at = self._numbers.index(self._item) + 1
            seen, chosen = {repr(self._key(one)) for one in self._numbers[:at]}, dict[int, list[float]]()
            rest = _evenly(self._numbers[at:], MOST_COMPUTED)
            for one in rest:
                key = self._key(one)
                if repr(key) not in seen:
                    seen.add(repr(key))
                    chosen[one] = _numbers_in([part or 0 for part in key])
            if chosen:
                spread = _spread(list(chosen), list(chosen.values()))
                self._ahead = [*spread, *(one for one in rest[-2:] if one not in spread)]
                self.jumped = len(self._ahead)
        return bool(self._ahead)

    def _of_other_keys(self, rest: list[Any]) -> list[Any]:
        """The first item of every key, the others of rare ones, and the item after one whose key no other has: what is
        done there once may show in the next."""
        keys = [self._key(item) for item in (self._item, *rest)]
        counts, seen, chosen = Counter(map(repr, keys)), {repr(keys[0])}, list[int]()
        for place, key in enumerate(map(repr, keys[1:])):
            is_after_single = place - 1 in chosen and counts[repr(keys[place])] == 1
            if key not in seen or 1 < counts[key] <= _RARE < len(rest) or is_after_single:
                chosen.append(place)
            seen.add(key)
        return [rest[place] for place in chosen]


def _value(key: Key, item: Any) -> object:
    """What the body computes from an item; None for fractions, which are no sizes, and for what cannot be known."""
    try:
        value = key(item)
    except Exception:
        return None
    return None if isinstance(value, float) or not _is_plain(value) else value


def _is_plain(value: object) -> bool:
    """Whether a value is a number, a word or a few of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return len(value) <= MOST_RUNS and all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, range))


def _is_setting(item: object) -> bool:
    """Whether an item may say how to train: no tensor, no array, nothing made of them."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_setting, item[:MOST_RUNS]))
    has_shape = inspect.getattr_static(item, "shape", None) is not None  # without asking: a property may raise
    return not has_shape and not isinstance(item, (bytes, set))


def _distinct(items: list[Any]) -> list[Any]:
    seen, found = set[str](), []
    for item in items:
        if not _is_plain(item) or repr(item) not in seen:
            found.append(item)
            seen.add(repr(item))
    return found


def _numbers_in(item: Any) -> list[float]:
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
    return [part for part in parts if isinstance(part, (int, float))]


def _spread(items: list[Any], rows: list[list[float]]) -> list[Any]:
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
    wanted |= dict.fromkeys(by_sum[:2]) | dict.fromkeys(_evenly(places, most))
    return [items[at] for at in sorted(list(wanted)[:most])]


def _evenly(numbers: range, most: int) -> Sequence[int]:
    """At most so many of the numbers, the first and the last among them."""
    if len(numbers) <= most:
        return numbers
    return [numbers[at * (len(numbers) - 1) // (most - 1)] for at in range(most)]
