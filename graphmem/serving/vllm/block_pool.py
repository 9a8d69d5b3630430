"""The pool of blocks: which are free, which of those are found again by their hash, and who is taken next.

Followed from vllm 0.32.0, ``v1/core/block_pool.py``. Free blocks without a hash come first; of the others whoever was
given back longest ago, the last ones of a request before its first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class Cached:
    """Blocks with a hash: one that several requests may begin with, or all of what only one request has."""

    __slots__ = ("count", "holders", "key")

    def __init__(self, key: Hashable, count: int = 1, holders: int = 0) -> None:
        self.key, self.count, self.holders = key, count, holders


class BlockPool:
    """Blocks that requests take and give back. Those of one request alone are only counted, by its number."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self._plain = blocks  #: free ones without a hash
        self._queue: OrderedDict[Cached, None] = OrderedDict()
        self._known: dict[Hashable, list[Cached]] = {}

    def take(self, blocks: int) -> None:
        """The next so many free ones, which are there."""
        self.free -= blocks
        plain = min(blocks, self._plain)
        self._plain -= plain
        blocks -= plain
        while blocks:
            cached = next(iter(self._queue))
            taken = min(blocks, cached.count)
            cached.count -= taken
            blocks -= taken
            if not cached.count:
                del self._queue[cached]
                self._forget(cached)

    def give_back(self, plain: int, own: int, shared: Sequence[Cached], owner: Hashable = None) -> None:
        """What a request held: blocks without a hash, those that only it has, and those that others may hold too. It
        may come back for its own as ``owner``; nobody looks for those of None."""
        self.free += plain + own
        self._plain += plain
        if own:
            last = next(reversed(self._queue), None)
            if owner is None and last is not None and last.key is None:
                last.count += own
            else:
                self._queue[Cached(owner, own) if owner is None else self.publish(owner, own)] = None
        for cached in reversed(shared):
            cached.holders -= 1
            if not cached.holders:
                self.free += 1
                self._queue[cached] = None

    def publish(self, key: Hashable, count: int = 1, holders: int = 0) -> Cached:
        """Blocks are found by this key from now on, behind others with the same."""
        cached = Cached(key, count, holders)
        self._known.setdefault(key, []).append(cached)
        return cached

    def found(self, keys: Iterable[Hashable]) -> list[Cached]:
        """Blocks of the first of these keys, up to one that is not known."""
        blocks: list[Cached] = []
        for key in keys:
            known = self._known.get(key)
            if known is None:
                break
            blocks.append(known[0])
        return blocks

    def hold(self, shared: Iterable[Cached]) -> None:
        """A request holds them, whoever else does."""
        for cached in shared:
            if not cached.holders:
                self.free -= 1
                del self._queue[cached]
            cached.holders += 1

    def kept(self, owner: Hashable) -> int:
        """Free blocks that only this request has and would find again."""
        known = self._known.get(owner)
        return known[0].count if known else 0

    def take_back(self, owner: Hashable, blocks: int) -> None:
        """The request takes so many of its own; nobody looks for the rest."""
        known = self._known.get(owner)
        if known:
            own = known[0]
            self._forget(own)
            own.key = None
            own.count -= blocks
            self.free -= blocks
            if not own.count:
                del self._queue[own]

    def _forget(self, cached: Cached) -> None:
        known = self._known.get(cached.key)
        if known is not None:
            known.remove(cached)
            if not known:
                del self._known[cached.key]
