"""The runtimes there are: every module of this package but ``base``, and those that installed packages bring.

A module here gives its runtime as ``RUNTIME``, under the module's own name. A package elsewhere names an object in the
entry-point group :data:`GROUP`, under the runtime's name. Both meet :class:`graphmem.runtimes.base.Runtime`. What is
built in is found by listing the package, so that it does not depend on how, or how lately, graphmem was installed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from graphmem.errors import UsageError

if TYPE_CHECKING:
    from graphmem.runtimes.base import Runtime

#: Entry-point group of the runtimes of other packages.
GROUP = "graphmem.runtimes"
_NO_RUNTIMES = frozenset(("base",))


@cache
def built_in() -> tuple[str, ...]:
    """The names of graphmem's own runtimes, in alphabetical order; none of them is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _NO_RUNTIMES))


def runtime_names() -> tuple[str, ...]:
    """The names of all runtimes, graphmem's own first. Raises :class:`UsageError` for one that is there twice."""
    return (*built_in(), *sorted(_plugged_in()))


def all_runtimes() -> Iterator[Runtime[Any]]:
    """All runtimes in the order of :func:`runtime_names`. Raises :class:`UsageError` for one that cannot be loaded."""
    yield from map(_own, built_in())
    for _, entry in sorted(_plugged_in().items()):
        yield _plugin(entry)


def runtime_named(name: str) -> Runtime[Any]:
    """The runtime of this name or spelling; case, dashes and underscores do not matter.

    Raises :class:`UsageError` listing the accepted ones, and for a plug-in that cannot be loaded.
    """
    key = name.strip().lower().replace("-", "").replace("_", "")
    if key in built_in():
        return _own(key)
    for own in map(_own, built_in()):
        if key in own.spellings:
            return own
    entries = _plugged_in()
    if key in entries:
        return _plugin(entries[key])
    for entry in entries.values():
        plugin = _plugin(entry)
        if key in plugin.spellings:
            return plugin
    raise UsageError(f"unknown runtime {name!r}; accepted: {', '.join((*built_in(), *sorted(entries)))}")


@cache
def _own(name: str) -> Runtime[Any]:
    runtime: Runtime[Any] = importlib.import_module(f"{__name__}.{name}").RUNTIME
    return runtime


def _plugged_in() -> dict[str, EntryPoint]:
    """The entry points by the names of their runtimes. Raises :class:`UsageError` where two have one name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in built_in():
            raise UsageError(f"{_origin(entry)} brings a runtime {entry.name!r}, which is graphmem's own; remove it")
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise UsageError(
                f"{_origin(entry)} and {_origin(other)} both bring a runtime {entry.name!r}; remove one of them"
            )
        found[entry.name] = entry
    return found


@cache
def _plugin(entry: EntryPoint) -> Runtime[Any]:
    from graphmem.runtimes.base import Runtime

    try:
        runtime = entry.load()
    except Exception as error:  # whatever the package raises
        reason = " ".join(str(error).split()) or "no message"
        raise UsageError(
            f"the runtime {entry.name!r} of {_origin(entry)} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error
    named = f"{entry.value} of {_origin(entry)}"
    if isinstance(runtime, type):
        raise UsageError(f"{named} is a class; a runtime is an object: name an instance of it")
    wanted = (name for name in (*vars(Runtime)["__annotations__"], *vars(Runtime)) if not name.startswith("_"))
    lacking = [name for name in dict.fromkeys(wanted) if not hasattr(runtime, name)]
    if lacking:
        raise UsageError(
            f"{named} is no runtime, as graphmem.runtimes.base.Runtime says what one is; it lacks {', '.join(lacking)}"
        )
    if runtime.name != entry.name:
        raise UsageError(f"{named} is entered as {entry.name!r} and calls itself {runtime.name!r}; give it one name")
    return cast("Runtime[Any]", runtime)


def _origin(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else f"the entry point {entry.value}"
