"""The runtimes there are: the modules of this package but ``base`` and ``bfc``, and those of installed packages.

A module here gives its runtime as ``RUNTIME``, under the module's own name. A package elsewhere names an object in the
entry-point group :data:`GROUP`, under the runtime's name. Both meet :class:`graphmem.runtimes.base.Runtime`. What is
built in is found by listing the package, so that it does not depend on how, or how lately, graphmem was installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphmem.plugins import Kind

if TYPE_CHECKING:
    from graphmem.runtimes.base import Runtime

RUNTIMES: Kind[Runtime[Any]] = Kind(
    "runtime", "graphmem.runtimes", package=__name__, attribute="RUNTIME", protocol=f"{__name__}.base:Runtime",
    others=("base", "bfc"),
)  # fmt: skip
#: The entry-point group of the runtimes of other packages.
GROUP = RUNTIMES.group


#: The names of graphmem's own runtimes, in alphabetical order; of all; all of them; the one of a name or spelling.
built_in, runtime_names, all_runtimes, runtime_named = RUNTIMES.own, RUNTIMES.names, RUNTIMES.all, RUNTIMES.named
