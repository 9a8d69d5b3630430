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
from typing import TYPE_CHECKING, Any

from graphmem.plugins import Plugins

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
    return _RUNTIMES.names()


def all_runtimes() -> Iterator[Runtime[Any]]:
    """All runtimes in the order of :func:`runtime_names`. Raises :class:`UsageError` for one that cannot be loaded."""
    return _RUNTIMES.all()


def runtime_named(name: str) -> Runtime[Any]:
    """The runtime of this name or spelling; case, dashes and underscores do not matter.

    Raises :class:`UsageError` listing the accepted ones, and for a plug-in that cannot be loaded.
    """
    return _RUNTIMES.named(name)


def _own(name: str) -> Runtime[Any]:
    runtime: Runtime[Any] = importlib.import_module(f"{__name__}.{name}").RUNTIME
    return runtime


def _protocol() -> type:
    from graphmem.runtimes.base import Runtime

    return Runtime


_RUNTIMES: Plugins[Runtime[Any]] = Plugins(GROUP, "runtime", built_in, _own, _protocol)
