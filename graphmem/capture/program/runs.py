"""Loops around training: lists of runs, of which each is followed, its own loops shortened.

``for size in (8, 16, 64): train(size)``, folds, grids, a phase and then another: a list of runs is told by an optimizer
that is made in its body, or by items that decide how it trains. Numbers of a range are counters, as epochs are; what
the body computes from them and tests (``if epoch == 5: unfreeze()``, ``64 * 2**epoch``) says where a run differs, and
is evaluated for all of them ahead (``keys``, from :func:`graphmem.capture.program.loops.derived`).
"""

from __future__ import annotations

import collections
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from typing import Any

from graphmem.capture.program import ahead
from graphmem.capture.program.ahead import MOST_RUNS, Key, computed, is_plain
from graphmem.capture.program.counters import Counter
from graphmem.capture.values.tensors import parts_of

#: Runs in a row whose peaks are equal, after which a list without an end that is known, or of counters, is left.
ALIKE_RUNS = 5
#: As many items of one key are rare.
_RARE = 3
_COMBINATIONS = (itertools.product, itertools.permutations, itertools.combinations)
_LONGEST_LABEL = 60
#: Stands for an item that is not plain.
_OTHER = object()


class Runs:
    """The items of a loop; ``items`` is None for a ``while`` loop. ``name``: the loop's target as it is written;
    ``numbers``: those that it goes over, or that its items are ``enumerated`` by; ``counters``: those it counts on."""

    def __init__(
        self, items: object = None, name: str = "", numbers: range | None = None, keys: Sequence[Key] = (),
        is_handed_on: bool = False, enumerated: range | None = None, counters: Sequence[Counter] = (),
    ) -> None:  # fmt: skip
        self._items, self._name, self._numbers, self._keys = items, name, numbers, keys
        self._is_handed_on, self._enumerated, self.counters = is_handed_on, enumerated, counters
        self._iterator: Iterator[Any] = iter(())
        self._ahead: list[Any] | None = None  # the items to follow, once that is decided
        self._item: Any = None  # the last one, if it is plain: others may hold memory of the card
        self._is_setting = False
        self._number: object = None  # of the last item, if items are enumerated
        self._peaks: list[int] = []
        self._jumped = 0  # items of a loop with steps of its own that are followed beside the first
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
        if self._enumerated is not None:
            item = self._with_number(fetch(self._iterator))
        elif self._ahead is not None and not self._ahead:
            raise StopIteration
        else:
            item = fetch(self._iterator) if self._ahead is None else self._ahead.pop(0)
        self._item, self._is_setting = item if is_plain(item) else _OTHER, _is_setting(item)
        return item

    def _with_number(self, item: Any) -> Any:
        """An item of ``enumerate``, with the number that it is to have."""
        if self._ahead:
            item = (self._ahead.pop(0), *item[1:])
        self._number = item[0]
        return item

    # --- what the items are ---

    @property
    def varies(self) -> bool:
        """Whether an item decides how its run goes, and is no batch."""
        if self._items is None:
            return False
        if not self._is_counter:
            return self._is_setting
        return any(key is not None and not isinstance(key, ahead.Sizes) for key in computed(self._keys, self._item))

    @property
    def are_settings(self) -> bool:
        """Whether the items are a few plain values, written down to be tried."""
        few = isinstance(self._items, (list, tuple)) and len(self._items) <= MOST_RUNS
        return few and not self._is_counter and is_plain(self._item)

    @property
    def _is_counter(self) -> bool:
        """Whether the items are counted, as epochs are: numbers of a range, or those that an iterator gives."""
        if self._numbers is not None or self._items is None:
            return True
        if not isinstance(self._items, (list, tuple)):
            return isinstance(self._item, int) and not isinstance(self._items, _COMBINATIONS)
        count = len(self._items)
        return count > 2 and isinstance(self._item, int) and all(map(operator.is_, self._items, range(count)))

    @property
    def label(self) -> str:
        """The item that was a run, for people."""
        if self._items is None:
            return f"iteration {len(self._peaks) + 1}"
        shown = repr(self._item) if is_plain(self._item) else f"item {len(self._peaks) + 1}"
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

    @property
    def has_next(self) -> bool:
        """Whether an item is known to follow the last one, or nothing says that none does."""
        numbers, number = self._counted
        return number != numbers[-1] if numbers is not None else self._ahead is None

    def go_to_next(self) -> None:
        """The item behind the last one follows too, where :attr:`has_next`."""
        numbers, number = self._counted
        if numbers is None or self._ahead is None:
            return  # as it does by itself
        following = numbers[numbers.index(number) + 1]
        if following not in self._ahead[:1]:
            self._ahead.insert(0, following)

    def go_to_tested(self, steps_itself: bool) -> bool:
        """The last numbers that were taken are alike: whether others may follow, at which the body tests something
        that it has not found before, and the next and the last, if others are told the number."""
        numbers, number = self._counted
        if numbers is None or self._ahead is not None:
            return bool(self._ahead)
        at = numbers.index(number) + 1
        rest = numbers[at:]
        if steps_itself and self._keys:
            seen = map(self._key_of_number, numbers[:at][-ahead.MOST_TESTED :])
            self._ahead = ahead.unlike(seen, rest, self._key_of_number)
        if self._is_handed_on and self._numbers is not None and rest and numbers[-1] not in (self._ahead or ()):
            told = dict.fromkeys((*(() if steps_itself else rest[:1]), numbers[-1]))
            self._ahead = [*(self._ahead or ()), *told]
        self._ahead = self._ahead or None
        return bool(self._ahead)

    @property
    def jumped(self) -> int:
        """How many numbers of other sizes are followed beside the first."""
        return max(self._jumped, *(one.jumped for one in self.counters), 0)

    @property
    def count_ahead(self) -> int:
        """How many items follow that were chosen."""
        return max(len(self._ahead or ()), *(one.count for one in self.counters), 0)

    @property
    def _counted(self) -> tuple[range | None, Any]:
        """The numbers that the loop goes over, or by which its items are enumerated, and the last that it took."""
        numbers, last = self._numbers, self._item
        if self._enumerated is not None:
            numbers, last = self._enumerated, self._number
        return (numbers if type(last) is int and numbers is not None and last in numbers else None), last

    def _key_of_number(self, number: int, places: Collection[int] | None = None) -> tuple[object, ...]:
        """What the body computes of a number that is an item, or by which one is enumerated."""
        return computed(self._keys, number if self._enumerated is None else (number, _OTHER), places)

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
        self._ahead = ahead.spread(chosen, list(map(ahead.numbers_in, chosen)))
        self.differ = len(self._ahead) < len(chosen)
        self.skipped = len(rest) - len(self._ahead) if self.differ else 0

    def go_to_others(self) -> bool:
        """Whether other items follow whose own steps differ: one for every value that the body computes of a number of
        none before, the largest among them, and the last two, which may be alike."""
        numbers, number = self._counted
        if self._ahead is None and numbers is not None:
            at = numbers.index(number) + 1
            seen = map(self._key_of_number, numbers[:at])
            self._ahead = ahead.sized(seen, numbers[at:], self._key_of_number) or None
            self._jumped = len(self._ahead or ())
        return bool(self._ahead)

    def _of_other_keys(self, rest: list[Any]) -> list[Any]:
        """The first item of every key, the others of rare ones, and the item after one whose key no other has: what is
        done there once may show in the next."""
        keys = [computed(self._keys, item) for item in (self._item, *rest)]
        counts, seen, chosen = collections.Counter(map(repr, keys)), {repr(keys[0])}, list[int]()
        for place, key in enumerate(map(repr, keys[1:])):
            is_after_single = place - 1 in chosen and counts[repr(keys[place])] == 1
            if key not in seen or 1 < counts[key] <= _RARE < len(rest) or is_after_single:
                chosen.append(place)
            seen.add(key)
        return [rest[place] for place in chosen]


def _is_setting(item: object) -> bool:
    """Whether an item may say how to train: no tensor, no array, nothing made of them."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_setting, parts_of(item)[:MOST_RUNS]))
    has_shape = inspect.getattr_static(item, "shape", None) is not None  # without asking: a property may raise
    return not has_shape and not isinstance(item, (bytes, set))


def _distinct(items: list[Any]) -> list[Any]:
    seen, found = set[str](), []
    for item in items:
        if not is_plain(item) or repr(item) not in seen:
            found.append(item)
            seen.add(repr(item))
    return found
