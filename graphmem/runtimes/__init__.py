"""The runtimes there are: every module of this package but ``base``, and those that installed packages bring.

A module here gives its runtime as ``RUNTIME``, under the module's own name. A package elsewhere names an object in the
entry-point group :data:`GROUP`, under the runtime's name. Both meet :class:`graphmem.runtimes.base.Runtime`. What is
built in is found by listing the package, so that it does not depend on how, or how lately, graphmem was installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graphmem.plugins import Kind

if TYPE_CHECKING:
    from graphmem.runtimes.base import Runtime

RUNTIMES: Kind[Runtime[Any]] = Kind(
    "runtime", "graphmem.runtimes", package=__name__, attribute="RUNTIME", protocol=f"{__name__}.base:Runtime",
    others=("base",),
)  # fmt: skip
#: The entry-point group of the runtimes of other packages.
GROUP = RUNTIMES.group


def built_in() -> tuple[str, ...]:
    """The names of graphmem's own runtimes, in alphabetical order; none of them is imported."""
    return RUNTIMES.own()


def runtime_names() -> tuple[str, ...]:
    """The names of all runtimes, graphmem's own first. Raises :class:`UsageError` for one that is there twice."""
    return RUNTIMES.names()


def all_runtimes() -> Iterator[Runtime[Any]]:
    """All runtimes in the order of :func:`runtime_names`. Raises :class:`UsageError` for one that cannot be loaded."""
    return RUNTIMES.all()


def runtime_named(name: str) -> Runtime[Any]:
    """The runtime of this name or spelling; case, dashes and underscores do not matter.

    Raises :class:`UsageError` listing the accepted ones, and for a plug-in that cannot be loaded.
    """
    return RUNTIMES.named(name)
