"""SGLang's tree of what it has computed: which tokens a request finds again, and which of them give way first.

Followed from sglang 0.5.23, ``srt/mem_cache/unified_cache/unified_tree_core.py`` with the usual policy ``lru``. Tokens
are not kept: a text is its names, each up to some position, and two texts are alike as far as their names are.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from itertools import count

#: (name, position behind its last token), in order.
Text = tuple[tuple[Hashable, int], ...]


class Node:
    """Tokens ``start`` to ``stop`` of a text. ``locks``: requests that hold them; ``used``: when they were last."""

    __slots__ = ("children", "locks", "parent", "start", "stop", "text", "used")

    def __init__(self, text: Text, start: int, stop: int, parent: Node | None, used: float) -> None:
        self.text, self.start, self.stop, self.parent, self.used = text, start, stop, parent, used
        self.children: dict[Hashable, Node] = {}
        self.locks = 0


class RadixTree:
    """The tree, in whole pages of so many tokens. ``held`` are tokens that requests have locked, ``evictable`` the
    others."""

    def __init__(self, page: int) -> None:
        self._page = page
        self.root = Node((), 0, 0, None, 0.0)
        self.held = self.evictable = 0
        self._clock = count(1)
        self._order = count()
        self._leaves: list[tuple[float, int, Node]] = []  #: those that may go; some are out of date

    def match(self, text: Text, tokens: int) -> Node:
        """The end of what is there of a text's first tokens. It is used now."""
        node = self.root
        tokens -= tokens % self._page
        if not tokens:
            return node
        while node.stop < tokens and (child := node.children.get(self._first(text, node.stop))) is not None:
            stop = self._common(child, text, tokens)
            node = child if stop == child.stop else self._split(child, stop)
            if node is not child:
                break
        now = float(next(self._clock))
        up: Node | None = node
        while up is not None:
            up.used = now
            now -= 0.00001
            self._offer(up)
            up = up.parent
        return node

    def insert(self, text: Text, tokens: int) -> Node:
        """The same, with a new leaf for what is not there."""
        node = self.root
        tokens -= tokens % self._page
        while node.stop < tokens and (child := node.children.get(self._first(text, node.stop))) is not None:
            child.used = next(self._clock)
            self._offer(child)
            stop = self._common(child, text, tokens)
            node = child if stop == child.stop else self._split(child, stop)
        if node.stop < tokens:
            leaf = Node(text, node.stop, tokens, node, next(self._clock))
            node.children[self._first(text, node.stop)] = leaf
            self.evictable += leaf.stop - leaf.start
            self._offer(leaf)
            return leaf
        return node

    def lock(self, node: Node) -> Node:
        """A request holds it, and all before it."""
        up: Node | None = node
        while up is not None:
            if not up.locks:
                self._move(up.stop - up.start)
            up.locks += 1
            up = up.parent
        return node

    def unlock(self, node: Node) -> None:
        """A request no longer does."""
        up: Node | None = node
        while up is not None:
            up.locks -= 1
            if not up.locks:
                self._move(up.start - up.stop)
                self._offer(up)
            up = up.parent

    def evict(self, tokens: int) -> int:
        """Leaves go, whoever was not used for longest first, until they held so many tokens; how many they held."""
        freed = 0
        while freed < tokens and self._leaves:
            used, _, node = heappop(self._leaves)
            parent = node.parent
            if used != node.used or node.locks or node.children or parent is None:
                continue
            freed += node.stop - node.start
            del parent.children[self._first(node.text, node.start)]
            node.parent = None
            self._offer(parent)
        self.evictable -= freed
        return freed

    def _move(self, tokens: int) -> None:
        self.held += tokens
        self.evictable -= tokens

    def _offer(self, node: Node) -> None:
        if not node.locks and not node.children and node.parent is not None:
            heappush(self._leaves, (node.used, next(self._order), node))

    def _split(self, node: Node, at: int) -> Node:
        """The first part of a node, which keeps the other as its child."""
        assert node.parent is not None
        first = Node(node.text, node.start, at, node.parent, next(self._clock))
        first.locks = node.locks
        node.parent.children[self._first(node.text, node.start)] = first
        first.children[self._first(node.text, at)] = node
        node.start, node.parent, node.used = at, first, next(self._clock)
        self._offer(node)
        return first

    def _first(self, text: Text, start: int) -> Hashable:
        """A page of a text from here."""
        stop, found = start + self._page, []
        for name, end in text:
            if end > start:
                found.append((name, min(end, stop)))
                if end >= stop:
                    break
        return tuple(found)

    def _common(self, node: Node, text: Text, tokens: int) -> int:
        """Up to where the text is the node's."""
        at, stop = node.start, min(node.stop, tokens)
        ours, others = iter(node.text), iter(text)
        name, end = next(ours)
        other, other_end = next(others)
        while at < stop:
            while end <= at:
                name, end = next(ours)
            while other_end <= at:
                other, other_end = next(others)
            if name != other:
                break
            at = min(end, other_end)
        at = min(at, stop)
        return at - at % self._page
