"""Files for others' viewers: the run of an estimate as PyTorch's memory_viz, Perfetto, speedscope and tables have it.

A format is a module of this folder, or an object that an installed package names in the entry-point group
``graphmem.exports``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol, runtime_checkable

from graphmem.base.records import dataclass
from graphmem.errors import TraceError
from graphmem.estimate import Estimate
from graphmem.plugins import Kind
from graphmem.trace import Trace


@dataclass(frozen=True)
class Asked:
    """What an export is asked for beside its estimate: the allocator's settings, the version of PyTorch, and which of
    :data:`graphmem.reports.tables.TABLES` a table is of."""

    alloc_conf: str | None = None
    torch_version: str | None = None
    table: str = "storages"


@runtime_checkable
class Export(Protocol):
    """A way to write the run of an estimate down for another program."""

    #: As ``--format`` names it.
    name: str
    #: Ends of file names that ask for it.
    suffixes: tuple[str, ...] = ()
    #: Whether it is bytes, which no terminal shows.
    is_binary: bool = False

    @abstractmethod
    def render(self, estimate: Estimate, asked: Asked) -> str | bytes:
        """The content of the file. Raises :class:`graphmem.errors.GraphmemError` where this estimate has none."""


EXPORTS: Kind[Export] = Kind(
    "export format",
    group="graphmem.exports",
    package="graphmem.exports",
    attribute="EXPORT",
    protocol="graphmem.exports:Export",
    order=("json", "snapshot", "perfetto", "speedscope", "csv", "parquet"),
)


def export_named(name: str | None, file: str | None = None) -> Export:
    """The export of this name, else that of the end of the file's name, else JSON. Raises
    :class:`graphmem.errors.UsageError` listing those there are."""
    if name is not None:
        return EXPORTS.named(name)
    ends = ((suffix, one) for one in EXPORTS.all() for suffix in one.suffixes)
    fitting = [(len(suffix), one) for suffix, one in ends if (file or "").lower().endswith(suffix)]
    return max(fitting, key=lambda found: found[0])[1] if fitting else EXPORTS.named("json")


def trace_of(estimate: Estimate) -> Trace:
    """The events of the run. Raises :class:`TraceError` where they were not kept."""
    if estimate.trace is None:
        raise TraceError("this analysis keeps no trace")
    return estimate.trace
