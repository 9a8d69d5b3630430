"""The facts of ``operators.toml`` about kernels: which write their output over an input, and how far rules go."""

from __future__ import annotations

from collections.abc import Mapping

from graphmem.base.records import dataclass
from graphmem.base.tables import read_table
from graphmem.graph.model import Node

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SharedBuffers:
    """(input, output) positions that share memory, always or where the planner may."""

    alias: Pairs = ()
    in_place: Pairs = ()


@dataclass(frozen=True)
class KernelTable:
    """The facts about one provider's kernels, by operator (:attr:`Node.operator`)."""

    shared: Mapping[str, SharedBuffers]
    without_rule: frozenset[str]
    uses_cublas: frozenset[str]

    def shared_buffers(self, node: Node) -> SharedBuffers:
        """The positions of ``node`` that share memory; operators that are not listed have new buffers."""
        return self.shared.get(node.operator, _NEW_BUFFERS)


_NEW_BUFFERS = SharedBuffers()


def _read() -> dict[str, KernelTable]:
    found = {}
    for provider, table in read_table(__name__.rpartition(".")[0], "operators.toml").items():
        shared = {}
        for row in table["shared"]:
            pairs = (tuple((given, made) for given, made in row.get(key, ())) for key in ("alias", "in_place"))
            shared.update(dict.fromkeys(row["operators"], SharedBuffers(*pairs)))
        found[provider] = KernelTable(shared, frozenset(table["without_rule"]), frozenset(table["uses_cublas"]))
    return found


#: By the name of the provider.
TABLES = _read()
