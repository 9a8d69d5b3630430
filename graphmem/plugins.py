"""Parts that are found by name: graphmem's own, and those that installed packages bring as entry points.

A kind of part (runtimes, serving engines, report formats, commands) is one :class:`Kind`: where graphmem's own lie, and
the entry-point group under which other packages name theirs. graphmem's own are found in its folders, so that they do
not depend on how, or how lately, it was installed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from traceback import walk_tb
from typing import Any, Generic, TypeVar, cast

from graphmem.errors import UsageError, one_line

Part = TypeVar("Part")


@dataclass(frozen=True)
class Kind(Generic[Part]):
    """A kind of part: ``word``: its name in messages, ``group`` the entry-point group of other packages.

    graphmem's own are modules of ``package``, each of which gives its part under the name ``attribute`` (in which
    ``{}`` stands for the module's name): those named in ``order``, or all but ``others``; one that ``needs`` a room of
    graphmem is there only with it. ``protocol`` is the class of which a part has every public attribute, written
    ``module:Class``.
    """

    word: str
    group: str
    package: str
    attribute: str
    protocol: str = ""
    order: Sequence[str] = ()
    others: Sequence[str] = ()
    needs: Mapping[str, str] = field(default_factory=dict)

    def own(self) -> tuple[str, ...]:
        """The names of graphmem's own, none of which is imported."""
        there = _modules(self.package)
        if not self.order:
            return tuple(sorted(there.difference(self.others)))
        return tuple(name for name in self.order if _module(name) in there and _is_there(self.needs.get(name)))

    def names(self) -> tuple[str, ...]:
        """The names of all, graphmem's own first. Raises :class:`UsageError` for one that is there twice."""
        return (*self.own(), *sorted(self._brought()))

    def all(self) -> Iterator[Part]:
        """All parts in the order of :meth:`names`. Raises :class:`UsageError` for one that cannot be loaded."""
        return (self._part(name) for name in self.names())

    def named(self, name: str, beside: Sequence[str] = ()) -> Part:
        """The part of this name, or of one of its ``spellings``; case, dashes and underscores do not matter. Raises
        :class:`UsageError` listing the accepted names, and for a plug-in that cannot be loaded or lacks something."""
        wanted = _key(name)
        own = self.own()
        for known in own:  # before anything is imported, or other packages are looked through
            if _key(known) == wanted:
                return self._part(known)
        for known in own:
            if wanted in map(_key, getattr(self._part(known), "spellings", ())):
                return self._part(known)
        brought = sorted(self._brought())
        for known in sorted(brought, key=lambda one: _key(one) != wanted):
            if wanted in map(_key, (known, *getattr(self._part(known), "spellings", ()))):
                return self._part(known)
        raise UsageError(f"unknown {self.word} {name!r}; accepted: {', '.join((*own, *brought, *beside))}")

    def _part(self, name: str) -> Part:
        if name in self.own():
            module = importlib.import_module(f"{self.package}.{_module(name)}")
            return cast("Part", getattr(module, self.attribute.format(_module(name))))
        return cast("Part", _plugin(self.word, self.protocol, self._brought()[name]))

    def _brought(self) -> dict[str, EntryPoint]:
        """The entry points of other packages by name. Raises :class:`UsageError` where two have one name."""
        found: dict[str, EntryPoint] = {}
        own = set(map(_key, self.own()))
        for entry in entry_points(group=self.group):
            named = f"{_a(self.word)} {entry.name!r}"
            if _key(entry.name) in own:
                raise UsageError(f"{_origin(entry)} brings {named}, which is graphmem's own; remove it")
            other = found.setdefault(entry.name, entry)
            if other.value != entry.value:
                raise UsageError(f"{_origin(entry)} and {_origin(other)} both bring {named}; remove one of them")
        return found


@cache
def _modules(package: str) -> frozenset[str]:
    return frozenset(found.name for found in pkgutil.iter_modules(importlib.import_module(package).__path__))


@cache
def _is_there(room: str | None) -> bool:
    return room is None or find_spec(room) is not None


def _module(name: str) -> str:
    return name.replace("-", "_")


#: The groups of entry points by which other packages bring parts.
GROUPS = ("commands", "runtimes", "serving", "reports", "exports", "engines")


def package_at_fault(error: BaseException) -> str | None:
    """The name of the other package that brings a part and whose code raised ``error``; None if none did."""
    modules = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    for entry in (entry for group in GROUPS for entry in entry_points(group=f"graphmem.{group}")):
        if entry.module.partition(".")[0] in modules - {"graphmem"}:
            return _origin(entry)
    return None


@cache
def _plugin(word: str, protocol: str, entry: EntryPoint) -> object:
    """The object that a package enters as a plug-in, loaded once. Raises :class:`UsageError` where it cannot be loaded
    or is not of the protocol."""
    try:
        part = entry.load()
    except Exception as error:  # whatever the package raises
        reason = one_line(str(error)) or "no message"
        raise UsageError(
            f"the {word} {entry.name!r} of {_origin(entry)} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    named = f"{entry.value} of {_origin(entry)}"
    if isinstance(part, type):
        raise UsageError(f"{named} is a class; {_a(word)} is an object: name an instance of it")
    lacking = [name for name in _attributes(protocol) if not hasattr(part, name)]
    if lacking:
        what = f"{protocol.replace(':', '.')} says what one is"
        raise UsageError(f"{named} is no {word}, as {what}; it lacks {', '.join(lacking)}")
    if (known := getattr(part, "name", entry.name)) != entry.name:
        raise UsageError(f"{named} is entered as {entry.name!r} and calls itself {known!r}; give it one name")
    return cast("object", part)


def _attributes(protocol: str) -> list[str]:
    """The public attributes that the class declares or defines."""
    if not protocol:
        return []
    module, _, name = protocol.partition(":")
    declared: dict[str, Any] = vars(getattr(importlib.import_module(module), name))
    names = (*declared.get("__annotations__", ()), *declared)
    return [one for one in dict.fromkeys(names) if not one.startswith("_")]


def _key(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _origin(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else f"the entry point {entry.value}"
