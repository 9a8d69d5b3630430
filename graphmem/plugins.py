"""Runtimes and engines by name: graphmem's own, and those that installed packages bring. One rule for all kinds.

A package names an object in an entry-point group, under the object's own name. It is refused, in one line that names
the package, where it cannot be loaded, lacks something of the protocol, calls itself otherwise, or has a name that
somebody else has. Case, dashes and underscores of a name do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from graphmem.errors import UsageError

Plugin = TypeVar("Plugin")


def spelled(name: str) -> str:
    """A name as it is compared."""
    return name.strip().lower().replace("-", "").replace("_", "")


class Plugins(Generic[Plugin]):
    """All of one kind. ``group``: the entry points; ``kind``: the word for one (``runtime``); ``own``: the names of
    graphmem's, ``load`` one of them; ``protocol``: the class that says what one is, imported when it is needed."""

    def __init__(
        self,
        group: str,
        kind: str,
        own: Callable[[], Sequence[str]],
        load: Callable[[str], Plugin],
        protocol: Callable[[], type],
    ) -> None:
        self._group, self._kind, self._own = group, kind, own
        self._one = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._load, self._protocol = cache(load), protocol
        self._plugin = cache(self._loaded)

    def names(self) -> tuple[str, ...]:
        """The names of all, graphmem's own first. Raises :class:`UsageError` for one that is there twice."""
        return (*self._own(), *sorted(self._entries()))

    def all(self) -> Iterator[Plugin]:
        """All in the order of :meth:`names`. Raises :class:`UsageError` for one that cannot be loaded."""
        yield from map(self._load, self._own())
        for _, entry in sorted(self._entries().items()):
            yield self._plugin(entry)

    def named(self, name: str, beside: Sequence[str] = ()) -> Plugin:
        """The one of this name or spelling. Raises :class:`UsageError` listing what is accepted, with the names
        ``beside`` that the caller knows himself, and for a plug-in that cannot be loaded."""
        key = spelled(name)
        if key in self._own():
            return self._load(key)
        for own in map(self._load, self._own()):
            if key in getattr(own, "spellings", ()):
                return own
        entries = self._entries()
        for entry in entries.values():
            if key == spelled(entry.name):
                return self._plugin(entry)
        for entry in entries.values():
            plugin = self._plugin(entry)
            if key in getattr(plugin, "spellings", ()):
                return plugin
        accepted = ", ".join((*self._own(), *sorted(entries), *beside))
        raise UsageError(f"unknown {self._kind} {name!r}; accepted: {accepted}")

    def _entries(self) -> dict[str, EntryPoint]:
        """The entry points by name. Raises :class:`UsageError` where two have one name."""
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self._group):
            if spelled(entry.name) in self._own():
                raise UsageError(
                    f"{_origin(entry)} brings {self._one} {entry.name!r}, which is graphmem's own; remove it"
                )
            other = next((one for one in found.values() if spelled(one.name) == spelled(entry.name)), None)
            if other is not None and other.value != entry.value:
                raise UsageError(
                    f"{_origin(entry)} and {_origin(other)} both bring {self._one} {entry.name!r}; remove one of them"
                )
            found[entry.name] = entry
        return found

    def _loaded(self, entry: EntryPoint) -> Plugin:
        kind = self._kind
        try:
            plugin: Plugin = entry.load()
        except Exception as error:  # whatever the package raises
            reason = " ".join(str(error).split()) or "no message"
            raise UsageError(
                f"the {kind} {entry.name!r} of {_origin(entry)} cannot be loaded: {type(error).__name__}: {reason}"
            ) from error
        named = f"{entry.value} of {_origin(entry)}"
        if isinstance(plugin, type):
            raise UsageError(f"{named} is a class; {self._one} is an object: name an instance of it")
        protocol = self._protocol()
        wanted = (name for name in (*vars(protocol)["__annotations__"], *vars(protocol)) if not name.startswith("_"))
        lacking = [name for name in dict.fromkeys(wanted) if not hasattr(plugin, name)]
        if lacking:
            where = f"{protocol.__module__}.{protocol.__qualname__}"
            raise UsageError(f"{named} is no {kind}, as {where} says what one is; it lacks {', '.join(lacking)}")
        if getattr(plugin, "name", None) != entry.name:
            raise UsageError(
                f"{named} is entered as {entry.name!r} and calls itself {getattr(plugin, 'name', None)!r}; give it one "
                "name"
            )
        return plugin


def _origin(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else f"the entry point {entry.value}"
